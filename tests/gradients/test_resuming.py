"""Trainings resume from checkpoints of others, on one rank: by savers, sessions, Estimators and Keras."""

from __future__ import annotations

import contextlib
import logging

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import optimizers, stages
from npu_bridge.base.errors import say_once
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.npu_init import npu_keras_optimizer

tf1 = tf.compat.v1
BEGUN, DROPPED = "missing in the checkpoint: ", "dropped, as nothing here uses it: "
HALF = {"groups": [["kernel"], ["bias"]], "kind": "explicit", "sequence": [0, 1]}
ADDED = {
    "nothing": lambda: [],
    "window": lambda: [stages.Accumulate(3)],
    "freeze": lambda: [stages.Freeze(HALF)],
    "both": lambda: [stages.Accumulate(3), stages.Freeze(HALF)],
    "top k": lambda: [stages.TopK(0.5)],
}


@pytest.fixture(autouse=True)
def said_anew(caplog):
    say_once.cache_clear()
    caplog.set_level(logging.WARNING)


def told(caplog, word):
    """The lines that tell what is begun or dropped, without what comes before it."""
    return [line.partition(word)[2] for line in caplog.messages if word in line]


def step_of(added, more=(), inner=None, read=0.0):
    """Variables and a training step in the default graph."""
    kernel = tf1.get_variable("kernel", [4, 1], initializer=tf1.ones_initializer())
    bias = tf1.get_variable("bias", [1], initializer=tf1.zeros_initializer())
    for name in more:
        tf1.get_variable(name, [2])
    features = tf.constant(np.random.RandomState(0).randn(8, 4), tf.float32)
    loss = tf.reduce_mean(tf.square(tf.matmul(features, kernel) + bias - 1.0)) + 0.0 * tf.reduce_sum(read)
    inner = tf1.train.MomentumOptimizer(0.1, 0.9) if inner is None else inner()
    optimizer = NPUDistributedOptimizer(inner, stages=ADDED[added]())
    return optimizer, optimizer.minimize(loss, tf1.train.get_or_create_global_step())


def monitored(folder, added, steps):
    """Trains in a `MonitoredTrainingSession`; returns the global step at the end."""
    with tf.Graph().as_default():
        _, train_op = step_of(added)
        step = tf1.train.get_global_step()
        with tf1.train.MonitoredTrainingSession(
            checkpoint_dir=folder, save_checkpoint_steps=100, save_summaries_steps=None, log_step_count_steps=None
        ) as session:
            for _ in range(steps):
                session.run(train_op)
            return session.run(step)


def test_a_monitored_session_goes_on_when_stages_come_and_go(tmp_path, caplog):
    folder = str(tmp_path)
    assert monitored(folder, "nothing", 4) == 4
    monitored(folder, "both", 3)
    (begun,) = told(caplog, BEGUN)
    assert begun == (
        "Accumulate's sums (2 variables), Accumulate's count of batches (1 variable), Freeze's count of updates "
        "(1 variable); they start from their initial values."
    )
    caplog.clear()
    monitored(folder, "both", 1)
    assert not told(caplog, BEGUN) and not told(caplog, DROPPED)
    assert monitored(folder, "top k", 1) == 6  # the window's four batches made one update
    (dropped,) = told(caplog, DROPPED)
    assert "Accumulate's sums (2 variables)" in dropped and "Freeze's count" in dropped
    names = {name for name, _ in tf.train.list_variables(folder)}
    assert names == {"kernel", "bias", "kernel/Momentum", "bias/Momentum", "global_step"}


def model_fn(features, labels, mode, params):
    _, train_op = step_of(params["added"], read=features)
    # The loss of the spec takes a batch in each step, so that a training ends with its data.
    loss = tf.reduce_sum(tf1.trainable_variables()[0]) + 0.0 * tf.reduce_sum(features)
    return NPUEstimatorSpec(mode, loss=loss, train_op=train_op)


def estimator(folder, added, **arguments):
    config = NPURunConfig(model_dir=folder, log_step_count_steps=None, save_summary_steps=0)
    return NPUEstimator(model_fn, config=config, params={"added": added}, **arguments)


def one_batch():
    return tf.data.Dataset.from_tensors(([0.0], [0.0])).repeat()


