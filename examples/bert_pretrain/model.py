"""A BERT encoder with a masked-language-model head, as a TF 1 graph with named variables.

Layers, one by one: embeddings of token, position and segment; then per layer multi-head self-attention and
a GELU feed-forward part, each followed by a residual sum and a layer norm (Devlin et al. 2018; Vaswani et
al. 2017). The head predicts the hidden tokens with the token embedding table as output weights.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import tensorflow.compat.v1 as tf
from vocabulary import PAD_ID

_INIT_STDDEV = 0.02
_NORM_EPSILON = 1e-12
_SEGMENTS = 2

# Added to the attention score of padding; far below any real score, finite in float16 too.
_PADDING_SCORE = -1e4


class ModelSize(NamedTuple):
    """The numbers that make a model: counts and widths, and the dropout share used in training."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    max_positions: int
    dropout: float = 0.0


class Prediction(NamedTuple):
    """The result of the head for one batch: the mean loss per target in nats, and the accuracy, both scalars."""

    loss: tf.Tensor
    accuracy: tf.Tensor


def masked_language_model(features: dict[str, tf.Tensor], size: ModelSize, training: bool) -> Prediction:
    """Builds the whole model on one batch.

    Args:
      features: `token_ids` and `segment_ids`, int32 [batch, length]; `target_positions`, `target_ids` int32
        and `target_weights` float32, [batch, targets].
      size: the model's numbers.
      training: applies dropout.
    Graph: all variables live under `bert/` and `head/`.
    """
    token_ids = features["token_ids"]
    dropout = size.dropout if training else 0.0
    with tf.variable_scope("bert"):
        hidden, table = _embed(token_ids, features["segment_ids"], size, dropout)
        hidden = _encode(hidden, _padding_scores(token_ids), size, dropout)
    with tf.variable_scope("head"):
        logits = _predict(hidden, table, features["target_positions"], size)
    return _score(logits, features["target_ids"], features["target_weights"])


def _embed(token_ids, segment_ids, size: ModelSize, dropout: float):
    length = token_ids.shape[1]
    if length > size.max_positions:
        raise ValueError(
            f"model: rows are longer than the position table. Expected at most {size.max_positions} tokens; "
            f"got {length}. Lower --max_seq_length or raise max_positions in the configuration."
        )
    with tf.variable_scope("embeddings"):
        tokens = _weights("token", [size.vocab_size, size.hidden_size])
        positions = _weights("position", [size.max_positions, size.hidden_size])
        segments = _weights("segment", [_SEGMENTS, size.hidden_size])
        # The table is read by the lookup and by the output head. A reshape in front of the lookup makes its
        # gradient dense, so that the two parts add up as one dense tensor; otherwise TF joins them into
        # IndexedSlices with more rows than the table has.
        lookup = tf.reshape(tokens, [size.vocab_size, size.hidden_size])
        hidden = tf.gather(lookup, token_ids)
        hidden += positions[:length]
        hidden += tf.einsum("blk,kh->blh", tf.one_hot(segment_ids, _SEGMENTS, dtype=hidden.dtype), segments)
        return _drop(_layer_norm(hidden), dropout), tokens


def _padding_scores(token_ids):
    is_padding = tf.cast(tf.equal(token_ids, PAD_ID), tf.float32)
    return is_padding[:, tf.newaxis, tf.newaxis, :] * _PADDING_SCORE


def _encode(hidden, padding_scores, size: ModelSize, dropout: float):
    batch, length = tf.shape(hidden)[0], hidden.shape[1]
    # Dense layers run on [batch * length, width]: one large matrix product each.
    hidden = tf.reshape(hidden, [-1, size.hidden_size])
    for layer in range(size.num_layers):
        with tf.variable_scope(f"encoder/layer_{layer}"):
            with tf.variable_scope("attention"):
                context = _attend(hidden, padding_scores, [batch, length], size, dropout)
                update = _drop(_dense("output", context, size.hidden_size), dropout)
                hidden = _layer_norm(hidden + update)
            with tf.variable_scope("ffn"):
                inner = _gelu(_dense("inner", hidden, size.ffn_size))
                update = _drop(_dense("output", inner, size.hidden_size), dropout)
                hidden = _layer_norm(hidden + update)
    return tf.reshape(hidden, [batch, length, size.hidden_size])


def _attend(hidden, padding_scores, batch_and_length, size: ModelSize, dropout: float):
    """Attends, with several heads, from each token to all tokens of its row: [batch * length, hidden] in and out."""
    width = size.hidden_size // size.num_heads

    def heads(name):
        projected = tf.reshape(_dense(name, hidden, size.hidden_size), [*batch_and_length, size.num_heads, width])
        return tf.transpose(projected, [0, 2, 1, 3])

    query, key, value = heads("query"), heads("key"), heads("value")
    scores = tf.matmul(query, key, transpose_b=True) * (1.0 / math.sqrt(width)) + padding_scores
    shares = _drop(tf.nn.softmax(scores), dropout)
    context = tf.transpose(tf.matmul(shares, value), [0, 2, 1, 3])
    return tf.reshape(context, [-1, size.hidden_size])


def _predict(hidden, table, target_positions, size: ModelSize):
    """Returns scores of every vocabulary piece at the target positions: [batch, targets, vocabulary]."""
    targets = tf.gather(hidden, target_positions, batch_dims=1)
    slots = target_positions.shape[1]
    flat = tf.reshape(targets, [-1, size.hidden_size])
    flat = _layer_norm(_gelu(_dense("transform", flat, size.hidden_size)))
    bias = tf.get_variable("output_bias", [size.vocab_size], initializer=tf.zeros_initializer())
    logits = tf.matmul(flat, table, transpose_b=True) + bias
    return tf.reshape(logits, [-1, slots, size.vocab_size])


def _score(logits, labels, weights) -> Prediction:
    with tf.name_scope("loss"):
        per_target = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        # At least 1 below the line: a batch without targets has loss 0, not 0 / 0.
        total = tf.maximum(tf.reduce_sum(weights), 1.0)
        loss = tf.reduce_sum(per_target * weights) / total
        hits = tf.cast(tf.equal(tf.argmax(logits, -1, output_type=labels.dtype), labels), weights.dtype)
        return Prediction(loss, tf.reduce_sum(hits * weights) / total)


def _weights(name: str, shape):
    return tf.get_variable(name, shape, initializer=tf.truncated_normal_initializer(stddev=_INIT_STDDEV))


def _dense(name: str, inputs, units: int):
    with tf.variable_scope(name):
        kernel = _weights("kernel", [inputs.shape[-1], units])
        bias = tf.get_variable("bias", [units], initializer=tf.zeros_initializer())
        return tf.nn.bias_add(tf.matmul(inputs, kernel), bias)


def _layer_norm(inputs):
    with tf.variable_scope("LayerNorm"):
        width = inputs.shape[-1]
        gamma = tf.get_variable("gamma", [width], initializer=tf.ones_initializer())
        beta = tf.get_variable("beta", [width], initializer=tf.zeros_initializer())
        centred = inputs - tf.reduce_mean(inputs, -1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centred), -1, keepdims=True)
        return centred * (tf.math.rsqrt(variance + _NORM_EPSILON) * gamma) + beta


def _gelu(inputs):
    """Applies Gaussian error linear units: x times the probability that a normal random number is below x."""
    return 0.5 * inputs * (1.0 + tf.math.erf(inputs * math.sqrt(0.5)))


def _drop(inputs, share: float):
    return tf.nn.dropout(inputs, rate=share) if share else inputs
