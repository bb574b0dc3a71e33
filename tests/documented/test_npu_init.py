"""The names of the star import, and its helpers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.autograph.pyct import transpiler

from npu_bridge import amp
from npu_bridge.estimator import npu_ops
from npu_bridge.estimator.npu import npu_helpers as helpers
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_hook import NPUBroadcastGlobalVariablesHook
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer, npu_allreduce
from npu_bridge.estimator.npu_unary_ops import npu_unary_ops
from npu_bridge.hccl import hccl_ops
from npu_bridge.optimizers import keras
from npu_bridge.options import with_optimizer_entry
from npu_bridge.stages import ClipByValue

tf1 = tf.compat.v1
REPOSITORY = Path(__file__).parents[2]

# The documented names, by kind.
NAMES = {
    "configuration": "NPURunConfig ProfilingConfig MemoryConfig DumpConfig DynamicInputConfig experimental_options",
    "sessions and estimators": "decorator_tf_session NPUEstimator NPUEstimatorSpec keras_to_npu npu_strategy",
    "hooks": (
        "NPUCheckpointSaverHook NPUOutputTensorHook NPUBroadcastGlobalVariablesHook SetIterationsVarHook "
        "TellMeStepOrLossHook NPUBroadcastGlobalVariablesCallback NpuEmptyHook"
    ),
    "optimizers": (
        "NPUOptimizer NPUDistributedOptimizer KerasDistributeOptimizer npu_distributed_optimizer_wrapper npu_allreduce "
        "NPULossScaleOptimizer FixedLossScaleManager ExponentialUpdateLossScaleManager"
    ),
    "modules": (
        "npu_ops npu_rnn npu_scope util npu_config npu_plugin hccl_ops npu_cpu_ops profiler scoped_graph_manager "
        "npu_unary_ops"
    ),
    "of TensorFlow": "tf config_pb2 rewriter_config_pb2 RewriterConfig session session_run_hook backend os",
    "collectives": (
        "create_group destroy_group get_rank_size get_local_rank_size get_rank_id get_local_rank_id "
        "get_world_rank_from_group_rank get_group_rank_from_world_rank set_split_strategy_by_idx "
        "set_split_strategy_by_size"
    ),
    "helpers": (
        "npu_hooks_append npu_callbacks_append npu_config_proto npu_graph_options npu_optimizer_options "
        "npu_run_config_init set_keras_session_npu_config init_resource shutdown_resource close_session "
        "get_npu_rank_id get_npu_local_rank_id get_npu_rank_size get_npu_local_rank_size npu_keras_optimizer "
        "npu_tf_optimizer npu_clear_session"
    ),
}


def _in_a_process(code):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "HOROVOD"))}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=600, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_star_import_binds_what_is_listed():
    bound = _in_a_process(
        """
