"""The documented optimizers: signatures, errors, delegation, and what a step looks like in a graph."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
)
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.gradients import collections
from npu_bridge.gradients.stages.accumulation import Accumulate
from tests.documented.signatures import signature_of
from tests.goldens.two_layers import (
    OPTIMIZERS,
    TF1_OPTIMIZERS,
    TwoLayers,
    assert_all_finite,
    assert_same_bits,
    token_batches,
    train,
)
from tests.ranks.ways import started_session
from tests.refusing import refuses

tf1 = tf.compat.v1
pytestmark = pytest.mark.usefixtures("graph")

SIGNATURES = {
    NPUOptimizer: (
        "(opt, loss_scale_manager=None, is_distributed=False, is_loss_scale=False, is_tailing_optimization=False, "
        "name=None)"
    ),
    NPUDistributedOptimizer: "(optimizer, is_weight_update_sharding=False, name=None)",
    NPULossScaleOptimizer: "(opt, loss_scale_manager, is_distributed=False)",
    FixedLossScaleManager: "(loss_scale, enable_overflow_check=True)",
    ExponentialUpdateLossScaleManager: (
        "(init_loss_scale, incr_every_n_steps, decr_every_n_nan_or_inf=2, incr_ratio=2, decr_ratio=0.8)"
    ),
    NPUOptimizer.compute_gradients: (
        "(self, loss, var_list=None, gate_gradients=1, aggregation_method=None, colocate_gradients_with_ops=False, "
        "grad_loss=None)"
    ),
    NPUOptimizer.apply_gradients: "(self, grads_and_vars, global_step=None, name=None)",
}


def scaled(name="momentum", scale=8.0, **arguments):
    return NPUOptimizer(OPTIMIZERS[name](), FixedLossScaleManager(scale), is_loss_scale=True, **arguments)


@pytest.mark.parametrize("documented", SIGNATURES, ids=lambda documented: documented.__qualname__)
def test_signature(documented):
    # Arguments of our own are keyword-only, so that they never get in the way of a documented argument.
    assert signature_of(documented, has_keyword_only=False) == SIGNATURES[documented]


def test_default_names_tell_the_inner_optimizer():
    adam = tf1.train.AdamOptimizer()
    manager = FixedLossScaleManager(1)
    assert NPUOptimizer(adam).get_name() == "NPUOptimizerAdamOptimizer"
    assert NPUDistributedOptimizer(adam).get_name() == "DistributedAdamOptimizer"
    assert NPULossScaleOptimizer(adam, manager).get_name() == "NPULossScaleOptimizerAdamOptimizer"
    assert NPUOptimizer(adam, name="mine").get_name() == "mine"
    assert isinstance(NPUOptimizer(adam), tf1.train.Optimizer)


@refuses(
    (lambda: NPUOptimizer(OPTIMIZERS["sgd"](), is_loss_scale=True), ValueError, ["manager", "None"]),
    (lambda: NPULossScaleOptimizer(OPTIMIZERS["sgd"](), None), ValueError, ["loss_scale_manager", "None"]),
    (lambda: NPUOptimizer("adam"), TypeError, ["NPUOptimizer", "'adam'", "str"]),
    (lambda: NPUDistributedOptimizer(3), TypeError, ["NPUDistributedOptimizer", "int"]),
    (
        lambda: NPULossScaleOptimizer(OPTIMIZERS["sgd"](), 1024),
        TypeError,
        ["FixedLossScaleManager or an ExponentialUpdateLossScaleManager", "FixedLossScaleManager(1024)", "int"],
    ),
    (lambda: NPUOptimizer(NPUDistributedOptimizer(OPTIMIZERS["sgd"]()), is_distributed=True), ValueError, ["twice"]),
    (
        lambda: NPUDistributedOptimizer(scaled("sgd"), is_weight_update_sharding=True),
        ValueError,
        ["NPULossScaleOptimizer(NPUDistributedOptimizer(opt)", "outside"],
    ),
    (
        lambda: NPUDistributedOptimizer(tf.keras.optimizers.Adam(global_clipnorm=2.0), True),
        ValueError,
        ["is_weight_update_sharding", "global_clipnorm", "2.0", "tf.clip_by_global_norm"],
    ),
)
def test_bad_arguments_are_refused(make):
    make()


@pytest.mark.parametrize(
    "make, option",
    [
        (lambda value: NPUOptimizer(OPTIMIZERS["sgd"](), is_distributed=value), "is_distributed"),
        (lambda value: NPUOptimizer(OPTIMIZERS["sgd"](), is_tailing_optimization=value), "is_tailing_optimization"),
        (lambda value: NPUOptimizer(OPTIMIZERS["sgd"](), FixedLossScaleManager(8), False, value), "is_loss_scale"),
        (lambda value: NPUDistributedOptimizer(OPTIMIZERS["sgd"](), value), "is_weight_update_sharding"),
        (lambda value: NPULossScaleOptimizer(OPTIMIZERS["sgd"](), FixedLossScaleManager(8), value), "is_distributed"),
        (lambda value: npu_keras_optimizer(OPTIMIZERS["keras_legacy_adam"](), is_distributed=value), "is_distributed"),
        (lambda value: FixedLossScaleManager(1, enable_overflow_check=value), "enable_overflow_check"),
    ],
)
def test_switches_are_true_or_false(make, option):
    for value in (True, False, 0, 1, np.bool_(True), np.int64(0)):
        make(value)
    for value in ("yes", 2, 1.0, None, [True]):
        with pytest.raises(TypeError, match=f"{option} is not a boolean. Expected True or False; got"):
            make(value)


def test_what_is_no_manager_is_refused_also_where_it_has_no_effect():
    for value in (3, "x" * 5000):
        with pytest.raises(TypeError, match="needs a manager as loss_scale_manager") as caught:
            NPUOptimizer(OPTIMIZERS["sgd"](), value)
        assert len(str(caught.value)) < 500


def test_an_ignored_manager_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING, logger="npu_bridge"):
        NPUOptimizer(OPTIMIZERS["sgd"](), FixedLossScaleManager(8))
    assert "NPUOptimizer: the loss is not scaled: loss_scale_manager has no effect" in caplog.text
    assert "is_loss_scale=True" in caplog.text


@pytest.mark.slow("several starts")
def test_a_scheduled_rate_of_keras_starts_in_any_order():
    """The initialiser of all variables runs them as it likes; 200 rates meet every order."""
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.5)
    weight = tf1.get_variable("weight", [], initializer=tf1.ones_initializer(), use_resource=True)
    optimizers = [tf.keras.optimizers.SGD(schedule) for _ in range(4)]
    wrapped = [NPUOptimizer(optimizer) for optimizer in optimizers]
    train_op = wrapped[0].minimize(weight * 1.0, var_list=[weight])
    rates = [optimizer.learning_rate for optimizer in optimizers]
    start = tf1.global_variables_initializer()
    for _ in range(50):
        with tf1.Session() as session:
            session.run(start)
            assert session.run(rates) == [0.5] * 4
    with tf1.Session() as session:
        session.run(optimizers[0].iterations.initializer)
        session.run(optimizers[0].iterations.assign(10))  # restored, say
        session.run(rates[0].initializer)
        assert session.run([rates[0], optimizers[0].iterations]) == [0.25, 10]
        session.run(start)
        session.run(train_op)
        assert session.run(weight) == 0.5


def test_optimizers_that_train_in_separate_runs_may_have_one_moving_scale(caplog):
    """Two in one graph, and one of another graph; only a run with both would read one scale and change it twice."""
    manager = ExponentialUpdateLossScaleManager(8, 2)
    for count in (2, 1):
        with tf.Graph().as_default(), caplog.at_level(logging.WARNING, logger="npu_bridge"):
            loss = tf.reduce_sum(tf1.get_variable("weight", [2]))
            steps = [NPULossScaleOptimizer(OPTIMIZERS["sgd"](), manager).minimize(loss) for _ in range(count)]
            with tf1.Session() as session:
                session.run(tf1.global_variables_initializer())
                for step in steps:
                    session.run(step)
                assert "changes a loss scale" not in caplog.text
                session.run(steps)
        assert ("changes a loss scale" in caplog.text) == (count == 2)
        caplog.clear()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_and_variables_are_those_of_the_inner_optimizer(name):
    expected_slots = {"sgd": [], "momentum": ["momentum"]}.get(name, ["m", "v"])
    model = TwoLayers()
    optimizer = scaled(name)
    optimizer.minimize(model.loss)
    assert optimizer.get_slot_names() == expected_slots
    for slot in expected_slots:
        assert optimizer.get_slot(model.kernel, slot).shape == model.kernel.shape
    assert optimizer.get_slot(model.kernel, "no such slot") is None
    # iteration counters and powers come on top of one slot per updated variable
    assert len(optimizer.variables()) >= 2 * len(expected_slots)


def test_attributes_of_the_inner_optimizer_show_through():
    assert NPUOptimizer(tf1.train.AdamOptimizer(0.25))._lr == 0.25
    assert NPUOptimizer(tf.keras.optimizers.legacy.Adam(0.25)).beta_1 is not None
    with pytest.raises(AttributeError):
        _ = NPUOptimizer(tf1.train.AdamOptimizer(0.25)).learning_rat


@pytest.mark.parametrize("is_tailing", [False, True])
def test_none_stays_none_and_sparse_stays_sparse(is_tailing):
    model = TwoLayers()
    optimizer = scaled(is_distributed=True, is_tailing_optimization=is_tailing)
    grads = [grad for grad, _ in optimizer.compute_gradients(model.loss, model.variables())]
    assert isinstance(grads[0], tf.IndexedSlices)
    assert isinstance(grads[1], tf.Tensor)
    assert grads[2] is None


def test_no_gradient_at_all_is_the_inner_error():
    model = TwoLayers()
    for name in OPTIMIZERS:
        with pytest.raises(ValueError, match="No gradients provided"):
            scaled(name).apply_gradients([(None, model.kernel)])


def test_fixed_scale_without_overflow_check_applies_everything():
    """Documented for NPULossScaleOptimizer; NPUOptimizer checks in any case."""

    def unchecked(opt):
        return NPULossScaleOptimizer(opt, FixedLossScaleManager(8, enable_overflow_check=False))

    variables, _ = train(lambda: unchecked(OPTIMIZERS["sgd"]()), batches=token_batches(1), poisons=[np.inf])
    assert not np.all(np.isfinite(variables["kernel:0"]))
    checked, _ = train(
        lambda: NPUOptimizer(OPTIMIZERS["sgd"](), FixedLossScaleManager(8, False), is_loss_scale=True),
        batches=token_batches(1),
        poisons=[np.inf],
    )
    assert_all_finite(checked)


def test_a_dropped_step_blames_float16_only_where_gradients_are_sent(caplog):
    loss = tf1.get_variable("v", []) * float("nan")
    train = NPUOptimizer(OPTIMIZERS["sgd"](), wire="float16", stages=[Accumulate(1)]).minimize(loss)
    with started_session() as session:
        session.run(train)
    assert "a step was dropped, because a gradient is NaN or infinite" in caplog.text


def test_two_losses_of_one_optimizer_are_judged_apart():
    """As in a GAN: the overflow of one loss does not skip the step of the other."""
    generator = tf1.get_variable("generator", [], initializer=tf1.ones_initializer())
    discriminator = tf1.get_variable("discriminator", [], initializer=tf1.ones_initializer())
    poison = tf1.placeholder(tf.float32, [])
    optimizer = scaled("sgd")
    for_generator = optimizer.compute_gradients(generator * poison, [generator])
    for_discriminator = optimizer.compute_gradients(discriminator * 2.0, [discriminator])
    steps = [optimizer.apply_gradients(for_generator), optimizer.apply_gradients(for_discriminator)]
    with started_session() as session:
        session.run(steps, {poison: np.nan})
        assert session.run([generator, discriminator]) == [1.0, np.float32(1.0 - 0.1 * 2.0)]
        assert len(tf1.get_collection(collections.STEP_SKIPPED)) == 2


def test_gradients_computed_once_and_applied_twice_are_judged_apart():
    variable = tf1.get_variable("variable", [], initializer=tf1.ones_initializer())
    optimizer = scaled("sgd")
    ((grad, _),) = optimizer.compute_gradients(variable * 2.0, [variable])
    poisoned = optimizer.apply_gradients([(grad * np.nan, variable)])
    overflow = optimizer.last_step.overflow
    clean = optimizer.apply_gradients([(grad * 0.5, variable)])
    with started_session() as session:
        session.run(poisoned)
        assert session.run(variable) == 1.0
        assert session.run([overflow, optimizer.last_step.overflow]) == [True, False]
        session.run(clean)
        assert session.run(variable) == np.float32(1.0 - 0.1)


@pytest.mark.parametrize("scope", ["", "train/"])
def test_scripts_fetch_the_decision_by_its_name(scope):
    """As hooks and loops of ported scripts do, for one optimizer and for the two of a GAN."""
    variable = tf1.get_variable("variable", [], initializer=tf1.ones_initializer())
    poison = tf1.placeholder_with_default(1.0, [])
    with tf1.name_scope(scope):
        first = NPULossScaleOptimizer(OPTIMIZERS["sgd"](), FixedLossScaleManager(8)).minimize(variable * poison)
        second = scaled("sgd").minimize(variable * 2.0)
    names = [f"{scope}overflow_status_reduce_all:0", f"{scope}overflow_status_reduce_all_1:0"]
    with started_session() as session:
        assert session.run([*names, first, second])[:2] == [True, True]
        assert session.run([*names, first, second], {poison: np.inf})[:2] == [False, True]


def test_loss_scaling_may_stand_inside_the_distribution():
    """A nesting that ported scripts have; the numbers are those of the other one."""
    poisons = [0.0] * 5 + [np.nan] + [0.0] * 6

    def scaling(optimizer):
        return NPULossScaleOptimizer(optimizer, ExponentialUpdateLossScaleManager(1024, 5, 1, 2, 0.5))

    inside, _ = train(lambda: NPUDistributedOptimizer(scaling(OPTIMIZERS["adam"]())), steps=12, poisons=poisons)
    outside, _ = train(lambda: scaling(NPUDistributedOptimizer(OPTIMIZERS["adam"]())), steps=12, poisons=poisons)
    assert_same_bits(inside, outside)
    assert inside["loss_scale:0"] == 2048 and inside["global_step:0"] == 11


def test_hooks_see_the_unscaled_loss_of_nested_optimizers():
    model = TwoLayers()
    optimizer = NPULossScaleOptimizer(NPUDistributedOptimizer(OPTIMIZERS["sgd"]()), FixedLossScaleManager(1024))
    optimizer.minimize(model.loss)
    assert tf1.get_collection(collections.UNSCALED_LOSS)[-1] is model.loss


def test_a_fixed_scale_made_in_another_graph_serves_this_one():
    """As with a manager at the top of a script and a model function."""
    with tf.Graph().as_default():
        manager = FixedLossScaleManager(8)
    model = TwoLayers()
    NPUOptimizer(OPTIMIZERS["sgd"](), manager, is_loss_scale=True).minimize(model.loss)
    with tf1.Session() as session:
        assert session.run("loss_scale:0") == 8


@pytest.mark.parametrize("name", TF1_OPTIMIZERS)
def test_checkpoints_are_those_of_the_bare_optimizer_plus_the_scale(name):
    """A checkpoint made without loss scaling can be continued with it, and a checkpoint with it without."""
    bare, _ = train(OPTIMIZERS[name], steps=1)
    ours, _ = train(
        lambda: NPUOptimizer(OPTIMIZERS[name](), ExponentialUpdateLossScaleManager(8, 9), is_loss_scale=True),
        steps=1,
    )
    assert set(ours) == set(bare) | {"loss_scale:0", "good_steps:0", "bad_steps:0"}
