"""Optimizers of TensorFlow 1 and of its contrib inside a loss scale: they train as by themselves, and skip whole."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager, FixedLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.graph.control_flow import classic_control_flow
from tensorflow1_compat.contrib import opt as contrib
from tensorflow1_compat.contrib import tpu

tf1 = tf.compat.v1


def momentum():
    return tf1.train.MomentumOptimizer(0.1, 0.9)


OPTIMIZERS = {
    "Adadelta": lambda: tf1.train.AdadeltaOptimizer(0.1),
    "AdagradDA": lambda: tf1.train.AdagradDAOptimizer(0.1, tf1.train.get_or_create_global_step()),
    "Ftrl": lambda: tf1.train.FtrlOptimizer(0.1),
    "ProximalAdagrad": lambda: tf1.train.ProximalAdagradOptimizer(0.1),
    "ProximalGradientDescent": lambda: tf1.train.ProximalGradientDescentOptimizer(0.1),
    "RMSProp": lambda: tf1.train.RMSPropOptimizer(0.1, centered=True),
    "MovingAverage": lambda: contrib.MovingAverageOptimizer(momentum(), 0.9),
    "VariableClipping": lambda: contrib.VariableClippingOptimizer(momentum(), {tf1.trainable_variables()[0]: [0]}, 0.5),
    "Multitask": lambda: contrib.MultitaskOptimizerWrapper(momentum()),
    "AdaMax": lambda: contrib.AdaMaxOptimizer(0.1),
    "LazyAdam": lambda: contrib.LazyAdamOptimizer(0.1),
    "Nadam": lambda: contrib.NadamOptimizer(0.1),
    "LARS": lambda: contrib.LARSOptimizer(0.1),
    "CrossShard": lambda: tpu.CrossShardOptimizer(momentum()),
}
# These decay weights beside the loss that reads them, in whatever order comes first, as in TensorFlow 1.15.
OF_CHANCE = {
    "AdamW": lambda: contrib.AdamWOptimizer(0.01, 0.1),
    "MomentumW": lambda: contrib.MomentumWOptimizer(0.01, 0.1, 0.9),
}


def scaled(inner):
    return NPUOptimizer(inner, ExponentialUpdateLossScaleManager(8, 2), True, True)


def train(make, batches, wrap=lambda inner: inner, use_resource=True):
    """Every variable of the script after each step, by name."""
    with tf.Graph().as_default(), classic_control_flow():  # as scripts of TensorFlow 1 have it
        given = tf1.placeholder(tf.float32, [])
        dense = tf1.get_variable("dense", initializer=[1.0, 1.0], use_resource=use_resource)
        rows = tf1.get_variable("rows", initializer=np.full([4, 2], 0.5, np.float32), use_resource=use_resource)
        loss = tf.reduce_sum((dense * tf.gather(rows, [0, 2])) ** 2) * given
        step = tf1.train.get_or_create_global_step()
        update = wrap(make()).minimize(loss, global_step=step)
        kept = [variable for variable in tf1.global_variables() if "loss_scale" not in variable.name]
        found = []
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for batch in batches:
                session.run(update, {given: batch})
                found.append({variable.name: session.run(variable) for variable in kept})
    return found


@pytest.mark.few_fast("each", "not every optimizer in both ways")
@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *OF_CHANCE])
def test_it_trains_as_by_itself_and_skips_whole(name, use_resource):
    make = {**OPTIMIZERS, **OF_CHANCE}[name]
    first, skipped, second = train(make, [1.0, np.inf, 1.0], scaled, use_resource)
    own = {key for key in first if "good" in key or "bad" in key or "scale" in key}  # of the loss scale
    for key in first.keys() - own:
        np.testing.assert_array_equal(skipped[key], first[key], err_msg=key)
    assert second["global_step:0"] == 2
    if name in OPTIMIZERS:
        for found, expected in zip((first, second), train(make, [1.0, 1.0], use_resource=use_resource)):
            for key, value in expected.items():
                np.testing.assert_allclose(found[key], value, rtol=1e-6, err_msg=key)


def sync():
    return tf1.train.SyncReplicasOptimizer(momentum(), 1)


@pytest.mark.parametrize(
    "wrap",
    [
        scaled,
        lambda inner: NPULossScaleOptimizer(inner, FixedLossScaleManager(8)),
        lambda inner: NPULossScaleOptimizer(NPUDistributedOptimizer(inner), FixedLossScaleManager(8)),
    ],
)
def test_one_that_updates_in_a_thread_is_refused(graph, wrap):
    with pytest.raises(
        ValueError, match="SyncReplicasOptimizer updates in a separate thread.*without SyncReplicasOptimizer"
    ):
        wrap(sync())


# Its thread still waits when the session is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "wrap",
    [
        NPUDistributedOptimizer,
        lambda inner: NPULossScaleOptimizer(inner, FixedLossScaleManager(8, enable_overflow_check=False)),
    ],
)
def test_it_is_taken_where_no_step_is_skipped(graph, wrap):
    optimizer = wrap(sync())
    weights = tf1.get_variable("weights", initializer=[1.0])
    update = optimizer.minimize(tf.reduce_sum(weights**2), global_step=tf1.train.get_or_create_global_step())
    hook = optimizer.make_session_run_hook(is_chief=True, num_tokens=0)
    with tf1.train.MonitoredSession(hooks=[hook], stop_grace_period_secs=1) as session:
        session.run(update)
        np.testing.assert_allclose(session.run(weights), [0.8], rtol=1e-6)


def test_a_multitask_wrapper_stands_inside():
    with pytest.raises(TypeError, match=r"NPUOptimizer\(MultitaskOptimizerWrapper\(opt\)\)"):
        contrib.MultitaskOptimizerWrapper(scaled(momentum()))
