"""The documented operators: where they are, how they are called, and what is refused."""

from __future__ import annotations

import importlib
import inspect
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import npu_bridge
from npu_bridge import experimental
from npu_bridge.estimator import npu_aicore_ops, npu_ops, npu_unary_ops
from npu_bridge.estimator.npu import npu_dynamic_rnn, npu_plugin, npu_rnn
from npu_bridge.helper import helper
from npu_bridge.image import image_ops
from npu_bridge.npu_cpu import lru_cache, npu_cpu_ops
from npu_bridge.options import OPTIONS
from npu_bridge.tbe import npu_cube_ops, npu_vector_ops
from tests.documented.signatures import signature_of
from tests.refusing import refuses

tf1 = tf.compat.v1
REPOSITORY = Path(__file__).parents[2]

# Every module path that scripts import, and some of what they take from it.
MODULES = {
    "npu_bridge": "npu_bridge_handle npu_close helper npu_estimator hccl_ops __version__",
    "npu_bridge.estimator": "npu npu_ops npu_unary_ops npu_aicore_ops",
    "npu_bridge.estimator.npu": "npu_config npu_estimator npu_optimizer npu_hook npu_scope util npu_convert_dropout",
    "npu_bridge.estimator.npu.npu_convert_dropout": "",
    "npu_bridge.estimator.npu_aicore_ops": "npu_aicore_ops",
    "npu_bridge.estimator.npu_unary_ops": "npu_unary_ops gelu",
    "npu_bridge.experimental": "file_constant getshape decode_image",
    "npu_bridge._api": "experimental",
    "npu_bridge._api.experimental": "file_constant get_actual_rank_size get_user_rank_size get_user_rank_id",
    "npu_bridge.hccl": "hccl_ops",
    "npu_bridge.helper": "helper get_gen_ops",
    "npu_bridge.image": "image_ops",
    "npu_bridge.npu_cpu": "npu_cpu_ops lru_cache",
    "npu_bridge.tbe": "npu_cube_ops npu_vector_ops",
    "npu_bridge.tf_adapter": "DT_FLOAT DT_HALF DT_INT64",
}

