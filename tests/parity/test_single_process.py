"""One process: NPUOptimizer beside the bare optimizer and beside a numpy model of the loss scale."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager, FixedLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.gradients import collections
from tests.amp.test_loss_scale import accumulated_states
from tests.goldens import two_layers
from tests.goldens.two_layers import OPTIMIZERS, TF1_OPTIMIZERS, assert_same_bits, token_batches, train

tf1 = tf.compat.v1


class Bare:
    """A Keras optimizer used without us in a TF 1 graph, as carefully as it can be."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def compute_gradients(self, loss):
        return tf1.train.GradientDescentOptimizer(0.0).compute_gradients(loss)

    def apply_gradients(self, grads_and_vars, global_step):
        pairs = [(grad, variable) for grad, variable in grads_and_vars if grad is not None]
        if isinstance(self._optimizer, tf.keras.optimizers.legacy.Optimizer):
            return tf.group(self._optimizer.apply_gradients(pairs), tf1.assign_add(global_step, 1))
        with tf.name_scope(self._optimizer.name), tf.init_scope():
            self._optimizer.build([variable for _, variable in pairs])

        @tf.function
        def update(gradients):
            self._optimizer.apply_gradients(zip(gradients, [variable for _, variable in pairs]))
            return tf.constant(0)

        return tf.group(update([grad for grad, _ in pairs]), tf1.assign_add(global_step, 1))


def make_bare(name):
    return OPTIMIZERS[name]() if name in TF1_OPTIMIZERS else Bare(OPTIMIZERS[name]())


@pytest.mark.parametrize("name", TF1_OPTIMIZERS)
@pytest.mark.parametrize("wrap", [NPUOptimizer, NPUDistributedOptimizer], ids=lambda wrap: wrap.__name__)
def test_without_loss_scale_the_graph_is_that_of_the_bare_optimizer(name, wrap):
    def graph_of(optimizer):
        with tf.Graph().as_default() as graph:
            model = two_layers.TwoLayers()
            wrapped = optimizer()
            wrapped.apply_gradients(wrapped.compute_gradients(model.loss), tf1.train.get_or_create_global_step())
        return graph.as_graph_def()

    ours, bare = graph_of(lambda: wrap(OPTIMIZERS[name]())), graph_of(OPTIMIZERS[name])
    assert [node.name for node in ours.node] == [node.name for node in bare.node]
    assert ours == bare


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_loss_scale_every_bit_is_that_of_the_bare_optimizer(name):
    bare, _ = train(lambda: make_bare(name))
    ours, _ = train(lambda: NPUOptimizer(OPTIMIZERS[name]()))
    assert_same_bits(ours, bare)
    assert np.any(ours["kernel:0"] != train(lambda: make_bare(name), steps=1)[0]["kernel:0"])  # it trains


@pytest.mark.few_fast("each", "not every pair")
@pytest.mark.parametrize("exponent", [0, 10, 33])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_power_of_two_scale_changes_no_bit(name, exponent):
    bare, _ = train(lambda: make_bare(name))
    scaled, _ = train(
        lambda: NPUOptimizer(OPTIMIZERS[name](), FixedLossScaleManager(2.0**exponent), is_loss_scale=True)
    )
    assert_same_bits(scaled, bare)


@pytest.mark.parametrize("name", TF1_OPTIMIZERS)
def test_reference_variables_train_alike(name):
    bare, _ = train(OPTIMIZERS[name], use_resource=False)
    scaled, _ = train(
        lambda: NPULossScaleOptimizer(OPTIMIZERS[name](), FixedLossScaleManager(1024)), use_resource=False
    )
    assert_same_bits(scaled, bare)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda opt, manager: NPUOptimizer(opt, manager, is_loss_scale=True),
        lambda opt, manager: NPUOptimizer(opt, manager, True, True, True),
        NPULossScaleOptimizer,
    ],
    ids=["NPUOptimizer", "distributed and tailed", "NPULossScaleOptimizer"],
)
def test_dynamic_scale_follows_the_numpy_model_over_200_steps(wrap):
    steps, arguments = 200, (2.0**10, 5, 2, 2, 0.8)
    random = np.random.RandomState(7)
    poisons = random.choice([0.0, np.nan, np.inf, -np.inf], size=steps, p=[0.85, 0.05, 0.05, 0.05])
    finites = np.isfinite(poisons)
    states = list(accumulated_states(finites, *np.float32(arguments)))
    expected = list(zip(~finites, [arguments[0], *(scale for scale, _, _ in states)]))

    variables, trace = train(
        lambda: wrap(OPTIMIZERS["momentum"](), ExponentialUpdateLossScaleManager(*arguments)),
        batches=token_batches(steps),
        poisons=poisons,
        fetch=[collections.STEP_SKIPPED, collections.LOSS_SCALE],
    )
    assert [(bool(skipped), scale) for skipped, scale in trace] == expected
    assert (variables["loss_scale:0"], variables["good_steps:0"], variables["bad_steps:0"]) == states[-1]
    assert variables["global_step:0"] == finites.sum()
    two_layers.assert_all_finite(variables)


