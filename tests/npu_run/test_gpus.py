"""Which GPU `npu-run` gives to a rank: the decision and the variable that ranks see, as this needs no GPU."""

from __future__ import annotations

import contextlib

import pytest

from npu_bridge.base.gpus import describe_gpus, gpu_of_rank, usable_gpus
from npu_run.doctor.command import machine_section
from npu_run.errors import LaunchError
from npu_run.job.hosts import plan_job
from tests.npu_run.launching import needs_horovod, npu_run, write_script

SAYS = """
import os, sys
seen = os.environ.get("CUDA_VISIBLE" + "_DEVICES")
sys.stdout.write(f"rank {os.environ['RANK_ID']} sees {seen} \\n")  # at once: no other rank's line can come into it
"""


@pytest.fixture
def devices(tmp_path):
    """A folder such as /dev of a machine with twelve GPUs."""
    for name in ("nvidiactl", "nvidia-uvm", "null", *(f"nvidia{number}" for number in range(12))):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    return str(tmp_path / "dev")


@pytest.mark.parametrize(
    "listed, found",
    [
        (None, list(map(str, range(12)))),
        ("", []),
        ("-1", []),
        ("2, GPU-5a,-1,4", ["2", "GPU-5a"]),
    ],
)
def test_gpus_are_those_of_the_variable_or_of_the_device_files(devices, monkeypatch, listed, found):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert usable_gpus(devices) == found


@pytest.mark.parametrize(
    "listed, device, local_size, gpu",
    [
        ("4,5,6,7", 1, 4, "5"),
        ("4,5,6,7", 6, 4, "6"),  # as a rank table numbers the devices of a machine
        ("4,5,6,7", 3, 2, "7"),
        ("4,5,6,7", 0, 1, None),  # a rank alone may use all of them
        ("7", 1, 4, None),  # a cluster has chosen
        ("4,5", 1, 4, None),
        ("", 1, 4, None),
    ],
)
def test_a_rank_gets_the_gpu_of_its_device(tmp_path, monkeypatch, listed, device, local_size, gpu):
    script = write_script(tmp_path, SAYS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert gpu_of_rank(device, local_size, str(script)) == gpu


@pytest.mark.parametrize("size, gpus", [(2, "4,5"), (1, "4,5"), (2, "4")])
def test_one_device_for_all_ranks_is_refused_where_there_are_more(monkeypatch, size, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv("DEVICE_ID", "0")
    is_refused = size > 1 and "," in gpus
    with pytest.raises(LaunchError, match="DEVICE_ID=0 is set") if is_refused else contextlib.nullcontext():
        plan_job(size)


@pytest.mark.parametrize("place", ["train.py", "devices.py", "lib/devices.py"])
def test_a_script_that_chooses_by_itself_sees_all(tmp_path, monkeypatch, place):
    script = write_script(tmp_path, SAYS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert gpu_of_rank(1, 2, str(script)) == "5"
    write_script(tmp_path, "config.gpu_options.visible_device_list = str(hvd.local_rank())", place)
    assert gpu_of_rank(1, 2, str(script)) is None


@needs_horovod
@pytest.mark.ranks(3)
def test_ranks_see_their_gpus_and_are_told_of_a_shortage_once(tmp_path):
    write_script(tmp_path, SAYS)
    code, output = npu_run("-np", 2, "train.py", cwd=tmp_path, CUDA_VISIBLE_DEVICES="4,5,6")
    assert code == 0 and "rank 0 sees 4 " in output and "rank 1 sees 5 " in output and "GPUs" not in output
    code, output = npu_run("-np", 3, "train.py", cwd=tmp_path, CUDA_VISIBLE_DEVICES="4,5")
    assert code == 0 and output.count("sees 4,5 ") == 3
    assert output.count("npu-run: 3 ranks of this machine have 2 GPUs (4,5) and share them. Expected a GPU") == 1


def test_the_doctor_says_what_ranks_would_get(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert ("GPUs of ranks", "one each, up to 2 ranks: 4, 5 (CUDA_VISIBLE_DEVICES)") in machine_section([]).rows
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert describe_gpus() == "GPU 4 for every rank"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "GPUs of ranks" not in dict(machine_section([]).rows)
