"""`tf.contrib.crf`: linear-chain conditional random fields."""

from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.rnn.cells import _OneStateCell


def crf_sequence_score(inputs, tag_indices, sequence_lengths, transition_params):
    """Returns unnormalised scores of tag sequences, [batch]; see `crf_log_likelihood` for the arguments."""
    return crf_unary_score(tag_indices, sequence_lengths, inputs) + crf_binary_score(
        tag_indices, sequence_lengths, transition_params
    )


def crf_multitag_sequence_score(inputs, tag_bitmap, sequence_lengths, transition_params):
    """Returns [batch], the log of the summed exponential scores of all tag sequences that `tag_bitmap` allows.

    `tag_bitmap` is bool [batch, time, tags]: whether a tag is allowed at a time step.
    """
    # With one time step, `sequence_lengths` is ignored, as in 1.15.
    if inputs.shape[1] == 1:
        sequence_lengths = tf.ones_like(sequence_lengths)
    allowed = tf.where(tag_bitmap, inputs, tf.fill(tf.shape(inputs), tf.cast(-np.inf, inputs.dtype)))
    return crf_log_norm(allowed, sequence_lengths, transition_params)


def crf_unary_score(tag_indices, sequence_lengths, inputs):
    """Returns [batch], the sum of the scores of each sequence's tags, without transitions."""
    tags = tf.one_hot(tag_indices, inputs.shape[2], dtype=inputs.dtype)
    mask = tf.sequence_mask(sequence_lengths, tf.shape(tag_indices)[1], inputs.dtype)
    return tf.reduce_sum(tf.reduce_sum(inputs * tags, 2) * mask, 1)


def crf_binary_score(tag_indices, sequence_lengths, transition_params):
    """Returns [batch], the sum of the scores of transitions between each sequence's tags."""
    tags = tf.shape(transition_params)[0]
    pairs = tag_indices[:, :-1] * tf.cast(tags, tag_indices.dtype) + tag_indices[:, 1:]
    scores = tf.gather(tf.reshape(transition_params, [-1]), pairs)
    lengths = tf.maximum(tf.cast(sequence_lengths, tf.int64) - 1, 0)
    mask = tf.sequence_mask(lengths, tf.shape(pairs)[1], transition_params.dtype)
    return tf.reduce_sum(scores * mask, 1)


def crf_log_norm(inputs, sequence_lengths, transition_params):
    """Returns [batch], the log of the normalisation factor; 0 for empty sequences."""
    lengths = tf.cast(sequence_lengths, tf.int32)
    transitions = transition_params[None]

    def step(time, alphas):
        new = tf.reduce_logsumexp(alphas[:, :, None] + transitions, 1) + inputs[:, time]
        return time + 1, tf.where(tf.broadcast_to((time < lengths)[:, None], tf.shape(new)), new, alphas)

    _, alphas = tf.while_loop(
        lambda time, _: time < tf.shape(inputs)[1], step, (tf.constant(1), inputs[:, 0]),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, inputs.shape[2]])),
    )  # fmt: skip
    alphas.set_shape([inputs.shape[0], inputs.shape[2]])
    norm = tf.reduce_logsumexp(alphas, 1)
    return tf.where(tf.less_equal(tf.cast(sequence_lengths, tf.int64), 0), tf.zeros_like(norm), norm)


def crf_log_likelihood(inputs, tag_indices, sequence_lengths, transition_params=None):
    """Returns log-likelihoods of tag sequences.

    Args:
      inputs: scores of tags, float [batch, time, tags].
      tag_indices: integers [batch, time].
      sequence_lengths: integers [batch].
      transition_params: scores of transitions, [tags, tags]; None creates the variable `transitions`.

    Returns:
      (log-likelihoods [batch], transition_params).
    """
    tags = tf.compat.dimension_value(inputs.shape[2])
    if transition_params is None:
        transition_params = tf.get_variable("transitions", [tags, tags])
    scores = crf_sequence_score(inputs, tag_indices, sequence_lengths, transition_params)
    return scores - crf_log_norm(inputs, sequence_lengths, transition_params), transition_params


def viterbi_decode(score, transition_params):
    """Returns the best tag sequence, computed in numpy.

    Args:
      score: scores of tags, [time, tags].
      transition_params: [tags, tags].

    Returns:
      (list of tags, score of this tag sequence).
    """
    trellis = np.zeros_like(score)
    came_from = np.zeros_like(score, dtype=np.int32)
    trellis[0] = score[0]
    for time in range(1, score.shape[0]):
        ways = trellis[time - 1][:, None] + transition_params
        trellis[time] = score[time] + ways.max(0)
        came_from[time] = ways.argmax(0)
    best = [int(trellis[-1].argmax())]
    for step in reversed(came_from[1:]):
        best.append(int(step[best[-1]]))
    return best[::-1], trellis[-1].max()


def crf_decode(potentials, transition_params, sequence_length):
    """Returns the best tag sequences.

    Args:
      potentials: scores of tags, float [batch, time, tags].
      transition_params: [tags, tags].
      sequence_length: integers [batch].

    Returns:
      (tags: int32 [batch, time], 0 after the end of a sequence; scores: [batch]).
    """
    lengths = tf.maximum(tf.cast(sequence_length, tf.int32), 1)  # the first tag of an empty sequence stays, as in 1.15
    if potentials.shape[1] == 1:
        return tf.argmax(potentials, 2, output_type=tf.int32), tf.reduce_max(potentials, [1, 2])
    time_major = tf.transpose(potentials, [1, 0, 2])
    steps, batch = tf.shape(time_major)[0], tf.shape(time_major)[1]
    identity_pointers = tf.broadcast_to(tf.range(tf.shape(potentials)[2])[None], [batch, tf.shape(potentials)[2]])

    def forward(carry, time):
        alphas, _ = carry
        scores, time = time
        ways = alphas[:, :, None] + transition_params[None]
        is_inside = tf.broadcast_to((time < lengths)[:, None], tf.shape(alphas))
        new = tf.where(is_inside, tf.reduce_max(ways, 1) + scores, alphas)
        return new, tf.where(is_inside, tf.argmax(ways, 1, output_type=tf.int32), identity_pointers)

    alphas, came_from = tf.scan(forward, (time_major[1:], tf.range(1, steps)), (time_major[0], identity_pointers))
    alphas = tf.concat([time_major[:1], alphas], 0)[-1]
    last = tf.argmax(alphas, 1, output_type=tf.int32)

    def backward(tag, pointers):
        return tf.gather_nd(pointers, tf.stack([tf.range(batch), tag], 1))

    earlier = tf.scan(backward, came_from, last, reverse=True)
    found = tf.transpose(tf.concat([earlier, last[None]], 0))
    found = found * tf.sequence_mask(lengths, steps, tf.int32)
    found.set_shape([potentials.shape[0], potentials.shape[1]])
    return found, tf.reduce_max(alphas, 1)


class CrfForwardRnnCell(_OneStateCell):
    """An RNN cell of the forward recursion: state and output are log alphas, [batch, tags]."""

    def __init__(self, transition_params):
        super().__init__()
        self._transitions = tf.expand_dims(transition_params, 0)
        self._num_units = tf.compat.dimension_value(transition_params.shape[0])

    def __call__(self, inputs, state, scope=None):
        new = inputs + tf.reduce_logsumexp(state[:, :, None] + self._transitions, 1)
        return new, new
