from __future__ import annotations

import contextlib
import os

import pytest

from npu_bridge.base import environment
from npu_bridge.base.environment import Placement
from npu_bridge.options import read_session_config
from npu_bridge.options.environment_table import VARIABLES


def _set(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


_HOROVOD = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
_OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
_OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
_PMI = {"PMI_RANK": "1", "PMI_SIZE": "2"}
_SLURM = {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
_SLURM |= {"SLURM_LOCALID": "2", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    "variables, placement",
    [
        ({}, None),
        (_HOROVOD, Placement(3, 4, 1, 2)),
        (_OPEN_MPI, Placement(2, 4, 0, 1)),
        ({**_PMI, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, Placement(1, 2, 0, 1)),
        (_PMI, Placement(1, 2, 1, 2)),  # silent about machines: one machine
        ({"PMI_RANK": "6", "PMI_SIZE": "11", **_SLURM}, Placement(6, 11, 2, 4)),
        ({**_PMI, **_SLURM}, Placement(1, 2, 1, 2)),  # what srun started is the launcher
        ({**_OPEN_MPI, **_HOROVOD}, Placement(3, 4, 1, 2)),
    ],
    ids=["none", "Horovod", "Open MPI", "PMI", "silent PMI", "Slurm", "PMI in Slurm", "Horovod before Open MPI"],
)
def test_the_launcher_places_us(monkeypatch, variables, placement):
    _set(monkeypatch, **variables)
    before = dict(os.environ)
    assert environment.launcher_placement() == placement
    if placement is None:
        environment.fill_rank_variables(placement)
        assert dict(os.environ) == before


@pytest.mark.parametrize("rank, size", [("2", "2"), ("-1", "2"), ("x", "2")])
def test_malformed_placement_is_an_error(monkeypatch, rank, size):
    _set(monkeypatch, HOROVOD_RANK=rank, HOROVOD_SIZE=size)
    with pytest.raises(ValueError, match="HOROVOD_RANK"):
        environment.launcher_placement()


@pytest.mark.parametrize(
    "variables, size",
    [
        ({}, 1),
        ({"RANK_SIZE": "8"}, 8),
        ({"CM_WORKER_SIZE": "4"}, 4),
        ({"RANK_SIZE": ""}, 1),
        ({"RANK_SIZE": "eight"}, 1),
        ({"RANK_SIZE": "0"}, "at least 1"),
        ({"RANK_SIZE": "-2"}, "at least 1"),
        ({"RANK_SIZE": "8", "CM_WORKER_SIZE": "8"}, "RANK_SIZE and CM_WORKER_SIZE are both set"),
    ],
    ids=str,
)
def test_declared_world_size(monkeypatch, variables, size):
    _set(monkeypatch, **variables)
    with contextlib.nullcontext() if isinstance(size, int) else pytest.raises(ValueError, match=size):
        assert environment.declared_world_size() == size


def test_declared_rank(monkeypatch):
    assert environment.declared_rank() is None
    _set(monkeypatch, RANK_ID="3")
    assert environment.declared_rank() == 3
    _set(monkeypatch, RANK_ID="first")
    with pytest.raises(ValueError, match="RANK_ID"):
        environment.declared_rank()


def test_declared_device_prefers_the_newer_variable(monkeypatch):
    assert environment.declared_device() == 0
    _set(monkeypatch, DEVICE_ID="2")
    assert environment.declared_device() == 2
    _set(monkeypatch, ASCEND_DEVICE_ID="1")
    assert environment.declared_device() == 1


def test_missing_rank_variables_are_filled(monkeypatch):
    _set(monkeypatch, RANK_ID="7")
    names = ("RANK_SIZE", "DEVICE_ID", "ASCEND_DEVICE_ID", "DEVICE_INDEX", "JOB_ID")
    for name in names:
        monkeypatch.setenv(name, "")
        if name != "DEVICE_ID":  # an empty one is filled, too
            monkeypatch.delenv(name)
    environment.fill_rank_variables(Placement(3, 4, 1, 2))
    filled = {name: os.environ[name] for name in ("RANK_ID", *names)}
    assert list(filled.values()) == ["7", "4", "1", "1", "3", "10087"]


def test_variables_of_a_shell_for_one_device_are_replaced(monkeypatch):
    _set(monkeypatch, RANK_ID="0", RANK_SIZE="1", DEVICE_ID="0", ASCEND_DEVICE_ID="0", DEVICE_INDEX="0", JOB_ID="1")
    environment.fill_rank_variables(Placement(3, 4, 1, 2))
    assert [os.environ[name] for name in ("RANK_ID", "RANK_SIZE", "DEVICE_INDEX", "DEVICE_ID")] == ["3", "4", "3", "0"]


def test_filling_keeps_out_of_a_cluster_manager_job(monkeypatch):
    _set(monkeypatch, CM_WORKER_SIZE="4", DEVICE_ID="0", ASCEND_DEVICE_ID="0")
    environment.fill_rank_variables(Placement(3, 4, 1, 2))
    assert "RANK_SIZE" not in os.environ and "RANK_ID" not in os.environ
    assert environment.declared_world_size() == 4


_CHIEF = {"CM_CHIEF_IP": "10.0.0.1", "CM_CHIEF_PORT": "6000", "CM_CHIEF_DEVICE": "0", "CM_WORKER_SIZE": "8"}


@pytest.mark.parametrize("variables", [{}, {"RANK_TABLE_FILE": "t.json", "RANK_ID": "0", "RANK_SIZE": "1"}, _CHIEF])
def test_consistent_cluster_variables(monkeypatch, variables):
    _set(monkeypatch, **variables)
    environment.check_cluster_variables()


@pytest.mark.parametrize(
    "variables, named",
    [
        ({**_CHIEF, "RANK_TABLE_FILE": "t.json"}, "RANK_TABLE_FILE"),
        ({**_CHIEF, "RANK_ID": "0"}, "RANK_ID"),
        ({**_CHIEF, "RANK_SIZE": "8"}, "RANK_SIZE"),
        ({"CM_CHIEF_IP": "10.0.0.1"}, "CM_CHIEF_PORT"),
        ({**_CHIEF, "CM_CHIEF_PORT": "65521"}, "CM_CHIEF_PORT"),
        ({**_CHIEF, "CM_WORKER_SIZE": "32769"}, "CM_WORKER_SIZE"),
        ({**_CHIEF, "CM_CHIEF_DEVICE": "x"}, "CM_CHIEF_DEVICE"),
    ],
)
def test_contradicting_cluster_variables(monkeypatch, variables, named):
    _set(monkeypatch, **variables)
    with pytest.raises(ValueError, match=named):
        environment.check_cluster_variables()


def test_tf_config(monkeypatch):
    assert environment.read_tf_config() == {}
    for text, parsed in (("", {}), ('{"task": {}}', {"task": {}})):
        _set(monkeypatch, TF_CONFIG=text)
        assert environment.read_tf_config() == parsed
    _set(monkeypatch, TF_CONFIG="[]")
    with pytest.raises(ValueError, match="TF_CONFIG"):
        environment.read_tf_config()


def test_twenty_variables_are_documented():
    assert sum(variable.is_documented for variable in VARIABLES) == 20
    assert len({variable.name for variable in VARIABLES}) == len(VARIABLES)


@pytest.mark.parametrize("text", ["9" * 5000, str(2**63), "1.5", "", "-1", "1e3"], ids=len)
def test_numbers_are_bounded_and_never_wrap(monkeypatch, text):
    assert environment.parse_whole_number(text) is None
    monkeypatch.setenv("FUSION_TENSOR_SIZE", text or "x")
    with pytest.raises(ValueError, match=r"FUSION_TENSOR_SIZE is not a number of bytes.*2\*\*63 - 1") as caught:
        environment.read_positive_number("FUSION_TENSOR_SIZE", 5, "bytes")
    assert len(str(caught.value)) < 500
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", text or "x")
    with pytest.raises(ValueError, match="HCCL_EXEC_TIMEOUT is not a whole number"):
        read_session_config(None)
    monkeypatch.setenv("RANK_ID", text or "x")
    with pytest.raises(ValueError, match="RANK_ID is not a whole number"):
        environment.declared_rank()


def test_numbers_up_to_64_bits_are_read():
    texts = {"0": 0, " 7 ": 7, "007": 7, "000": 0, str(2**63 - 1): 2**63 - 1, "0" * 5000 + "12": 12}
    assert {text: environment.parse_whole_number(text) for text in texts} == texts