SIGNATURES = {
    npu_ops.NPUInit: "(name=None)",
    npu_ops.NPUShutdown: "(name=None)",
    npu_ops.dropout: "(x, keep_prob, noise_shape=None, seed=None, name=None, **others)",
    npu_ops.LARSV2: (
        "(input_weight, input_grad, weight_decay, learning_rate, hyperpara=0.001, epsilon=1e-05, use_clip=False, "
        "name=None)"
    ),
    npu_ops.LARS: "(inputs_w, inputs_g, weight_decay, hyperpara=0.001, epsilon=1e-05, name=None)",
    npu_ops.basic_lstm_cell: "(x, h, c, w, b, keep_prob, forget_bias, state_is_tuple, activation, name=None)",
    npu_ops.adam_apply_one_assign: (
        "(input0, input1, input2, input3, input4, mul0_x, mul1_x, mul2_x, mul3_x, add2_y, name=None)"
    ),
    npu_ops.adam_apply_one_with_decay_assign: (
        "(input0, input1, input2, input3, input4, mul0_x, mul1_x, mul2_x, mul3_x, mul4_x, add2_y, name=None)"
    ),
    npu_ops.scatter_elements: "(data, indices, updates, axis=0, name=None)",
    npu_ops.k_means_centroids: "(x, y, sum_square_y, sum_square_x, use_actual_distance=False, name=None)",
    npu_ops.npu_onnx_graph_op: "(inputs, tout, model_path, name=None)",
    npu_ops.outfeed_enqueue_op: "(channel_name, inputs, name=None)",
    npu_ops.outfeed_dequeue_op: "(channel_name, output_types, output_shapes, name=None)",
    npu_ops.stop_outfeed_dequeue_op: "(channel_name, name=None)",
    npu_ops.channel_get_next: "(channel_name, output_types, output_shapes)",
    npu_unary_ops.gelu: "(x)",
    npu_aicore_ops.fast_gelu: "(features)",
    npu_aicore_ops.fast_gelu_v2: "(x, name=None)",
    npu_aicore_ops.centralization: "(x, axes, name=None)",
    npu_aicore_ops.prelu: "(x, weight)",
    npu_aicore_ops.dropout_v3: "(x, keep_prob, noise_shape=None, seed=None, name=None)",
    npu_aicore_ops.dropout_v4: "(x, keep_prob, noise_shape=None, seed=None, output_dtype=tf.bool, name=None)",
    npu_aicore_ops.layer_norm: ("(x, gamma, beta, begin_norm_axis=0, begin_params_axis=0, epsilon=1e-07, name=None)"),
    npu_aicore_ops.nonzero: "(x, transpose=False, output_type=tf.int64, name=None)",
    npu_aicore_ops.nonzerowithvalue: "(x, transpose=False, output_type=tf.int64, name=None)",
    npu_aicore_ops.lru_cache_v2: "(index_list, data, cache, tag, is_last_call, pre_route_count, name=None)",
    npu_cube_ops.deformable_conv2d: (
        "(x, filter, offsets, strides=None, pads=None, data_format='NHWC', dilations=(1, 1, 1, 1), groups=1, "
        "deformable_groups=1, modulated=True, name=None)"
    ),
    npu_vector_ops.lamb_apply_optimizer_assign: (
        "(input0, input1, input2, input3, mul0_x, mul1_x, mul2_x, mul3_x, add2_y, steps, do_use_weight, "
        "weight_decay_rate, name=None)"
    ),
    npu_vector_ops.lamb_apply_weight_assign: "(input0, input1, input2, input3, input4, name=None)",
    npu_cpu_ops.randomchoicewithmask: "(x, count, seed=0, seed2=0)",
    npu_cpu_ops.dense_image_warp: "(image, flow, name=None)",
    npu_cpu_ops.stateless_dropout: "(x, noise_shape, p, seed, offset)",
    npu_cpu_ops.stateless_random_choice_with_mask: "(x, count, seed, offset)",
    npu_cpu_ops.embeddingrankid: "(addr_tensor, index, row_memory=320, mode='mod')",
    image_ops.decode_and_resize_jpeg: "(image, size)",
    image_ops.decode_and_crop_and_resize_jpeg: "(image, crop_size, size)",
    npu_rnn.npu_dynamic_rnn: "(cell, inputs, initial_state=None, dtype=None, sequence_length=None, scope=None)",
    npu_dynamic_rnn.DynamicRNN.__init__: (
        "(self, hidden_size, dtype, cell_type='LSTM', direction='UNIDIRECTIONAL', cell_depth=1, use_peephole=False, "
        "keep_prob=1.0, cell_clip=-1.0, num_proj=0, time_major=True, activation='tanh', forget_bias=0.0, "
        "is_training=True, *, name=None)"
    ),
    npu_dynamic_rnn.DynamicRNN.call: ("(self, x, seq_length=None, init_h=None, init_c=None, weight=None, bias=None)"),
    npu_dynamic_rnn.DynamicGRUV2.__init__: (
        "(self, hidden_size, dtype, direction='UNIDIRECTIONAL', cell_depth=1, keep_prob=1.0, cell_clip=-1.0, "
        "num_proj=0, time_major=True, activation='tanh', gate_order='zrh', reset_after=True, is_training=True, *, "
        "name=None)"
    ),
    npu_dynamic_rnn.DynamicGRUV2.call: "(self, x, seq_length=None, init_h=None)",
    npu_dynamic_rnn.DynamicAUGRU.call: "(self, x, weight_att, seq_length=None, init_h=None)",
    npu_plugin.npu_resource_init: (
        "(graph_run_mode=1, op_debug_level=0, enable_profiling=False, profiling_options=None, precision_mode=None, "
        "enable_scope_fusion_passes=None, enable_exception_dump=2, aoe_mode=None, work_path=None, "
        "op_compiler_cache_mode=None, op_compiler_cache_dir=None, debug_dir=None, hcom_multi_mode=False, "
        "distribute_config=None, aoe_config_file=None, precision_mode_v2=None, export_compile_stat=1, "
        "aicore_num=None, oo_constant_folding=True, input_batch_cpy=False, oo_level='O3', optimization_switch=None)"
    ),
    npu_plugin.set_device_sat_mode: "(mode)",
    npu_plugin.get_rdma_cache: "(data_type, shape, name='rdma_w')",
    npu_plugin.npu_close: "()",
}

