"""`deterministic=1`: the same bits again, with and without a seed of the user's."""

from __future__ import annotations

import pytest
import tensorflow as tf
from tensorflow.python.framework.config import disable_op_determinism, is_op_determinism_enabled

from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.session.determinism import FALLBACK_SEED
from tests.session.models import dataset, session_config
from tests.training import assert_same_bits

tf1 = tf.compat.v1


@pytest.fixture(autouse=True)
def switched_off_again():
    yield
    disable_op_determinism()


def _unseeded_model(features, labels, mode):
    kernel = tf1.get_variable("kernel", [4, 1], initializer=tf1.random_normal_initializer())
    hidden = tf1.nn.dropout(tf.matmul(features, kernel), rate=0.5)
    loss = tf.reduce_mean(tf.square(hidden - labels))
    train_op = tf1.train.AdamOptimizer(0.1).minimize(loss, tf1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def _shuffled():
    return dataset().shuffle(8)


def _train(kind, folder, **options):
    estimator = kind(_unseeded_model, config=NPURunConfig(model_dir=str(folder), deterministic=1, **options))
    estimator.train(_shuffled, steps=5)
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


@pytest.mark.parametrize("kind", [NPUEstimator, tf.estimator.Estimator])
def test_unseeded_training_repeats_its_bits(tmp_path, kind, caplog):
    first = _train(kind, tmp_path / "first")
    assert is_op_determinism_enabled()
    assert_same_bits(_train(kind, tmp_path / "second"), first)
    assert caplog.text.count("random operators need a seed") == 1
    other = _train(kind, tmp_path / "third", tf_random_seed=5)
    assert other["kernel"].tobytes() != first["kernel"].tobytes()


def test_session_gives_its_graph_a_seed():
    def draw():
        with tf.Graph().as_default() as graph, tf1.Session(config=session_config(deterministic=1)) as session:
            assert graph.seed == FALLBACK_SEED
            return session.run(tf.random.normal([3])).tolist()

    assert draw() == draw()


def test_seed_of_the_user_stays():
    with tf.Graph().as_default() as graph:
        tf1.set_random_seed(11)
        with tf1.Session(config=session_config(deterministic=1)):
            assert graph.seed == 11
    assert NPURunConfig(deterministic=1, tf_random_seed=0).tf_random_seed == 0


def test_off_is_off(tmp_path):
    config = NPURunConfig(model_dir=str(tmp_path))
    NPUEstimator(_unseeded_model, config=config)
    with tf.Graph().as_default() as graph, tf1.Session(config=session_config(deterministic=0)):
        assert graph.seed is None
    assert config.tf_random_seed is None and not is_op_determinism_enabled()