def test_an_estimator_trains_again_in_its_folder_and_starts_warm_from_others(tmp_path, caplog):
    folder = str(tmp_path / "first")
    estimator(folder, "nothing").train(one_batch, steps=4)
    estimator(folder, "window").train(lambda: one_batch().take(4))  # one of them in a window of its own
    assert len(told(caplog, BEGUN)) == 1
    assert tf.train.load_variable(folder, "accumulated/kernel").any()
    estimator(folder, "nothing").train(one_batch, steps=1)
    assert len(told(caplog, DROPPED)) == 1
    everything = tf.estimator.WarmStartSettings(folder, vars_to_warm_start=[".*"])
    warm = str(tmp_path / "warm")
    caplog.clear()
    estimator(warm, "freeze", warm_start_from=everything).train(one_batch, steps=1)
    assert told(caplog, BEGUN) == ["Freeze's count of updates (1 variable); they start from their initial values."]
    assert tf.train.load_variable(warm, "global_step") == tf.train.load_variable(folder, "global_step") + 1


@pytest.mark.parametrize("missing", [("extra", "other"), ("global_step",)])
def test_what_is_the_users_is_not_begun_anew(tmp_path, missing):
    path = f"{tmp_path}/less"
    with tf.Graph().as_default(), tf1.Session() as session:
        step_of("nothing")
        session.run(tf1.global_variables_initializer())
        saved = [variable for variable in tf1.global_variables() if variable.op.name not in missing]
        tf1.train.Saver(saved).save(session, path, write_meta_graph=False)
    with tf.Graph().as_default(), tf1.Session() as session:
        step_of("window", more=[name for name in missing if name != "global_step"])
        session.run(tf1.global_variables_initializer())
        before = session.run(tf1.global_variables())
        with pytest.raises(tf.errors.NotFoundError) as refused:
            tf1.train.Saver().restore(session, path)
        assert str(refused.value).startswith(f"checkpoint: {path} lacks {len(missing)} variable")
        assert ", ".join(missing) in str(refused.value) and "accumulated" not in str(refused.value)
        assert len(str(refused.value)) < 500 + len(path)
        for value, now in zip(before, session.run(tf1.global_variables())):
            assert np.array_equal(value, now)


def test_savers_of_dictionaries_and_parts_and_other_rules(tmp_path, caplog):
    """Slots of a variable in parts are begun; one that starts as a copy begins with the restored value."""
    path = f"{tmp_path}/sgd"

    def build(inner, **added):
        table = tf1.get_variable("table", [6, 2], partitioner=tf1.fixed_size_partitioner(3), use_resource=True)
        kernel = tf1.get_variable("kernel", [3], use_resource=True)
        loss = tf.add_n([tf.reduce_sum(tf.square(part)) for part in (*table, kernel)])
        optimizer = NPUOptimizer(inner, **added)
        return optimizer, optimizer.minimize(loss), kernel, list(table)

    with tf.Graph().as_default(), tf1.Session() as session:
        _, _, kernel, table = build(tf1.train.GradientDescentOptimizer(0.1))
        session.run(tf1.global_variables_initializer())
        tf1.train.Saver({"called": kernel, "table": table}).save(session, path, write_meta_graph=False)
        expected = session.run([kernel, *table])
    with tf.Graph().as_default(), tf1.Session() as session:
        scale = {"loss_scale_manager": ExponentialUpdateLossScaleManager(8.0, 2), "is_loss_scale": True}
        _, train_op, kernel, table = build(tf.keras.optimizers.SGD(0.1, use_ema=True), **scale)
        own = {id(variable) for variable in (kernel, *table)}
        others = {v.name.partition(":")[0]: v for v in tf1.global_variables() if id(v) not in own}
        saver = tf1.train.Saver({"called": kernel, "table": table, **others})
        averages = [v for name, v in others.items() if name.endswith("average/kernel")]
        tf1.get_default_graph().finalize()
        saver.restore(session, path)
        for value, now in zip(expected, session.run([kernel, *table])):
            assert np.array_equal(value, now)
        assert np.array_equal(session.run(averages[0]), expected[0])
        session.run(train_op)
    (begun,) = told(caplog, BEGUN)
    assert "slots of the optimizer" in begun and "loss_scale, good_steps, bad_steps" in begun


def test_a_session_is_restored_outside_the_block_of_its_graph(tmp_path, caplog):
    path = f"{tmp_path}/model"
    with tf.Graph().as_default(), tf1.Session() as session:
        step_of("nothing", inner=lambda: tf1.train.GradientDescentOptimizer(0.1))
        session.run(tf1.global_variables_initializer())
        tf1.train.Saver().save(session, path, write_meta_graph=False)
    with tf.Graph().as_default() as graph:
        optimizer, train_op = step_of("nothing", inner=lambda: optimizers.tf1.LAMB(0.1))
        saver = tf1.train.Saver()
    with tf.Graph().as_default(), contextlib.closing(tf1.Session(graph=graph)) as session:
        saver.restore(session, path)
        session.run(train_op)
        states = optimizer.get_states(session)
        assert states["step_counter"] == 1 and set(states["m"]) == {"kernel", "bias"}
        optimizer.set_states({**states, "step_counter": 7}, session)
        assert optimizer.get_states(session)["step_counter"] == 7
    assert "slots of the optimizer (5 variables)" in told(caplog, BEGUN)[0]