REFUSED = {
    npu_ops: "npu_onnx_graph_op",
    npu_aicore_ops: (
        "lru_cache_v2 prod_env_mat_a prodvirialsea prodforcesea tabulatefusionsea tabulatefusionseagrad tabulatefusion "
        "tabulatefusiongrad"
    ),
    npu_cpu_ops: (
        "resize_v2 warp_affine_v2 non_zero_with_value_shape non_zero_with_value_shape_v2 embeddingrankid "
        "embedding_local_index table_to_resource_v2 host_feature_mapping device_feature_mapping batch_enqueue dequeue "
        "batch_dilate_polys resize_and_clip_polys embedding_hashtable_import init_partition_map deinit_embedding "
        "ocr_detection_pre_handle"
    ),
    lru_cache: "LruCache",
    experimental: "file_constant getshape decode_image",
    npu_plugin: "malloc_shared_memory get_var_addr_and_size rdma_remote_init rdma_remote_register init_rdma_pool",
}


@pytest.mark.parametrize("module", MODULES)
def test_modules_hold_what_scripts_take_from_them(module):
    found = importlib.import_module(module)
    for name in MODULES[module].split():
        assert hasattr(found, name)
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        found.nothing_of_this_name  # noqa: B018 - looking is the test


@pytest.mark.parametrize("module", [*MODULES, "npu_bridge.estimator.npu_ops", "npu_bridge.npu_cpu.npu_cpu_ops"])
def test_star_import(module):
    names = {}
    exec(f"from {module} import *", names)
    assert set(getattr(importlib.import_module(module), "__all__", ())) <= set(names)


@pytest.mark.slow("a start for each module; test_floors.py tests that an import does nothing")
def test_a_bare_import_reaches_everything_and_loads_nothing():
    code = """
import sys, npu_bridge
assert "tensorflow" not in sys.modules
assert npu_bridge.estimator.npu.npu_optimizer.NPUOptimizer and npu_bridge.estimator.npu_ops.dropout
assert npu_bridge.hccl.hccl_ops is npu_bridge.hccl_ops and npu_bridge.helper.get_gen_ops
assert npu_bridge.npu_close() is None
import tensorflow as tf
settings = tf.compat.v1.ConfigProto()
entry = settings.graph_options.rewrite_options.custom_optimizers.add(name="NpuOptimizer")
entry.parameter_map["precision_mode"].s = b"none"
try:
    tf.compat.v1.Session(graph=tf.Graph(), config=settings)
    raise SystemExit("the operators alone do not let a session read its options")
except ValueError as error:
    assert "precision_mode" in str(error)
call = tf.keras.layers.Dropout.call
from npu_bridge.estimator.npu import npu_convert_dropout
assert tf.keras.layers.Dropout.call is call
assert tf.compat.v1.get_default_graph().get_operations() == []
from npu_bridge import helper
from npu_bridge.helper import helper as same
assert helper.get_gen_ops is same.get_gen_ops
"""
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=600)


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signature(function):
    assert signature_of(function) == SIGNATURES[function]


@pytest.mark.parametrize("module, name", [(module, name) for module in REFUSED for name in REFUSED[module].split()])
def test_what_needs_a_device_says_so_when_it_is_called(module, name):
    refused = getattr(module, name)
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = [parameter for parameter in inspect.signature(refused).parameters.values() if parameter.kind == plain]
    with pytest.raises(NotImplementedError, match=rf"{name}: not available\. Expected .*; got .*\. \w.*\.$"):
        refused(*[parameter.name for parameter in given])
    assert refused.__doc__.startswith("Raises NotImplementedError: ")


def test_operators_are_in_a_namespace_of_their_name():
    assert npu_unary_ops.npu_unary_ops.gelu is npu_unary_ops.gelu
    operators = set(npu_aicore_ops.__all__) - {"npu_aicore_ops"}
    assert set(vars(npu_aicore_ops.npu_aicore_ops)) == operators
    assert all(getattr(npu_aicore_ops.npu_aicore_ops, name) is getattr(npu_aicore_ops, name) for name in operators)


