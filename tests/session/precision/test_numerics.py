"""The effects of float16 on numbers, and the remedies of loss scaling."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from npu_bridge.estimator.npu.npu_loss_scale_manager import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
)
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.gradients.collections import LOSS_SCALE, STEP_SKIPPED
from npu_bridge.optimizers import tf1 as ours
from tests.session.precision.small_models import precision_of, run_with_graph, session_of, tell_steps, tf1

SMALL = 1e-9  # of the loss: gradients below 6e-8 are 0 in float16
STEPS = 30


def fit(precision, make_manager=None, steps=STEPS):
    """Fits one layer to a target by a loss that is `SMALL`; gives its true losses and per-step facts."""
    with tf.Graph().as_default() as graph:
        random = np.random.RandomState(0)
        inputs = tf.constant(random.randn(32, 6), tf.float32)
        target = tf.constant(random.randn(32, 3), tf.float32)
        kernel = tf1.get_variable("kernel", [6, 3], initializer=tf1.zeros_initializer())
        error = tf.reduce_mean(tf.square(tf.matmul(inputs, kernel) - target))
        manager = make_manager() if make_manager else None
        inner = tf1.train.GradientDescentOptimizer(0.3 / SMALL)
        optimizer = NPUOptimizer(inner, loss_scale_manager=manager, is_loss_scale=manager is not None)
        train_op = optimizer.minimize(error * SMALL, tf1.train.get_or_create_global_step())
        facts = [graph.get_collection(name)[-1:] for name in (LOSS_SCALE, STEP_SKIPPED)]
        init = tf1.global_variables_initializer()
        with session_of(graph, precision) as session:
            session.run(init)
            trace = []
            for step in range(steps):
                tell_steps(step, steps)
                trace.append(session.run([error, *facts, train_op])[:-1])
            return [float(row[0]) for row in trace], trace, session.run(kernel)


def mixed():
    return precision_of(precision_mode_v2="mixed_float16")


def test_gradients_that_underflow_need_loss_scaling():
    exact, _, _ = fit(None)
    without, _, kernel = fit(mixed())
    scaled, _, _ = fit(mixed(), lambda: FixedLossScaleManager(2.0**20))
    assert not np.any(kernel)  # every gradient was rounded to zero
    assert without[-1] > 1.1 * exact[-1]
    np.testing.assert_allclose(scaled[-1], exact[-1], rtol=5e-3)


def test_overflow_lowers_the_scale_and_training_recovers():
    exact, _, _ = fit(None)
    losses, trace, _ = fit(
        mixed(), lambda: ExponentialUpdateLossScaleManager(2.0**50, 1000, 1, 2, 0.5), steps=STEPS + 30
    )
    scales = [float(row[1][0]) for row in trace]
    skipped = [bool(row[2][0]) for row in trace]
    lowered = skipped.index(False)
    assert lowered > 0 and not any(skipped[lowered:])
    assert scales[: lowered + 1] == [2.0 ** (50 - number) for number in range(lowered + 1)]
    assert losses[:lowered] == [losses[0]] * lowered  # a skipped step changes nothing
    np.testing.assert_allclose(losses[lowered + STEPS - 1], exact[-1], rtol=5e-3)


def test_the_loss_scale_goes_on_across_the_switch():
    accelerated = precision_of(experimental_accelerate_train_mode="fast|step|0.5")
    _, trace, _ = fit(accelerated, lambda: ExponentialUpdateLossScaleManager(2.0**20, 6, 1, 2, 0.5), steps=20)
    assert [float(row[1][0]) for row in trace] == [2.0 ** (20 + step // 6) for step in range(20)]


def test_what_computes_an_update_stays_in_float32(graph):
    """In float16 a decay of 0.999 is 1, and step 70000 is infinite."""
    counter = lambda: tf.cast(tf1.train.get_or_create_global_step(), tf.float32)  # noqa: E731
    optimizers = {
        "stock": lambda: tf1.train.AdamOptimizer(0.01),
        "gated": lambda: tf1.train.AdamOptimizer(0.01),
        "keras": lambda: tf.keras.optimizers.Adam(0.01),
        "ours": lambda: ours.LAMB(0.01),
        "scheduled": lambda: tf1.train.GradientDescentOptimizer(0.01 / (1.0 + (counter() + 70000.0) / 70000.0)),
    }
    random, steps, weights = np.random.RandomState(0), [], {}
    inputs = tf.constant(random.randn(32, 6), tf.float32)
    start = random.randn(6, 3).astype(np.float32)
    for name, make in optimizers.items():
        weights[name] = tf1.get_variable(name, initializer=start, use_resource=True)
        loss = tf.reduce_mean(tf.square(tf.matmul(inputs, weights[name]) - 1.0))
        manager = FixedLossScaleManager(128.0) if name == "gated" else None
        optimizer = NPUOptimizer(make(), manager, is_loss_scale=manager is not None)
        with tf.name_scope(name):
            steps.append(optimizer.minimize(loss, var_list=[weights[name]]))
    kept = {variable.name: variable for variable in tf1.global_variables() if variable.shape.rank == 0}
    seen = []
    for mode in ("origin", "fp16"):
        with session_of(graph, precision_of(precision_mode_v2=mode)) as session:
            session.run(tf1.global_variables_initializer())
            for _ in range(60):
                session.run(steps)
            seen.append((session.run(kept), session.run(weights)))
            nodes = run_with_graph(session, steps)[1]
    (exact, exact_weights), (lowered, lowered_weights) = seen
    assert lowered == exact and any("beta2_power" in name for name in exact)
    for name, value in exact_weights.items():
        assert np.max(np.abs(value - lowered_weights[name])) < 0.02 * np.max(np.abs(value - start)), name
    half = {node.name for node in nodes if node.attr["T"].type == tf.float16.as_datatype_enum}
    assert any("MatMul" in name for name in half)
    assert [name for name in half if any(f"/{part}/" in name for part in ("Adam", "LAMB", "update"))] == []
