"""The model: its start, its gradients, and what padding may not change."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf
from masking import feature_shapes
from model import ModelSize, masked_language_model
from vocabulary import PAD_ID, SPECIAL_PIECES

SIZE = ModelSize(vocab_size=500, hidden_size=32, num_layers=2, num_heads=4, ffn_size=64, max_positions=24, dropout=0.0)
BATCH, LENGTH = 6, 24


@pytest.fixture
def features():
    rng = np.random.default_rng(5)
    values = {name: np.zeros((BATCH, width), kind) for name, (kind, width) in feature_shapes(LENGTH).items()}
    values["token_ids"][:, :20] = rng.integers(len(SPECIAL_PIECES), SIZE.vocab_size, (BATCH, 20))
    values["segment_ids"][:, 10:20] = 1
    values["target_positions"][:] = [1, 5, 9, 0]
    values["target_ids"][:] = rng.integers(len(SPECIAL_PIECES), SIZE.vocab_size, (BATCH, 4))
    values["target_weights"][:] = [1, 1, 1, 0]
    return values


def build(features, size=SIZE, training=True):
    tf.compat.v1.set_random_seed(1)
    return masked_language_model({name: tf.constant(value) for name, value in features.items()}, size, training)


def start():
    session = tf.compat.v1.Session()
    session.run(tf.compat.v1.global_variables_initializer())
    return session


def test_loss_starts_where_guessing_starts(graph, features):
    prediction = build(features)
    with start() as session:
        loss, accuracy = session.run([prediction.loss, prediction.accuracy])
    assert loss == pytest.approx(math.log(SIZE.vocab_size), abs=0.1)
    assert 0 <= accuracy <= 1


def test_every_variable_has_a_dense_gradient_that_is_not_zero(graph, features):
    prediction = build(features)
    variables = tf.compat.v1.trainable_variables()
    grads = tf.gradients(prediction.loss, variables)
    assert all(isinstance(grad, tf.Tensor) for grad in grads)
    with start() as session:
        norms = dict(zip([var.op.name for var in variables], session.run([tf.norm(grad) for grad in grads])))
    # A bias added to every key shifts all scores of a query alike, and softmax does not see that.
    silent = {name for name, norm in norms.items() if norm < 1e-7}
    assert silent == {f"bert/encoder/layer_{layer}/attention/key/bias" for layer in range(2)}


def test_variable_names_fit_the_exclusions_of_weight_decay_and_the_head_has_none(graph, features):
    build(features)
    names = [var.op.name for var in tf.compat.v1.trainable_variables()]
    assert "bert/embeddings/token" in names
    assert "bert/encoder/layer_0/attention/query/kernel" in names
    assert "bert/encoder/layer_1/ffn/LayerNorm/gamma" in names
    decayed = [name for name in names if "LayerNorm" not in name and "bias" not in name]
    assert all(name.endswith(("kernel", "token", "position", "segment")) for name in decayed)
    shapes = [var.shape.as_list() for var in tf.compat.v1.trainable_variables()]  # the head shares the table of tokens
    assert shapes.count([SIZE.vocab_size, SIZE.hidden_size]) == 1 and [SIZE.hidden_size, SIZE.vocab_size] not in shapes


def test_what_stands_behind_the_padding_mark_does_not_matter(graph, features):
    def loss_with_position_row_23(value):
        with tf.Graph().as_default():
            prediction = build(features)
            position = next(
                var for var in tf.compat.v1.trainable_variables() if var.op.name == "bert/embeddings/position"
            )
            moved = position[23].assign(tf.fill([SIZE.hidden_size], value))
            with start() as session:
                session.run(moved)
                return session.run(prediction.loss)

    assert (features["token_ids"][:, 23] == PAD_ID).all()
    assert loss_with_position_row_23(0.0) == loss_with_position_row_23(5.0)


def test_targets_without_weight_do_not_count(graph, features):
    changed = dict(features, target_ids=features["target_ids"].copy())
    changed["target_ids"][:, 3] += 1
    with tf.compat.v1.variable_scope("model", reuse=tf.compat.v1.AUTO_REUSE):
        one, other = build(features), build(changed)
    with start() as session:
        assert session.run(one.loss) == session.run(other.loss)


def test_batch_without_targets_has_no_loss(graph, features):
    prediction = build(dict(features, target_weights=np.zeros_like(features["target_weights"])))
    with start() as session:
        assert session.run(prediction.loss) == 0.0


def test_dropout_acts_in_training_only(graph, features):
    size = SIZE._replace(dropout=0.5)
    with tf.compat.v1.variable_scope("model", reuse=tf.compat.v1.AUTO_REUSE):
        training, evaluation = build(features, size, True), build(features, size, False)
    with start() as session:
        assert session.run(training.loss) != session.run(training.loss)
        assert session.run(evaluation.loss) == session.run(evaluation.loss)


def test_rows_longer_than_the_position_table_are_refused(graph, features):
    with pytest.raises(ValueError, match="got 24.*--max_seq_length"):
        build(features, SIZE._replace(max_positions=16))