def test_raw_operators():
    raw = helper.get_gen_ops()
    assert raw.fast_gelu is npu_aicore_ops.fast_gelu and raw.lars_v2 is npu_ops.LARSV2
    assert raw.lamb_apply_weight_assign is npu_vector_ops.lamb_apply_weight_assign
    assert raw.deformable_conv2d is npu_cube_ops.deformable_conv2d and raw.gelu is npu_unary_ops.gelu
    with pytest.raises(NotImplementedError, match="npu_alloc_float_status: not available.* NPULossScaleOptimizer"):
        raw.npu_alloc_float_status()
    assert tf.as_dtype(npu_bridge.tf_adapter.DT_FLOAT) == tf.float32 and npu_vector_ops.PReLU is tf.keras.layers.PReLU
    with pytest.raises(NotImplementedError, match="some_kernel: not available"):
        raw.some_kernel(1, name="x")
    with pytest.raises(AttributeError):
        raw.__wrapped__  # noqa: B018 - looking is the test


def test_starting_and_ending_are_ops(graph):
    ops = [npu_ops.initialize_system(), npu_ops.NPUInit(name="mine"), npu_ops.shutdown_system(), npu_ops.NPUShutdown()]
    assert all(isinstance(op, tf.Operation) for op in ops) and ops[1].name == "mine"
    with tf1.Session() as session:
        assert session.run(ops) == [None] * 4


def test_ranks(monkeypatch):
    assert (experimental.get_actual_rank_size(), experimental.get_user_rank_size()) == (1, 1)
    assert experimental.get_user_rank_id() == 0
    monkeypatch.setenv("RANK_SIZE", "8")
    monkeypatch.setenv("RANK_ID", "3")
    assert (experimental.get_user_rank_size(), experimental.get_user_rank_id()) == (8, 3)


def test_defaults_of_the_process_are_those_of_the_options(caplog):
    for name, parameter in inspect.signature(npu_plugin.npu_resource_init).parameters.items():
        # 0 is what the stack takes an unset op_debug_level for.
        assert parameter.default == (0 if name == "op_debug_level" else OPTIONS[name].default)
    assert npu_plugin.npu_resource_init() is None
    assert not caplog.records


@refuses(
    ({"graph_run_mode": 2}, ValueError),
    ({"graph_run_mode": True}, TypeError),
    ({"op_debug_level": None, "enable_exception_dump": "2"}, TypeError),
    ({"enable_profiling": 1}, TypeError),
    ({"enable_profiling": True}, ValueError),
    ({"precision_mode": "fastest"}, ValueError),
    ({"precision_mode": "force_fp16", "precision_mode_v2": "fp16"}, ValueError),
    ({"aoe_mode": "1", "work_path": "/no/such/folder"}, ValueError),
    says=["npu_resource_init: ", "Expected ", "got "],
)
def test_options_of_the_process_are_checked(given):
    npu_plugin.npu_resource_init(**given)


def test_options_of_the_process_that_would_do_something_elsewhere_are_told(caplog):
    with caplog.at_level(logging.INFO):
        npu_plugin.npu_resource_init(precision_mode_v2="mixed_float16", op_compiler_cache_mode="force", work_path="x")
    texts = [record.getMessage() for record in caplog.records]
    assert any("precision_mode_v2='mixed_float16' is checked, but changes nothing" in text for text in texts)
    assert any("npu_resource_init: op_compiler_cache_mode='force' is kept but has no effect" in text for text in texts)
    npu_plugin.npu_resource_shutdown()
    npu_plugin.npu_close()


def test_overflow_gives_inf_whatever_is_asked_for(caplog):
    assert npu_plugin.is_inf_nan_enabled()
    try:
        npu_plugin.set_device_sat_mode(0)
        assert not npu_plugin.is_inf_nan_enabled() and "an overflow gives Inf" in caplog.text
    finally:
        npu_plugin.set_device_sat_mode(1)
    assert npu_plugin.is_inf_nan_enabled()
    for mode in (2, None):
        with pytest.raises(ValueError, match="set_device_sat_mode: .*Expected 0 or 1"):
            npu_plugin.set_device_sat_mode(mode)


def test_cache_of_zeros(graph):
    cache = npu_plugin.get_rdma_cache(tf.float16, [2, 3])
    assert cache.op.name == "rdma_w" and cache.dtype.base_dtype == tf.float16
    assert cache in tf1.global_variables() and tf1.trainable_variables() == []
    with tf1.Session() as session:
        session.run(cache.initializer)
        np.testing.assert_array_equal(session.run(cache), np.zeros([2, 3]))
