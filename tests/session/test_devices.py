"""Which GPU a session sees; the decision, as this needs no GPU."""

from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge.options import read_session_config
from npu_bridge.session.devices import choose_devices, requested_devices, visible_gpus
from tests.npu_run.test_hosts import write_table
from tests.session.models import session_config


def _options(**values):
    return read_session_config(session_config(**values))


def test_first_that_speaks_decides(monkeypatch, tmp_path):
    assert requested_devices(_options()) == ()
    monkeypatch.setenv("HOROVOD_RANK", "5")
    monkeypatch.setenv("HOROVOD_SIZE", "8")
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "1")
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "4")
    assert requested_devices(_options()) == (1,)
    monkeypatch.setenv("DEVICE_ID", "2")
    assert requested_devices(_options()) == (2,)
    monkeypatch.setenv("ASCEND_DEVICE_ID", "3")
    assert requested_devices(_options()) == (3,)
    monkeypatch.setenv("RANK_TABLE_FILE", write_table(tmp_path, [("a", [(0, 4)])]))
    assert requested_devices(_options()) == (4,)
    assert requested_devices(_options(local_device_list="5,6")) == (5, 6)
    assert requested_devices(_options(local_device_list="5,6", session_device_id=0)) == (0,)


def test_malformed_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("ASCEND_DEVICE_ID", "first")
    with pytest.raises(ValueError, match="ASCEND_DEVICE_ID.*'first'"):
        requested_devices(_options())


@pytest.mark.parametrize(
    "ordinals, gpu_count, visible, warns",
    [((), 2, [], False), ((1,), 2, [1], False), ((5,), 2, [1], True), ((0, 1, 2), 2, [0, 1], True)],
)
def test_ordinals_beyond_the_last_gpu_share_one(ordinals, gpu_count, visible, warns, caplog):
    assert visible_gpus(ordinals, gpu_count) == visible
    assert ("fewer GPUs than devices" in caplog.text) == warns


@pytest.mark.parametrize("listed, warns", [("3", False), ("3,1", True), (None, True)])
def test_the_one_gpu_that_was_chosen_for_this_process_is_its_own(listed, warns, monkeypatch, caplog):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_gpus((2,), 1) == [0]
    assert ("fewer GPUs than devices" in caplog.text) == warns


def test_settings_of_the_script_stay_and_without_a_gpu_nothing_happens(monkeypatch):
    config = tf.compat.v1.ConfigProto()
    config.gpu_options.visible_device_list = "3"
    choose_devices(_options(session_device_id=1), config)
    assert config.gpu_options.visible_device_list == "3"
    if not tf.config.list_physical_devices("GPU"):
        config = tf.compat.v1.ConfigProto()
        choose_devices(_options(session_device_id=1), config)
        assert not config.gpu_options.visible_device_list


@pytest.mark.parametrize("text, allows", [("0", False), ("1", True), ("yes", None)])
def test_the_variable_for_short_float32_decides_about_tf32(text, allows, monkeypatch):
    arithmetic = tf.config.experimental
    before = arithmetic.tensor_float_32_execution_enabled()
    monkeypatch.setenv("ENABLE_HF32_EXECUTION", text)
    try:
        if allows is None:
            with pytest.raises(ValueError, match="ENABLE_HF32_EXECUTION.*Expected 0 or 1; got 'yes'"):
                choose_devices(_options(), tf.compat.v1.ConfigProto())
        else:
            arithmetic.enable_tensor_float_32_execution(not allows)
            choose_devices(_options(), tf.compat.v1.ConfigProto())
            assert arithmetic.tensor_float_32_execution_enabled() is allows
    finally:
        arithmetic.enable_tensor_float_32_execution(before)