def test_a_manager_made_eagerly_goes_on_from_its_checkpoint(tmp_path):
    manager = ExponentialUpdateLossScaleManager(8.0, 1)
    for expected in (16.0, 32.0):
        with tf.Graph().as_default():
            loss = tf1.get_variable("w", initializer=1.0) ** 2
            optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.1), manager, True, True)
            train_op = optimizer.minimize(loss, tf1.train.get_or_create_global_step())
            with tf1.train.MonitoredTrainingSession(checkpoint_dir=str(tmp_path), log_step_count_steps=None) as session:
                session.run(train_op)
                assert session.run("loss_scale:0") == expected


KERAS = {"current": tf.keras.optimizers, "legacy": tf.keras.optimizers.legacy}


def keras_model(generation, added, manager=None):
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.layers.Dense(3, activation="tanh"), tf.keras.layers.Dense(1)])
    model.compile(npu_keras_optimizer(KERAS[generation].Adam(0.05), manager, stages=ADDED[added]()), "mse")
    model.build([None, 4])
    return model


def fit(model, epochs=1):
    features = np.random.RandomState(0).randn(64, 4).astype(np.float32)
    model.fit(features, features.sum(axis=1), batch_size=16, epochs=epochs, verbose=0, shuffle=False)


@pytest.mark.slow("several trainings; files of Keras are fast")
@pytest.mark.parametrize("generation", KERAS)
def test_keras_checkpoints_tell_what_is_begun_and_dropped(tmp_path, caplog, generation):
    path = str(tmp_path / "weights")
    before = keras_model(generation, "window", ExponentialUpdateLossScaleManager(8.0, 2))
    fit(before)
    before.save_weights(path)
    same = keras_model(generation, "window", ExponentialUpdateLossScaleManager(8.0, 2))
    same.load_weights(path).expect_partial()
    fit(same)
    assert not told(caplog, BEGUN) and not told(caplog, DROPPED)
    fit(before)
    for one, other in zip(before.get_weights(), same.get_weights()):
        assert np.array_equal(one, other)
    after = keras_model(generation, "freeze")
    after.load_weights(path).expect_partial()
    fit(after)
    assert int(after.optimizer.iterations) == 1 + 4
    assert told(caplog, BEGUN) == ["Freeze's count of updates (1 variable); they start from their initial values."]
    (dropped,) = told(caplog, DROPPED)
    assert "Accumulate's sums" in dropped and "loss_scale" in dropped


