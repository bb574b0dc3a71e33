"""`npu_device`: the documented names, its options, and what they do to functions of TensorFlow 2."""

from __future__ import annotations

import importlib
import os
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import npu_device as npu
from npu_bridge.base.tf_internals.functions import redirect_calls
from npu_bridge.session.precision.rewriter import IMITATION
from npu_device.configs.npu_config import WORKING, NpuConfig
from npu_device.configs.option_tree import OptionTree
from npu_device.train.optimizer import NpuLossScaleOptimizer
from tests.documented.signatures import signature_of

# The signature of each documented name; None for other objects than functions.
NAMES = {
    "npu_device:open": "(device_id=None)",
    "npu_device:global_options": "()",
    "npu_device:set_npu_loop_size": "(loop_size)",
    "npu_device:keep_dtype_scope": "()",
    "npu_device:npu_recompute_scope": "()",
    "npu_device:npu_run_context": "(options=None)",
    "npu_device:set_device_sat_mode": "(mode)",
    "npu_device:is_inf_nan_enabled": "()",
    "npu_device:npu_compat_function": None,
    "npu_device:gen_npu_ops": None,
    "npu_device.npu_device:gen_npu_ops": None,
    "npu_device.npu_device:global_npu_ctx": "()",
    "npu_device.configs:run_context_options": None,
    "npu_device.compat:enable_v1": "()",
    "npu_device.compat.v1:SessionConfigBuilder": None,
    "npu_device.ops:gelu": "(x)",
    "npu_device.distribute:all_reduce": (
        "(values, reduction='mean', fusion=1, fusion_id=-1, group='hccl_world_group')"
    ),
    "npu_device.distribute:broadcast": "(values, root_rank=0, fusion=2, fusion_id=0, group='hccl_world_group')",
    "npu_device.distribute:npu_distributed_keras_optimizer_wrapper": (
        "(optimizer, reduce_reduction='mean', fusion=1, fusion_id=-1, group='hccl_world_group')"
    ),
    "npu_device.distribute:shard_and_rebatch_dataset": "(dataset, global_bs)",
    "npu_device.distribute:grouping_broadcast": "(variables)",
    "npu_device.distribute:grouping_gradients_apply": None,
    "npu_device.distribute:NPUBroadcastGlobalVariablesCallback": None,
    "npu_device.distribute.hccl:npu_callbacks_append": "(callbacks_list=())",
    "npu_device.train.optimizer:NpuLossScaleOptimizer": None,
}
# Options, their defaults, legal values, and wrong ones with what they raise.
OPTIONS = [
    ("graph_run_mode", 1, (0, 1), {2: ValueError, "1": TypeError, True: TypeError}),
    ("precision_mode", None, (None, "allow_mix_precision", "force_fp16", "allow_fp32_to_bf16"), {"x": ValueError}),
    ("precision_mode_v2", None, ("fp16", "origin", "mixed_float16", "mixed_hif8"), {1: ValueError}),
    ("op_compiler_cache_mode", "enable", ("disable", "force"), {"off": ValueError, 1: TypeError}),
    ("hcom_parallel", True, (False, True), {1: TypeError, "1": TypeError}),
    ("deterministic", 0, (1,), {2: ValueError}),
    ("topo_sorting_mode", None, (0, 1, None), {2: ValueError}),
    ("jit_compile", "auto", ("true", "false"), {True: TypeError}),
    ("stream_sync_timeout", -1, (5, "anything"), {}),
    ("graph_memory_max_size", None, (1 << 30, "1024"), {}),
    ("dump_config.dump_mode", "output", ("input", "all"), {"none": ValueError}),
    ("dump_config.dump_path", None, ("/tmp",), {}),
    ("profiling_config.enable_profiling", False, (True,), {"on": TypeError}),
    ("aoe_config.aoe_mode", None, ("1", "2", "4"), {"3": ValueError}),
    ("memory_config.static_memory_policy", 0, (4,), {5: ValueError}),
    ("experimental.multi_branches_config.dynamic_node_type", None, ("0",), {}),
    ("experimental.graph_memory_optimize_config.recompute", None, ("auto", "manual"), {"x": ValueError}),
]


@pytest.mark.parametrize("place", NAMES)
def test_documented_names(place):
    module, _, name = place.partition(":")
    found = getattr(importlib.import_module(module), name)
    if NAMES[place] is not None:
        assert signature_of(found) == NAMES[place]


