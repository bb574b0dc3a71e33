"""Loss scales that move, by every rule, against the same rules in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.amp.loss_scale import DynamicLossScaleManager
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager, FixedLossScaleManager
from tests.refusing import refuses

tf1 = tf.compat.v1


def traced(manager, finites):
    """The scale after each step."""

    @tf.function
    def trace(finites):
        def step(_, finite):
            manager.update_loss_scale(finite)
            return manager.get_loss_scale()

        return tf.scan(step, finites, tf.constant(0.0))

    return trace(tf.constant(finites)).numpy()


def apex(finites, scale=2.0**16, growth=2.0, backoff=0.5, window=2000, least=None, most=2.0**24):
    """Yields scales by APEX's rule: smaller at once at an overflow, larger after a window of good steps."""
    scale, unskipped = min(most, scale), 0
    for finite in finites:
        if not finite:
            scale = scale * backoff if least is None else max(least, scale * backoff)
            unskipped = 0
        else:
            unskipped += 1
        if unskipped == window:
            scale, unskipped = min(most, scale * growth), 0
        yield scale


def mindspore(finites, scale=2.0**24, factor=2.0, window=2000):
    """Yields scales by MindSpore's rule: it counts steps since the scale last moved down."""
    last = 0
    for number, finite in enumerate(finites, 1):
        if not finite:
            scale, last = max(1.0, scale / factor), number
        elif (number - last) % window == 0:
            scale *= factor
        yield scale


def accumulated(*arguments, **in_a_row):
    """Yields the scales of `accumulated_states`."""
    return (scale for scale, _, _ in accumulated_states(*arguments, **in_a_row))


def accumulated_states(finites, scale, window, bad_limit, growth, backoff, in_a_row=False):
    """Yields scales, good and bad steps by the documented rule; with `in_a_row`, bad steps must follow each other."""
    good = bad = 0
    for finite in finites:
        good, bad = (good + 1, 0 if in_a_row else bad) if finite else (0, bad + 1)
        if good == window:
            scale, good, bad = scale * growth, 0, 0
        elif bad == bad_limit:
            scale, good, bad = max(1.0, scale * backoff), 0, 0
        yield scale, good, bad


def random_finites(seed, steps=300, share=0.9):
    return list(np.random.RandomState(seed).rand(steps) < share)


SCRIPTED = [True] * 2000 + [False] + [True] * 1999 + [False] * 3 + [True] * 4001
GROWING = [True] * 60
SHRINKING = [False] * 40
Dynamic = DynamicLossScaleManager
TRACES = {
    "apex, as it comes": (Dynamic.apex, SCRIPTED, lambda f: apex(f)),
    "apex, beyond the bound": (lambda: Dynamic.apex(2.0**30, scale_window=3), GROWING, lambda f: apex(f, 2.0**30)),
    "apex, threefold without a bound": (
        lambda: Dynamic.apex(1.0, 3.0, scale_window=2, max_loss_scale=100.0),
        GROWING,
        lambda f: apex(f, 1.0, 3.0, window=2, most=100.0),
    ),
    "apex, down to a bound": (
        lambda: Dynamic.apex(min_loss_scale=128.0),
        SHRINKING,
        lambda f: apex(f, least=128.0),
    ),
    "apex, at random": (
        lambda: Dynamic.apex(scale_window=7, backoff_factor=0.25),
        random_finites(1),
        lambda f: apex(f, window=7, backoff=0.25),
    ),
    "mindspore, as it comes": (Dynamic.mindspore, SCRIPTED, lambda f: mindspore(f)),
    "mindspore, down": (Dynamic.mindspore, SHRINKING, lambda f: mindspore(f)),
    "keras": (lambda: Dynamic.keras(2.0**15, 9), random_finites(3), lambda f: mindspore(f, 2.0**15, 2.0, 9)),
    "bad steps that add up": (
        lambda: Dynamic(2.0**10, growth_interval=5, bad_steps=2, min_loss_scale=1.0, max_loss_scale=None),
        random_finites(4, share=0.6),
        lambda f: accumulated(f, 2.0**10, 5, 2, 2.0, 0.5),
    ),
    "bad steps in a row": (
        lambda: Dynamic(2.0**10, 2.0, 0.5, 5, 2, True, 1.0, None),
        random_finites(4, share=0.6),
        lambda f: accumulated(f, 2.0**10, 5, 2, 2.0, 0.5, in_a_row=True),
    ),
    "the documented one": (
        lambda: ExponentialUpdateLossScaleManager(2.0**10, 5, 2, 2, 0.5),
        random_finites(4, share=0.6),
        lambda f: accumulated(f, 2.0**10, 5, 2, 2.0, 0.5),
    ),
    "constant": (lambda: Dynamic.constant(128.0), random_finites(5), lambda f: [128.0] * len(f)),
}


@pytest.mark.parametrize("name", TRACES)
def test_the_scale_moves_as_the_rule_says(name):
    make, finites, model = TRACES[name]
    expected = np.array(list(model(finites)), np.float32)
    np.testing.assert_array_equal(traced(make(), finites), expected)
    eager = make()
    for finite, scale in zip(finites[:20], expected):
        assert eager.update_loss_scale(tf.constant(finite)) is None
        assert eager.get_loss_scale() == scale