@pytest.mark.slow("both formats of Keras")
@pytest.mark.parametrize("of_file", [".weights.h5", ".keras"])
def test_files_of_keras_are_read_where_they_fit(tmp_path, caplog, of_file):
    path = str(tmp_path / f"file{of_file}")
    before = keras_model("current", "both")
    fit(before)
    (before.save_weights if of_file == ".weights.h5" else before.save)(path)

    def sums_of(optimizer):
        kept = [variable for variable in optimizer.state_variables if variable.name.startswith("accumulated")]
        return [variable.numpy() for variable in kept]

    sums = sums_of(before.optimizer)
    assert sums[0] == 1 and any(value.any() for value in sums[1:])
    if of_file == ".keras":
        after = tf.keras.models.load_model(path)
        assert not told(caplog, BEGUN) and not told(caplog, DROPPED)
    else:
        after = keras_model("current", "window", ExponentialUpdateLossScaleManager(8.0, 2))
        after.optimizer.build(after.trainable_variables)
        after.load_weights(path)
        assert "loss_scale, good_steps, bad_steps" in told(caplog, BEGUN)[0]
        assert told(caplog, DROPPED) == ["Freeze's count of updates (1 variable)."]
    assert int(after.optimizer.iterations) == int(before.optimizer.iterations)
    for one, other in zip(sums, sums_of(after.optimizer), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("generation", KERAS)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_states_are_set_on_a_fresh_keras_optimizer(generation, is_wrapped):
    faces = optimizers.keras if generation == "current" else optimizers.keras_legacy

    def made():
        own = faces.LAMB(0.01)
        variables = [tf.Variable([1.0, 2.0], name="first"), tf.Variable([3.0], name="second")]
        return own, npu_keras_optimizer(own) if is_wrapped else own, variables

    def step(optimizer, variables):
        loss = tf.function(lambda: tf.add_n([tf.reduce_sum(tf.square(variable)) for variable in variables]))
        optimizer.minimize(loss, variables)

    own, optimizer, variables = made()
    for _ in range(3):
        step(optimizer, variables)
    states = optimizer.get_states()
    fresh_own, fresh, copies = made()
    for copy, variable in zip(copies, variables):
        copy.assign(variable)
    fresh.set_states(states)
    assert fresh.get_states()["step_counter"] == 3
    assert set(fresh.get_states()) == set(states)  # also before there are slots
    step(optimizer, variables)
    step(fresh, copies)
    for one, other in zip(variables, copies):
        assert np.array_equal(one.numpy(), other.numpy())
    wrong_own, wrong, others = made()
    wrong.set_states({**states, "m": {"frist": np.zeros([2])}})
    with pytest.raises(ValueError, match="Did you mean 'm of first'"):
        step(wrong, others)
    with pytest.raises(TypeError, match="m is not a dictionary"):
        made()[1].set_states({"m": np.zeros([2])})


BAD_STATES = [
    (None, TypeError, "the states are not a dictionary. Expected a dictionary by slot name; got None"),
    (3, TypeError, "the states are not a dictionary"),
    ({"m": 3}, TypeError, "m is not a dictionary. Expected a dictionary of arrays by variable; got 3"),
    *[({"step_counter": v}, TypeError, "step_counter is not a number of updates") for v in (1.5, True, "1", None, [1])],
    *[({"step_counter": value}, ValueError, "step_counter is out of range") for value in (-1, 2**70)],
    (
        {"m": {"first": np.ones(2) * 1j}},
        TypeError,
        "m of first has numbers of another kind. Expected an array of float",
    ),
    ({"m": {"first": ["a", "b"]}}, TypeError, "m of first has numbers of another kind"),
    ({"m": {"first": None}}, TypeError, "m of first has numbers of another kind"),
    ({"m": {"first": [[1.0], 2.0]}}, TypeError, "m of first has numbers of another kind"),
    ({"m": {"first": np.array([True, False])}}, TypeError, "m of first has numbers of another kind"),
]


@pytest.mark.parametrize("is_graph", [False, True], ids=["eagerly", "graph"])
def test_states_of_another_form_are_refused(is_graph):
    with tf.Graph().as_default() if is_graph else contextlib.nullcontext():
        optimizer = optimizers.tf1.LAMB(0.01) if is_graph else optimizers.keras.LAMB(0.01)
        variable = tf1.get_variable("first", initializer=[1.0, 2.0], use_resource=True)
        if is_graph:
            train_op = optimizer.minimize(tf.reduce_sum(variable**2), var_list=[variable])
        else:
            optimizer.minimize(lambda: tf.reduce_sum(variable**2), [variable])
        with tf1.Session() if is_graph else contextlib.nullcontext() as session:
            if is_graph:
                session.run(tf1.global_variables_initializer())
                session.run(train_op)
            before = optimizer.get_states()
            for states, error, words in BAD_STATES:
                with pytest.raises(error, match=f"LAMB: {words}"):
                    optimizer.set_states({"v": {"first": [7.0, 7.0]}, **states} if isinstance(states, dict) else states)
            np.testing.assert_equal(optimizer.get_states(), before)
            optimizer.set_states({"step_counter": np.int32(5), "m": {"first": np.array([1, 2])}})
            after = optimizer.get_states()
    assert after["step_counter"] == 5 and after["m"]["first"].tolist() == [1.0, 2.0]
    if not is_graph:
        for states, error, words in BAD_STATES:
            fresh = optimizers.keras.LAMB(0.01)
            with pytest.raises(error, match=words):
                fresh.set_states(states)
                fresh.build([variable])


@pytest.mark.slow("several traces")
def test_a_second_trace_finds_the_variables_of_the_first():
    variables = [tf.Variable([1.0, 2.0], name="first"), tf.Variable([[3.0]], name="second")]
    optimizer = npu_keras_optimizer(
        tf.keras.optimizers.Adam(0.1), ExponentialUpdateLossScaleManager(8.0, 2), stages=ADDED["window"]()
    )

    @tf.function
    def step(factor):
        optimizer.minimize(
            lambda: tf.reduce_sum(factor) * tf.add_n([tf.reduce_sum(tf.square(each)) for each in variables]), variables
        )

    step(tf.constant(1.0))
    made = [variable.ref() for variable in optimizer.variables]
    step(tf.constant([1.0, 2.0]))
    step(tf.constant([[1.0]]))
    assert [variable.ref() for variable in optimizer.variables] == made
    assert step.experimental_get_tracing_count() >= 3 and int(optimizer.iterations) == 1