@pytest.mark.parametrize("path, default, legal, wrong", OPTIONS, ids=[option[0] for option in OPTIONS])
def test_options_are_checked_when_they_are_set(path, default, legal, wrong):
    config = NpuConfig()
    *nested, name = path.split(".")
    for each in nested:
        config = getattr(config, each)
    assert getattr(config, name) == default
    for value in legal:
        setattr(config, name, value)
        assert getattr(config, name) == value
    for value, kind in wrong.items():
        with pytest.raises(kind, match=name):
            setattr(config, name, value)
        assert getattr(config, name) == legal[-1]


def test_an_unknown_option_lists_those_there_are():
    config = NpuConfig()
    with pytest.raises(ValueError, match="ac_parallel_enable.*Did you mean 'precision_mode'"):
        config.precision_mod = "fp16"
    with pytest.raises(AttributeError, match="Did you mean 'dump_path'"):
        config.dump_config.dump_paths  # noqa: B018 - reading it is what fails
    with pytest.raises(TypeError, match="cannot be replaced"):
        config.dump_config = {"enable_dump": True}


def test_deprecated_options_are_kept_and_told(caplog):
    config = NpuConfig()
    config.auto_tune_mode = "RL,GA"
    config.hcom_parallel, config.dump_config.enable_dump = False, False  # on and off by default
    assert "auto_tune_mode is deprecated" in caplog.text
    assert config.changed_options() == {"auto_tune_mode": "RL,GA", "hcom_parallel": False}


@pytest.fixture
def fresh_process(monkeypatch, tmp_path):
    """Resets the process as if nothing was opened before; restores the functions afterwards."""
    for state in (npu.global_options, npu.npu_device._open_devices):
        state.cache_clear()
    monkeypatch.setenv(IMITATION, "1")
    before, environment = context.context().function_call_options, dict(os.environ)
    yield
    context.context().function_call_options = before
    redirect_calls(None)
    os.environ.clear()
    os.environ.update(environment)
    for state in (npu.global_options, npu.npu_device._open_devices):
        state.cache_clear()


def test_a_device_is_opened_once(fresh_process, caplog, monkeypatch):
    monkeypatch.setenv("ASCEND_DEVICE_ID", "1")
    assert npu.npu_device.global_npu_ctx() is None
    handle = npu.open(0)
    monkeypatch.delenv("ASCEND_DEVICE_ID")
    assert npu.open() is handle is npu.open(handle.device_id)
    assert npu.npu_device.global_npu_ctx() is None
    with pytest.raises(RuntimeError, match="another device is open"):
        npu.open(handle.device_id + 1)
    assert handle.as_default() is handle is npu.npu_device.global_npu_ctx()
    assert (handle.workers_num, handle.worker_id, handle.is_cluster_worker()) == (1, 0, False)
    assert tf.DeviceSpec.from_string(handle.name()).device_type in ("CPU", "GPU")
    with handle.scope():
        pass
    npu.global_options().precision_mode = "force_fp16"
    assert "too late" in caplog.text
    with pytest.raises(ValueError, match="loop_size|at least 1"):
        npu.set_npu_loop_size(0)
    npu.set_npu_loop_size(10)


def test_options_that_cannot_be_honoured_fail_when_the_device_is_opened(fresh_process):
    npu.global_options().precision_mode_v2 = "mixed_hif8"
    with pytest.raises(ValueError, match="hif"):
        npu.open()
    npu.global_options().precision_mode_v2 = "fp16"
    npu.global_options().precision_mode = "force_fp16"
    with pytest.raises(ValueError, match="precision_mode"):
        npu.open()


def test_functions_follow_the_precision_mode(fresh_process, caplog):
    caplog.set_level("INFO")
    options = npu.global_options()
    options.precision_mode = "allow_mix_precision"
    options.dump_config.enable_dump, options.oo_constant_folding, options.hcom_parallel = True, False, True
    values = np.random.RandomState(0).randn(32, 32).astype("f")

    def product(given):
        return tf.matmul(given, given)

    exact = tf.function(product)(values).numpy()
    npu.open().as_default()
    rounded = tf.function(product)(values).numpy()
    halves = values.astype(np.float16).astype("f")
    np.testing.assert_allclose(rounded, halves @ halves, rtol=2e-3, atol=2e-3)
    assert np.abs(rounded - exact).max() > 1e-3
    np.testing.assert_array_equal(product(values).numpy(), exact)  # operators that run one by one keep their dtype
    assert "without an effect on TensorFlow's devices: dump_config.enable_dump, oo_constant_folding." in caplog.text