@pytest.mark.few_fast(3, "other optimizers are judged alike")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_leaves_every_bit(name):
    def optimizer():
        return NPUOptimizer(
            OPTIMIZERS[name](), ExponentialUpdateLossScaleManager(8, 100, 1, 2, 0.5), is_loss_scale=True
        )

    batches = token_batches(4)
    clean, _ = train(optimizer, batches=batches[:2] + batches[3:])
    skipped, _ = train(optimizer, batches=batches, poisons=[0, 0, np.inf, 0])
    scale_state = ("loss_scale:0", "good_steps:0", "bad_steps:0")
    assert skipped["loss_scale:0"] == 4
    assert_same_bits(skipped, {key: value for key, value in clean.items() if key not in scale_state})


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("clip", ["value", "norm", "global norm"])
def test_clipping_does_not_hide_an_overflow(clip, poison):
    clippers = {
        "value": lambda grads: [None if grad is None else tf.clip_by_value(grad, -1.0, 1.0) for grad in grads],
        "norm": lambda grads: [None if grad is None else tf.clip_by_norm(grad, 1.0) for grad in grads],
        "global norm": lambda grads: tf.clip_by_global_norm(grads, 1.0)[0],
    }

    def change(grads_and_vars):
        grads, variables = zip(*grads_and_vars)
        return list(zip(clippers[clip](list(grads)), variables))

    variables, trace = train(
        lambda: NPUOptimizer(OPTIMIZERS["momentum"](), ExponentialUpdateLossScaleManager(8, 100), is_loss_scale=True),
        batches=token_batches(3),
        poisons=[0, poison, 0],
        change=change,
        fetch=[collections.STEP_SKIPPED],
    )
    assert [bool(skipped) for (skipped,) in trace] == [False, True, False]
    two_layers.assert_all_finite(variables)


def test_clipping_acts_on_unscaled_gradients():
    def change(grads_and_vars):
        grads, variables = zip(*grads_and_vars)
        return list(zip(tf.clip_by_global_norm(list(grads), 0.01)[0], variables))

    bare, _ = train(OPTIMIZERS["sgd"], change=change)
    scaled, _ = train(
        lambda: NPUOptimizer(OPTIMIZERS["sgd"](), FixedLossScaleManager(2.0**20), is_loss_scale=True), change=change
    )
    assert_same_bits(scaled, bare)


def test_moving_averages_of_keras_start_with_their_variables_in_whatever_order(graph):
    variable = tf.compat.v1.get_variable("variable", [3], initializer=tf.constant_initializer(2.0))
    inner = tf.keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.75)
    train_op = NPUOptimizer(inner, FixedLossScaleManager(8), is_loss_scale=True).minimize(tf.reduce_sum(variable))
    (average,) = [own for own in inner.variables if own.name.startswith("SGD/average")]
    with tf.compat.v1.Session() as session:
        session.run(average.initializer)
        others = [own for own in tf.compat.v1.global_variables() if own.name != average.name]
        session.run(tf.compat.v1.variables_initializer(others))
        assert list(session.run(average)) == [2.0] * 3
        session.run(train_op)
        assert list(session.run(variable)) == [1.5] * 3
        assert list(session.run(average)) == [0.75 * 2.0 + 0.25 * 1.5] * 3