import logging, sys
names = set(globals())
from npu_bridge.npu_init import *
bound = sorted(set(globals()) - names - {"names"})
import npu_bridge.npu_init as module
assert bound == sorted(module.__all__), set(bound) ^ set(module.__all__)
assert list(module.__all__) == sorted(module.__all__)
import tensorflow
assert tf is tensorflow.compat.v1 and session.Session is tf.Session and session_run_hook.SessionRunHook
assert backend.set_session and config_pb2.ConfigProto is tf.ConfigProto
assert "horovod" not in sys.modules and not logging.getLogger().handlers
assert npu_config.NPURunConfig is NPURunConfig and npu_config.ExperimentalConfig
assert tf.get_default_graph().get_operations() == []
print(" ".join(bound))
"""
    ).split()
    names = " ".join(NAMES.values()).split()
    assert sorted(bound) == sorted(names)
    assert len(names) == 72


def test_config_proto_is_normalised_in_place():
    config = tf1.ConfigProto(log_device_placement=True, allow_soft_placement=False)
    config.graph_options.optimizer_options.global_jit_level = tf1.OptimizerOptions.ON_1
    assert helpers.npu_config_proto(config) is config
    rewrite = config.graph_options.rewrite_options
    assert [entry.name for entry in rewrite.custom_optimizers] == ["NpuOptimizer"]
    assert config.allow_soft_placement and not config.log_device_placement
    assert (rewrite.remapping, rewrite.memory_optimization) == (RewriterConfig.OFF, RewriterConfig.OFF)
    assert config.graph_options.optimizer_options.global_jit_level == tf1.OptimizerOptions.OFF
    rewrite.custom_optimizers[0].parameter_map["debug_dir"].s = b"here"
    before = config.SerializeToString(deterministic=True)
    assert helpers.npu_config_proto(config).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("argument", [None, 5])
def test_anything_else_becomes_new(argument):
    assert isinstance(helpers.npu_config_proto(argument), tf1.ConfigProto)
    off = tf1.OptimizerOptions.OFF
    assert helpers.npu_graph_options(argument).optimizer_options.global_jit_level == off
    assert helpers.npu_optimizer_options(argument).global_jit_level == off
    assert isinstance(helpers.npu_run_config_init(argument), tf.estimator.RunConfig)


def test_graph_and_optimizer_options_are_changed_in_place():
    graph_options = tf1.GraphOptions(infer_shapes=True)
    assert helpers.npu_graph_options(graph_options) is graph_options and graph_options.infer_shapes
    optimizer_options = tf1.OptimizerOptions(opt_level=tf1.OptimizerOptions.L0)
    assert helpers.npu_optimizer_options(optimizer_options) is optimizer_options
    assert (optimizer_options.global_jit_level, optimizer_options.opt_level) == (-1, tf1.OptimizerOptions.L0)


@pytest.mark.parametrize("make", [tf.estimator.RunConfig, NPURunConfig])
def test_run_config_gets_normalised_session_settings(make):
    given = tf1.ConfigProto(inter_op_parallelism_threads=3)
    config = make(session_config=given)
    assert helpers.npu_run_config_init(config) is config
    assert config.session_config.inter_op_parallelism_threads == 3
    assert config.session_config.allow_soft_placement
    entries = config.session_config.graph_options.rewrite_options.custom_optimizers
    assert {entry.name for entry in entries} == {"NpuOptimizer"}
    assert given == tf1.ConfigProto(inter_op_parallelism_threads=3)


def test_hooks_list_is_appended_to():
    hooks = [tf.estimator.StopAtStepHook(1)]
    assert helpers.npu_hooks_append(hooks) is hooks
    assert len(hooks) == 2 and isinstance(hooks[-1], NPUBroadcastGlobalVariablesHook)
    assert helpers.npu_hooks_append(hooks_list=tuple(hooks))[:2] == hooks


@pytest.mark.parametrize("argument, speaks", [((), False), (None, False), (5, True)])
def test_other_hooks_lists_become_new_ones(argument, speaks, caplog):
    (hook,) = helpers.npu_hooks_append(argument)
    assert isinstance(hook, NPUBroadcastGlobalVariablesHook)
    assert ("npu_hooks_append: hooks_list is not a list" in caplog.text) == speaks


def test_malformed_rank_is_an_error(monkeypatch):
    monkeypatch.setenv("RANK_ID", "first")
    with pytest.raises(ValueError, match="RANK_ID.*'first'"):
        helpers.npu_hooks_append()


def test_who_trains_alone_is_rank_0_of_1():
    getters = (
        helpers.get_npu_rank_id,
        helpers.get_npu_local_rank_id,
        helpers.get_npu_rank_size,
        helpers.get_npu_local_rank_size,
    )
    assert [get() for get in getters] == [0, 0, 1, 1]


@pytest.mark.parametrize("config", [None, tf1.ConfigProto()])
def test_resource_frame_of_scripts(config):
    session, shutdown = helpers.init_resource(config=config)
    tf1.reset_default_graph()
    with tf.Graph().as_default(), tf1.Session() as training:
        assert training.run(tf.constant(1)) == 1
    assert session.run(shutdown) is None
    helpers.shutdown_resource(session, shutdown)
    helpers.shutdown_resource(session, shutdown)
    helpers.close_session(session)
    helpers.shutdown_resource(session, shutdown)
    assert config is None or config == tf1.ConfigProto()
    with pytest.raises(ValueError, match="precision_mode"):
        helpers.init_resource(with_optimizer_entry(None, {"precision_mode": "none"}))


def test_resource_session_is_neither_dumped_nor_profiled(tmp_path, graph):
    config = with_optimizer_entry(None, {"enable_dump": True, "dump_path": str(tmp_path)})
    session, shutdown = helpers.init_resource(config)
    session.run(tf.constant(1.0))
    helpers.shutdown_resource(session, shutdown)
    helpers.close_session(session)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("a start of its own")
def test_keras_trains_in_the_session_that_was_set():
    """As scripts do it, in a process of its own because graph mode holds for the whole process."""
    printed = _in_a_process(
        """
from npu_bridge.npu_init import *
import numpy as np
tf.disable_eager_execution()
npu_sess, npu_shutdown = init_resource()
keras_session = set_keras_session_npu_config(config=tf.ConfigProto(inter_op_parallelism_threads=2))
assert backend.get_session() is keras_session
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
model.compile("sgd", "mse")
model.fit(np.ones([8, 3]), np.ones([8, 1]), epochs=2, verbose=0)
manager = ExponentialUpdateLossScaleManager(1024, 3)
model.compile(NPULossScaleOptimizer(tf.train.AdamOptimizer(), manager), "mse")
model.fit(np.ones([8, 3]), np.ones([8, 1]), batch_size=2, epochs=1, verbose=0)
assert keras_session.run("loss_scale:0") == 2048
npu_clear_session()
assert backend.get_session() is not keras_session
shutdown_resource(npu_sess, npu_shutdown)
close_session(npu_sess)
close_session(keras_session)
print("trained")
"""
    )
    assert printed.strip() == "trained"


def test_experimental_options_are_a_dictionary():
    assert helpers.experimental_options["disable_model_pruning"] is False
    assert (
        set(helpers.experimental_options.values()) == {RewriterConfig.ON, False}
        and len(helpers.experimental_options) == 8
    )


def test_autograph_converts_nothing_of_the_package(monkeypatch):
    """It would take half a minute for a user's `tf.function` that calls the package."""
    convert, converted = transpiler.PyToPy.transform_function, []

    def noting(self, function, context):
        converted.append(function.__module__)
        return convert(self, function, context)

    monkeypatch.setattr(transpiler.PyToPy, "transform_function", noting)
    variable = tf.Variable([1.0, 2.0])
    scaled = helpers.npu_keras_optimizer(keras.LAMB(0.1), FixedLossScaleManager(8.0), stages=[ClipByValue(1.0)])
    plain = NPUOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), is_distributed=True)

    @tf.function
    def step():
        scaled.minimize(lambda: tf.reduce_sum(npu_ops.dropout(variable, 0.5) ** 2), [variable])
        plain.minimize(lambda: tf.reduce_sum(npu_unary_ops.gelu(variable)), var_list=[variable])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable**2)
        with amp.scale_loss(loss, scaled) as scaled_loss:
            scaled_loss.backward(tape, [variable])
        scaled.apply_gradients(amp.unscaled_gradients(scaled))
        return hccl_ops.allreduce(variable, "sum"), npu_allreduce([variable])

    step()
    assert set(converted) == {__name__}