def test_options_that_failed_to_apply_are_applied_by_the_next_call(fresh_process, tmp_path):
    mixlist, ones = tmp_path / "mixlist.json", tf.fill([2, 2], 1.0 + 2.0**-12)
    mixlist.write_text("{}")
    npu.global_options().precision_mode = "allow_mix_precision"
    npu.global_options().modify_mixlist = str(mixlist)
    handle = npu.open()
    mixlist.unlink()
    with pytest.raises(ValueError, match="mixlist.json"):
        handle.as_default()
    assert npu.npu_device.global_npu_ctx() is None
    mixlist.write_text("{}")
    assert handle.as_default() is npu.npu_device.global_npu_ctx()
    np.testing.assert_array_equal(tf.function(tf.matmul)(ones, ones), tf.fill([2, 2], 2.0))


@pytest.mark.parametrize("generation", ["current", "legacy"])
@pytest.mark.parametrize("is_function", [True, False])
def test_the_loss_scale_moves_and_overflows_count_as_iterations(generation, is_function):
    kinds = tf.keras.optimizers if generation == "current" else tf.keras.optimizers.legacy
    optimizer = NpuLossScaleOptimizer(kinds.SGD(0.5), initial_scale=8.0, dynamic_growth_steps=2)
    assert isinstance(optimizer, (NpuLossScaleOptimizer, tf.keras.mixed_precision.LossScaleOptimizer))
    assert (optimizer.dynamic, optimizer.initial_scale, optimizer.dynamic_growth_steps) == (True, 8.0, 2)
    variable = tf.Variable([1.0, 2.0])

    def step(factor):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable) * factor
            scaled = optimizer.get_scaled_loss(loss)
        grads = optimizer.get_unscaled_gradients(tape.gradient(scaled, [variable]))
        optimizer.apply_gradients(zip(grads, [variable]))

    step = tf.function(step) if is_function else step
    expected = [  # factor, then variable, scale, iterations, finite
        (1.0, 0.5, 8.0, 1, True),
        (float("nan"), 0.5, 4.0, 2, False),
        (1.0, 0.0, 4.0, 3, True),
        (1.0, -0.5, 8.0, 4, True),
        (float("inf"), -0.5, 4.0, 5, False),
        *((float("inf"), -0.5, max(1.0, 4.0 / 2**n), 5 + n, False) for n in range(1, 5)),
    ]
    for factor, *state in expected:
        step(tf.constant(factor))
        got = [variable[0], optimizer.loss_scale, optimizer.iterations, optimizer.last_step_finite]
        assert [each.numpy() for each in got] == state


def test_arguments_of_the_loss_scale_optimizer():
    inner = tf.keras.optimizers.SGD(0.1)
    assert NpuLossScaleOptimizer(inner).loss_scale == 2**15
    fixed = NpuLossScaleOptimizer(inner, dynamic=False, initial_scale=4.0)
    assert (fixed.loss_scale, fixed.dynamic, fixed.dynamic_growth_steps) == (4.0, False, None)
    for arguments, kind in (
        ({"dynamic": False}, ValueError),
        ({"dynamic": False, "initial_scale": 2.0, "dynamic_growth_steps": 3}, ValueError),
        ({"dynamic": 128}, TypeError),
        ({"initial_scale": 0}, ValueError),
        ({"dynamic": False, "initial_scale": 0.5}, ValueError),
        ({"dynamic_growth_steps": 2e3}, TypeError),
    ):
        with pytest.raises(kind, match="NpuLossScaleOptimizer: (initial_scale|dynamic)"):
            NpuLossScaleOptimizer(inner, **arguments)
    with pytest.raises(TypeError):
        NpuLossScaleOptimizer("adam")


def test_a_loss_scale_optimizer_is_saved_with_its_model(tmp_path):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
    model.compile(NpuLossScaleOptimizer(tf.keras.optimizers.Adam(0.1), initial_scale=64.0), "mse")
    model.fit(np.ones((4, 2), "f"), np.ones(4, "f"), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, NpuLossScaleOptimizer)
    assert loaded.optimizer.loss_scale == 64.0
    loaded.optimizer.apply_gradients([(each * np.nan, each) for each in loaded.trainable_variables])
    assert loaded.optimizer.iterations.numpy() == 2


