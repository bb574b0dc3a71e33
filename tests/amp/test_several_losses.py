"""Several losses with a loss scale each, on one rank: which scale moves, and what is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import stages
from npu_bridge.amp.custom_loops import scale_loss, unscaled_gradients
from npu_bridge.amp.loss_scale import DynamicLossScaleManager
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.stages import Accumulate
from tests.refusing import refuses

tf1 = tf.compat.v1
Dynamic = DynamicLossScaleManager
INF = np.inf


def two(first=2.0**4, second=2.0**10):
    return [Dynamic.apex(first, scale_window=2), Dynamic.apex(second, scale_window=2)]


def test_copies_of_a_manager_have_scales_of_their_own():
    manager = Dynamic.apex(8.0, scale_window=1)
    copied = copy.deepcopy(manager)
    with tf.Graph().as_default(), tf1.Session() as session:
        update, scales = (
            manager.update_loss_scale(tf.constant(True)),
            [manager.get_loss_scale(), copied.get_loss_scale()],
        )
        session.run(tf1.global_variables_initializer())
        session.run(update)
        assert session.run(scales) == [16.0, 8.0]


def in_graph(make_optimizer, slopes, make_pairs, runs):
    """Trains so many losses `slopes[k] * variable` with fed slopes; gives variable and scales after each run."""
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = tf1.get_variable("variable", initializer=0.0, use_resource=True)
        fed = [tf1.placeholder(tf.float32, []) for _ in range(slopes)]
        managers = two()
        optimizer = make_optimizer(tf1.train.GradientDescentOptimizer(1.0), managers)
        losses = [variable * slope for slope in fed]
        pairs = optimizer.compute_gradients(losses) if make_pairs is None else make_pairs(optimizer, losses)
        train_op = optimizer.apply_gradients(pairs)
        session.run(tf1.global_variables_initializer())
        trace = []
        for values in runs:
            session.run(train_op, dict(zip(fed, values)))
            trace.append((session.run(variable), *(float(manager.get_state(session).scale) for manager in managers)))
        return trace


def scaled(inner, managers, **arguments):
    return NPUOptimizer(inner, managers, True, True, **arguments)


LARGE = 1.5e19  # half of its square is a float32, that of twice as much is not
# The optimizer, how many losses, what computes gradients, the slopes of each run, and variable and scales after it.
TRAININGS = {
    "one of two": (
        scaled,
        1,
        lambda optimizer, losses: optimizer.compute_gradients(losses[0], loss_id=1),
        [(1.0,), (2.0,), (INF,), (4.0,)],
        [(-1.0, 16.0, 2.0**10), (-3.0, 16.0, 2.0**11), (-3.0, 16.0, 2.0**10), (-7.0, 16.0, 2.0**10)],
    ),
    "a shared manager, in any order": (
        scaled,
        3,
        lambda optimizer, losses: optimizer.compute_gradients(losses, loss_id=[1, 0, 1]),
        [(1.0, 1.0, 1.0), (1.0, INF, 1.0), (1.0, 1.0, INF), (1.0, 2.0, 3.0)],
        [(-3.0, 16.0, 2.0**10), (-3.0, 8.0, 2.0**11), (-3.0, 8.0, 2.0**10), (-9.0, 16.0, 2.0**10)],
    ),
    "one manager, so one loss": (
        lambda inner, managers: scaled(inner, managers[0]),
        2,
        None,
        [(1.0, 2.0), (1.0, INF), (1.0, 2.0)],
        [(-3.0, 16.0, 2.0**10), (-3.0, 8.0, 2.0**10), (-6.0, 8.0, 2.0**10)],
    ),
    "no loss scaling": (
        lambda inner, managers: NPUOptimizer(inner),
        2,
        None,
        [(1.0, 2.0), (3.0, 4.0)],
        [(-3.0, 16.0, 2.0**10), (-10.0, 16.0, 2.0**10)],
    ),
    "loss scaling around a distributed optimizer": (
        lambda inner, managers: NPULossScaleOptimizer(NPUDistributedOptimizer(inner), managers, is_distributed=True),
        2,
        None,
        [(1.0, 2.0), (1.0, INF), (1.0, 2.0)],
        [(-3.0, 16.0, 2.0**10), (-3.0, 32.0, 2.0**9), (-6.0, 32.0, 2.0**9)],
    ),
    "windows, whose batches move the scales": (
        lambda inner, managers: scaled(inner, managers, stages=[Accumulate(2)]),
        2,
        None,
        [(1.0, 2.0), (1.0, INF), (3.0, 2.0), (1.0, 2.0)],
        [(0.0, 16.0, 2.0**10), (0.0, 32.0, 2.0**9), (0.0, 32.0, 2.0**9), (-4.0, 64.0, 2.0**10)],
    ),
    # Every scale shrinks. Else the step would be skipped for ever, with scales that grow.
    "a sum that is too large": (
        scaled,
        2,
        None,
        [(LARGE, LARGE), (LARGE, 0.0)],
        [(0.0, 8.0, 2.0**9), (np.float32(-LARGE), 8.0, 2.0**9)],
    ),
    "a clipped sum, judged by what it was made of": (
        scaled,
        2,
        lambda optimizer, losses: [
            (tf.clip_by_value(grad, -1.0, 1.0), variable) for grad, variable in optimizer.compute_gradients(losses)
        ],
        [(1.0, 2.0), (INF, 1.0)],
        [(-1.0, 16.0, 2.0**10), (-1.0, 8.0, 2.0**11)],
    ),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_each_loss_moves_its_own_scale(name):
    *training, expected = TRAININGS[name]
    assert in_graph(*training) == expected


def test_fit_has_one_loss_and_moves_the_first_scale(tmp_path):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=[2])])
    model.compile(npu_keras_optimizer(tf.keras.optimizers.SGD(0.1), two()), loss="mse")
    model.fit(np.ones([8, 2]), np.ones([8, 1]), batch_size=2, verbose=0)
    np.testing.assert_array_equal(model.optimizer.loss_scale, [2.0**6, 2.0**10])
    assert model.optimizer.last_step.loss_scale == (2.0**5, 2.0**10)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.optimizer.loss_scale, [2.0**6, 2.0**10])


def graph_of(make):
    def run():
        with tf.Graph().as_default():
            variable = tf1.get_variable("variable", initializer=0.0)
            make(tf1.train.GradientDescentOptimizer(1.0), [variable * 1.0, variable * 2.0])

    return run


def refused(managers=None, losses=None, **arguments):
    def make(inner, both):
        optimizer = NPUOptimizer(inner, (managers or two)(), True, True)
        optimizer.compute_gradients(both if losses is None else losses(both), **arguments)

    return graph_of(make)


@refuses(
    (refused(losses=lambda both: both[:1]), ValueError, ["2 losses, or loss_id", "1 losses"]),
    (refused(losses=lambda both: []), ValueError, ["no loss", "empty list"]),
    (refused(loss_id=[0]), ValueError, ["a list of 2 positions", "[0]"]),
    (refused(loss_id=1), TypeError, ["a list of 2 positions", "1 (int)"]),
    (refused(loss_id=[0, 2]), ValueError, ["0 <= loss_id < 2", "2 (int)"]),
    (refused(losses=lambda both: both[0], loss_id=2), ValueError, ["0 <= loss_id < 2", "2 (int)"]),
    (refused(losses=lambda both: both[0], loss_id="a"), TypeError, ["loss_id is not an integer", "'a'"]),
    (refused(losses=lambda both: both[0], loss_id=""), TypeError, ["loss_id is not an integer", "''"]),
    (refused(managers=lambda: two()[:1] * 2), ValueError, ["share a loss-scale manager", "twice"]),
    (refused(managers=lambda: [two()[0], 8.0]), TypeError, ["loss_scale_manager", "8.0"]),
    (refused(managers=lambda: []), TypeError, ["loss_scale_manager", "[]"]),
    (refused(managers=lambda: [two()[:1], two()[1]]), ValueError, ["one scale for each loss"]),
    (lambda: scale_loss(tf.constant(1.0), tf.keras.optimizers.SGD()), TypeError, ["cannot scale losses", "SGD"]),
    (lambda: unscaled_gradients(tf.keras.optimizers.SGD()), TypeError, ["cannot scale losses", "NPUOptimizer"]),
)
def test_what_does_not_go_together_is_refused(make):
    make()


def test_a_fixed_scale_is_one_of_several():
    optimizer = npu_keras_optimizer(tf.keras.optimizers.SGD(1.0), [FixedLossScaleManager(8.0), two()[1]])
    variable = tf.Variable(0.0)
    for slopes in ((1.0, 2.0), (INF, 1.0), (1.0, INF)):
        with tf.GradientTape(persistent=True) as tape:
            losses = [variable * slope for slope in slopes]
        for loss_id, loss in enumerate(losses):
            with scale_loss(loss, optimizer, loss_id) as scaled:
                scaled.backward(tape, [variable])
        optimizer.apply_gradients(unscaled_gradients(optimizer))
    assert variable.numpy() == -3.0
    np.testing.assert_array_equal(optimizer.loss_scale, [8.0, 2.0**10])  # grown after two good steps, then halved


def test_checkpoints_name_the_scales_in_the_order_of_the_losses():
    managers = two()
    state = stages.pipeline("named", managers).state()
    assert [state["loss_scale"], state["loss_scale_1"]] == managers
