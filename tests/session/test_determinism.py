"""`deterministic=1`: the same bits again, in the session that asked, and nothing else in the process notices."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf.config_pb2 import CallableOptions
from tensorflow.python.framework.config import disable_op_determinism, is_op_determinism_enabled

from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_helpers import close_session, init_resource
from npu_bridge.session.determinism import FALLBACK_SEED
from npu_bridge.session.random_seeds import seed_operators
from tests.goldens.two_layers import assert_same_bits
from tests.session.models import dataset, session_config

tf1 = tf.compat.v1


@pytest.fixture(autouse=True)
def switched_off_again():
    yield
    disable_op_determinism()


def _was_on():
    """An operator that says, when it runs, whether kernels are deterministic."""
    return tf1.py_func(is_op_determinism_enabled, [], tf.bool)


def _draw_without_seed():
    """Does what any script can do later on."""
    with tf.Graph().as_default(), tf1.Session() as session:
        drawn, is_on = session.run([tf.random.normal([3]), _was_on()])
        assert not is_on
        return drawn.tolist()


def _unseeded_model(seen):
    def model_fn(features, labels, mode):
        kernel = tf1.get_variable("kernel", [4, 1], initializer=tf1.random_normal_initializer())
        hidden = tf1.nn.dropout(tf.matmul(features, kernel), rate=0.5)
        loss = tf.reduce_mean(tf.square(hidden - labels)) if labels is not None else tf.reduce_mean(hidden)
        with tf.control_dependencies([tf1.py_func(lambda: seen.append(is_op_determinism_enabled()), [], [])]):
            loss = tf.identity(loss)
        train_op = tf1.train.AdamOptimizer(0.1).minimize(loss, tf1.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, predictions={"loss": loss[tf.newaxis]})

    return model_fn


def _shuffled():
    return dataset().shuffle(8)


def _train(kind, folder, seen, **options):
    estimator = kind(_unseeded_model(seen), config=NPURunConfig(model_dir=str(folder), deterministic=1, **options))
    estimator.train(_shuffled, steps=5)
    return estimator, {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


@pytest.mark.few_fast(1, "both estimators take the same way")
@pytest.mark.parametrize("kind", [NPUEstimator, tf.estimator.Estimator])
def test_unseeded_training_repeats_its_bits_and_leaves_the_process_alone(tmp_path, kind, caplog):
    seen = []
    _, first = _train(kind, tmp_path / "first", seen)
    assert not is_op_determinism_enabled()
    assert _draw_without_seed() != _draw_without_seed()
    estimator, second = _train(kind, tmp_path / "second", seen)
    assert_same_bits(second, first)
    assert caplog.text.count("random operators need a seed") == 1
    _, other = _train(kind, tmp_path / "third", seen, tf_random_seed=5)
    assert other["kernel"].tobytes() != first["kernel"].tobytes()
    estimator.evaluate(_shuffled, steps=1)
    for _ in estimator.predict(lambda: dataset().take(1)):
        assert _draw_without_seed() != _draw_without_seed()  # between two predictions
    assert len(seen) >= 17 and all(seen)


@pytest.mark.parametrize("kind", [tf1.Session, tf1.InteractiveSession])
def test_only_the_session_that_asked_runs_deterministically(graph, kind):
    fed = tf1.placeholder(tf.int32, [])
    was_on = tf.logical_and(_was_on(), fed > 0)
    asked, other = kind(config=session_config(deterministic=1)), tf1.Session()
    for expected, session in ((True, asked), (False, other), (True, asked)):
        assert session.run(was_on, {fed: 1}) == expected
        assert session.make_callable(was_on, [fed])(1) == expected
        if not isinstance(session, tf1.InteractiveSession):  # which has no partial runs in TF 2.15
            handle = session.partial_run_setup([was_on], [fed])
            assert session.partial_run(handle, was_on, {fed: 1}) == expected
        made = session._make_callable_from_options(CallableOptions(feed=[fed.name], fetch=[was_on.name]))
        assert made(np.int32(1)) == [expected]  # as Keras runs its steps in TF 1
        assert not is_op_determinism_enabled()
    with pytest.raises(tf.errors.InvalidArgumentError):
        asked.run(was_on)  # what fails puts the switch back, too
    assert not is_op_determinism_enabled()
    asked.close()
    other.close()


def test_the_switch_of_the_process_is_put_back_when_the_last_run_ends(graph):
    inside, may_end = threading.Barrier(3), threading.Event()

    def wait():
        inside.wait(60)
        may_end.wait(60)
        return is_op_determinism_enabled()

    waited = tf1.py_func(wait, [], tf.bool)
    with tf1.Session(config=session_config(deterministic=1)) as session:
        seen = []
        threads = [threading.Thread(target=lambda: seen.append(session.run(waited))) for _ in range(2)]
        for thread in threads:
            thread.start()
        inside.wait(60)
        assert is_op_determinism_enabled()
        may_end.set()
        for thread in threads:
            thread.join(60)
    assert seen == [True, True] and not is_op_determinism_enabled()


def test_a_process_that_is_deterministic_stays_so():
    tf.config.experimental.enable_op_determinism()
    with tf.Graph().as_default(), tf1.Session(config=session_config(deterministic=1)) as session:
        assert session.run(_was_on())
    assert is_op_determinism_enabled()


def test_seed_of_the_user_stays():
    with tf.Graph().as_default() as graph:
        tf1.set_random_seed(11)
        with tf1.Session(config=session_config(deterministic=1)):
            assert graph.seed == 11
    assert NPURunConfig(deterministic=1, tf_random_seed=0).tf_random_seed == 0


def trained_without_a_seed():
    """The numbers that a graph with dropout draws, and its weights, when the session comes last; on each rank."""
    with tf.Graph().as_default() as graph:
        weights = tf1.get_variable("weights", [6, 3])  # initialised at random
        loss = tf.reduce_sum(tf.square(tf1.nn.dropout(tf.ones([2, 6]), rate=0.5) @ weights - 1.0))
        step = tf1.train.AdamOptimizer(0.1).minimize(loss)
        numbers = tf.data.Dataset.range(30).shuffle(30).map(lambda number: (number, tf.random.uniform([])))
        batches = tf1.data.make_initializable_iterator(numbers)
        in_branch = tf.cond(loss > 0, lambda: tf.random.normal([]), lambda: 0.0)
        seeded = tf.random.normal([], seed=5)
        called = tf.function(lambda value: value * tf.random.normal([3]))(1.0)
        drawn = [called, called + 0.0, in_branch, seeded, *batches.get_next()]
        start = [tf1.global_variables_initializer(), batches.initializer]
        graph.finalize()
        with tf1.Session(config=session_config(deterministic=1)) as session:
            session.run(start)
            seen = [session.run([*drawn, loss, step])[:-1] for _ in range(4)]
            return [np.asarray(value).tolist() for value in [*tf.nest.flatten(seen), session.run(weights)]]


def test_operators_made_without_a_seed_get_one_each(on_ranks, caplog):
    first = trained_without_a_seed()
    assert trained_without_a_seed() == first
    assert "had no seed; the first is 'weights/Initializer" in caplog.text
    called, again, in_branch, seeded, number, uniform, _ = first[:7]
    assert called == again and len({in_branch, seeded, uniform, *called}) == 6
    of_rank_0, of_rank_1 = on_ranks(2, trained_without_a_seed)
    assert of_rank_0 == first
    drawn_alike = [value == other for value, other in zip(of_rank_0[:7], of_rank_1[:7])]
    assert drawn_alike == [False, False, False, True, number == of_rank_1[4], False, False]


def test_a_data_set_with_a_computed_seed_keeps_it(graph):
    tf.raw_ops.ShuffleDataset(
        input_dataset=tf.data.experimental.to_variant(tf.data.Dataset.range(8)),
        buffer_size=8,
        seed=0,
        seed2=tf1.placeholder(tf.int64, []),
        output_types=[tf.int64],
        output_shapes=[[]],
    )
    assert seed_operators(graph, 5) == []


def test_the_session_of_a_resource_is_the_one_that_asked(graph):
    session, _ = init_resource(session_config(deterministic=1))
    assert graph.seed == FALLBACK_SEED and session.run(_was_on())
    close_session(session)
    assert _draw_without_seed() != _draw_without_seed()


def test_off_is_off(tmp_path):
    config = NPURunConfig(model_dir=str(tmp_path))
    NPUEstimator(_unseeded_model([]), config=config)
    with tf.Graph().as_default() as graph, tf1.Session(config=session_config(deterministic=0)) as session:
        assert graph.seed is None and not session.run(_was_on())
    assert config.tf_random_seed is None