def test_alone_a_process_keeps_what_it_has():
    variable, values = tf.Variable([1.0]), [tf.constant(1.0), None]
    assert npu.distribute.all_reduce(values) is values
    assert npu.distribute.broadcast([variable], root_rank=0) is None
    dataset = tf.data.Dataset.range(4)
    assert npu.distribute.shard_and_rebatch_dataset(dataset, 3) == (dataset, 3)
    optimizer = tf.keras.optimizers.SGD(0.1)
    assert npu.distribute.npu_distributed_keras_optimizer_wrapper(optimizer) is optimizer
    assert isinstance(npu.distribute.npu_distributed_keras_optimizer_wrapper("sgd"), tf.keras.optimizers.Optimizer)
    npu.distribute.grouping_broadcast([variable])
    for wrong in ({"reduce_reduction": "sum"}, {"fusion": 5}, {"group": "nobody"}):
        with pytest.raises(ValueError):
            npu.distribute.npu_distributed_keras_optimizer_wrapper("sgd", **wrong)
    with pytest.raises(TypeError, match="variables"):
        npu.distribute.broadcast(tf.constant(1.0))


def test_raw_operators():
    ops = npu.gen_npu_ops
    x = tf.Variable(tf.random.normal([16, 50], seed=1) + 10.0)
    for maker, user, shape in (
        ("drop_out_gen_mask", "drop_out_do_mask", [112]),  # 800 bits, filled up to 896
        ("drop_out_gen_mask_v3", "drop_out_do_mask_v3", [16, 50]),
    ):
        mask = getattr(ops, maker)([16, 50], 0.25, 3, 4, None)
        assert (mask.dtype, mask.shape) == (tf.uint8, shape)
        with tf.GradientTape() as tape:
            dropped = getattr(ops, user)(x, mask, 0.25, None)
        kept = dropped.numpy() != 0
        assert 0.15 < kept.mean() < 0.35
        np.testing.assert_allclose(dropped.numpy()[kept], x.numpy()[kept] / 0.25)
        np.testing.assert_array_equal(tape.gradient(dropped, x).numpy(), kept * 4.0)
        assert np.any(getattr(ops, maker)([16, 50], 0.25, 3, 4, None).numpy() != mask.numpy())  # another one each time
        in_graph = tf.function(getattr(ops, maker))([16, 50], 0.25, 3, 4, None)
        assert in_graph.shape == shape
    with tf.GradientTape() as tape:
        activated = ops.fast_gelu(x)
    np.testing.assert_allclose(ops.fast_gelu_grad(tf.ones_like(x), x), tape.gradient(activated, x), rtol=1e-6)
    np.testing.assert_array_equal(npu.ops.gelu(x), tf.nn.gelu(x))
    refused = ops.fused_layer_norm
    with pytest.raises(NotImplementedError, match="fused_layer_norm"):
        refused(x)


def test_modules_of_version_1_are_those_of_npu_bridge():
    import npu_bridge.estimator.npu.npu_optimizer as same
    import npu_device.compat.v1.estimator.npu.npu_optimizer as other
    from npu_device.compat.v1.estimator import npu_ops

    assert other is same and same.__spec__.name == same.__name__ == "npu_bridge.estimator.npu.npu_optimizer"
    assert npu_ops is sys.modules["npu_bridge.estimator.npu_ops"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("npu_device.compat.v1.nothing")
    builder = npu.compat.v1.SessionConfigBuilder()
    builder.parameter_map["precision_mode"].s = b"force_fp32"
    (entry,) = builder.session_config.graph_options.rewrite_options.custom_optimizers
    assert (entry.name, entry.parameter_map["precision_mode"].s) == ("NpuOptimizer", b"force_fp32")


def test_scripts_of_version_1(warm_python, tmp_path):
    (tmp_path / "script.py").write_text("""
import npu_device
npu_device.compat.enable_v1()
from npu_device.compat.v1.npu_init import *
import npu_bridge.npu_init
assert not tf.executing_eagerly()
assert RewriterConfig is npu_bridge.npu_init.RewriterConfig
loss = tf.reduce_sum(tf.Variable([1.0]))
optimizer = npu_tf_optimizer(tf.train.GradientDescentOptimizer(0.5))
train_op = optimizer.minimize(loss)
config = npu_config_proto()
with tf.Session(config=config) as session:
    session.run(tf.global_variables_initializer())
    session.run(train_op)
    assert session.run(loss) == 0.5
""")
    done = warm_python.run([tmp_path / "script.py"], tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_options_that_work_are_options_of_npu_bridge():
    config = NpuConfig()
    assert set(WORKING) <= set(dir(config))
    assert all(not isinstance(getattr(config, name), OptionTree) for name in WORKING)