def test_a_restored_scale_comes_back_into_the_bounds(tmp_path):
    below_one = ExponentialUpdateLossScaleManager(0.25, 1000)
    saved = ((Dynamic.mindspore(2.0**30), Dynamic.apex(), 2.0**24), (below_one, Dynamic.keras(), 1.0))
    for before, after, expected in saved:
        tf.train.Checkpoint(manager=after).read(tf.train.Checkpoint(manager=before).write(str(tmp_path / "checkpoint")))
        after.update_loss_scale(tf.constant(True))
        assert after.get_state() == (expected, 1, 0)
    below_one.update_loss_scale(tf.constant(True))
    assert below_one.get_loss_scale() == 0.25


def test_a_scale_stays_a_normal_number_without_bounds():
    manager = Dynamic(1.0, growth_interval=1, max_loss_scale=None)
    scales = traced(manager, [True] * 140 + [False] * 300)
    assert scales.max() == 2.0**127
    assert scales.min() == np.float32(1e-37)


def in_a_graph(manager_of, run):
    with tf.Graph().as_default():
        manager = manager_of()
        finite = tf1.placeholder(tf.bool, [])
        update = manager.update_loss_scale(finite)
        with tf1.train.MonitoredTrainingSession() as session:
            return run(manager, session, lambda value: session.run(update, {finite: value}))


def test_the_scale_is_set_between_steps_in_a_graph_that_is_finished():
    def run(manager, session, update):
        update(True)
        manager.set_loss_scale(256, session)
        assert session.run("loss_scale:0") == 256.0
        assert tuple(manager.get_state(session)) == (256.0, 0, 0)
        update(True)
        update(True)
        assert tuple(manager.get_state(session)) == (512.0, 0, 0)
        update(True)
        saved = manager.get_state(session)
        update(False)
        manager.set_state(saved, session)
        assert tuple(manager.get_state(session)) == (512.0, 1, 0)
        with pytest.raises(ValueError, match="no session.*session=session"):
            manager.set_loss_scale(1.0)

    in_a_graph(lambda: Dynamic.apex(scale_window=2), run)
    in_a_graph(lambda: ExponentialUpdateLossScaleManager(1024, 2), run)


def test_the_scale_is_set_between_eager_steps_and_those_of_functions():
    manager = Dynamic.apex(scale_window=2)
    update = tf.function(lambda finite: [manager.update_loss_scale(finite), finite][1])
    for value in (64, 64.0, np.float32(64), np.array([64.0]), tf.constant(64.0)):
        update(True)
        manager.set_loss_scale(value)
        assert tuple(manager.get_state()) == (64.0, 0, 0)
    update(True)
    update(True)
    assert manager.get_loss_scale() == 128.0


@refuses(
    (lambda: Dynamic(8, consecutive_bad_steps=3), TypeError, ["consecutive_bad_steps", "3"]),
    (lambda: Dynamic(8, min_loss_scale=16), ValueError, ["init_loss_scale", "16 <=", "8"]),
    (lambda: Dynamic(2**25), ValueError, ["init_loss_scale", "1.67772e+07"]),
    (lambda: Dynamic(8, min_loss_scale=16, max_loss_scale=4), ValueError, ["max_loss_scale", "16 <="]),
    (lambda: Dynamic.apex().set_loss_scale("8"), TypeError, ["set_loss_scale", "'8'", "number"]),
    (lambda: FixedLossScaleManager(8).set_loss_scale(4), TypeError, ["cannot be set", "4 (int)", "constant(8)"]),
    (lambda: Dynamic.apex().set_loss_scale(True), TypeError, ["set_loss_scale", "True"]),
    (lambda: Dynamic.apex().set_loss_scale([8.0, 8.0]), ValueError, ["shape", "(2,)"]),
    (lambda: Dynamic.apex().set_loss_scale(2**25), ValueError, ["set_loss_scale", "1.67772e+07"]),
    (lambda: Dynamic.apex().set_loss_scale(float("nan")), ValueError, ["set_loss_scale", "nan"]),
    (lambda: Dynamic.apex().set_state((8.0, -1, 0)), ValueError, ["good_steps", "-1", "at least 0"]),
    (lambda: Dynamic.apex().set_state((8.0, 0, 2**31)), ValueError, ["bad_steps", "at most 2147483647"]),
)
def test_bad_arguments_are_refused_by_name(make):
    make()


def test_a_manager_is_saved_with_its_model_and_goes_on(tmp_path):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=[2])])
    manager = Dynamic(2.0**10, growth_interval=3, bad_steps=2, consecutive_bad_steps=True, min_loss_scale=2.0)
    model.compile(npu_keras_optimizer(tf.keras.optimizers.SGD(0.1, momentum=0.9), manager), loss="mse")
    data = np.ones([8, 2], np.float32), np.ones([8, 1], np.float32)
    model.fit(*data, batch_size=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.loss_scale == model.optimizer.loss_scale == 2.0**11
    assert loaded.optimizer.initial_scale == 2.0**10
    assert loaded.optimizer.dynamic_growth_steps == 3
    for each in (model, loaded):
        each.fit(*data, batch_size=4, verbose=0)
        assert each.optimizer.loss_scale == 2.0**12  # the counter has continued from 1


def test_one_kind_goes_on_from_the_checkpoint_of_another(tmp_path):
    with tf.Graph().as_default(), tf1.Session() as session:
        update = ExponentialUpdateLossScaleManager(1024, 3).update_loss_scale(tf.constant(True))
        session.run(tf1.global_variables_initializer())
        session.run([update])
        path = tf1.train.Saver().save(session, str(tmp_path / "model"))
    with tf.Graph().as_default(), tf1.Session() as session:
        manager = DynamicLossScaleManager.apex()
        tf1.train.Saver().restore(session, path)
        assert tuple(manager.get_state(session)) == (1024.0, 1, 0)
