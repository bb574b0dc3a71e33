"""`tf.contrib.seq2seq` and `tf.contrib.crf`: numpy, brute force, and trainings."""

from __future__ import annotations

import itertools

import numpy as np
import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib import crf, seq2seq
from tests.tensorflow1_compat.contrib_cases.common import close, names, value

RANDOM = np.random.RandomState(0)
MEMORY = RANDOM.randn(2, 4, 3).astype(np.float32)
INPUTS = RANDOM.randn(2, 5, 3).astype(np.float32)


def decoded(cell, start, helper, **options):
    decoder = seq2seq.BasicDecoder(cell, helper, start, tf.layers.Dense(7, name="logits"))
    return seq2seq.dynamic_decode(decoder, **options)


def case_training_decoder_is_dynamic_rnn():
    cell = tf.nn.rnn_cell.GRUCell(4)
    helper = seq2seq.TrainingHelper(tf.constant(INPUTS), [5, 3])
    decoder = seq2seq.BasicDecoder(cell, helper, cell.zero_state(2, tf.float32))
    outputs, state, lengths = seq2seq.dynamic_decode(decoder, impute_finished=True)
    with tf.variable_scope("decoder", reuse=True):
        plain, last = tf.nn.dynamic_rnn(cell, tf.constant(INPUTS), [5, 3], dtype=tf.float32)
    assert names()[0] == "decoder/gru_cell/candidate/bias" and len(names()) == 4
    found, expected, final, plain_final, steps, ids = value(
        [outputs.rnn_output, plain, state, last, lengths, outputs.sample_id]
    )
    close(found, expected)
    close(final, plain_final)
    assert steps.tolist() == [5, 3] and ids[0].tolist() == found[0].argmax(-1).tolist()


def case_output_layer_and_time_major():
    cell = tf.nn.rnn_cell.GRUCell(4)
    helper = seq2seq.TrainingHelper(tf.constant(INPUTS.transpose(1, 0, 2)), [5, 3], time_major=True)
    outputs, _, _ = decoded(cell, cell.zero_state(2, tf.float32), helper, output_time_major=True)
    assert value(outputs.rnn_output).shape == (5, 2, 7) and "decoder/logits/kernel" in names()


def case_greedy_decoder_stops():
    table = tf.eye(7)
    cell = tf.nn.rnn_cell.GRUCell(4)
    helper = seq2seq.GreedyEmbeddingHelper(table, tf.constant([1, 2]), 0)
    outputs, _, lengths = decoded(cell, cell.zero_state(2, tf.float32), helper, maximum_iterations=6)
    ids, steps = value([outputs.sample_id, lengths])
    for row, length in zip(ids, steps):
        ends = np.flatnonzero(row == 0)
        assert length == (ends[0] + 1 if len(ends) else 6)


def case_sampling_helpers():
    cell = tf.nn.rnn_cell.GRUCell(4)
    for helper in (
        seq2seq.SampleEmbeddingHelper(tf.eye(7), tf.constant([1, 2]), 0, softmax_temperature=0.5, seed=1),
        seq2seq.ScheduledEmbeddingTrainingHelper(tf.ones([2, 5, 7]), [5, 3], tf.eye(7), 0.5, seed=1),
        seq2seq.ScheduledOutputTrainingHelper(tf.ones([2, 5, 7]), [5, 3], 0.5, seed=1),
        seq2seq.InferenceHelper(lambda out: out, [7], tf.float32, tf.ones([2, 7]), lambda ids: tf.fill([2], False)),
    ):
        with tf.variable_scope("shared", reuse=tf.AUTO_REUSE):
            outputs, _, _ = decoded(cell, cell.zero_state(2, tf.float32), helper, maximum_iterations=5)
            assert value(outputs.rnn_output).shape == (2, 5, 7)


def attend(mechanism, query):
    with tf.variable_scope("attend"):
        return mechanism(tf.constant(query), mechanism.initial_state(2, tf.float32))[0]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def case_luong():
    query = RANDOM.randn(2, 6).astype(np.float32)
    mechanism = seq2seq.LuongAttention(6, tf.constant(MEMORY), [4, 2], scale=True)
    found = attend(mechanism, query)
    assert names() == ["attend/luong_attention/attention_g", "memory_layer/kernel"]
    alignments, keys = value([found, mechanism.keys])
    score = np.einsum("bd,btd->bt", query, keys)
    score[1, 2:] = -np.inf
    close(alignments, softmax(score))


def case_bahdanau():
    query = RANDOM.randn(2, 5).astype(np.float32)
    mechanism = seq2seq.BahdanauAttention(6, tf.constant(MEMORY), [4, 2])
    found = attend(mechanism, query)
    assert names() == ["attend/bahdanau_attention/attention_v", "attend/bahdanau_attention/query_layer/kernel",
                       "memory_layer/kernel"]  # fmt: skip
    by_name = {var.op.name.rsplit("/", 2)[-2 if "kernel" in var.op.name else -1]: var for var in tf.global_variables()}
    alignments, keys, v, kernel = value([found, mechanism.keys, by_name["attention_v"], by_name["query_layer"]])
    score = (v * np.tanh(keys + (query @ kernel)[:, None])).sum(2)
    score[1, 2:] = -np.inf
    close(alignments, softmax(score))
    normed = seq2seq.BahdanauAttention(6, tf.constant(MEMORY), normalize=True, name="normed")
    with tf.variable_scope("n"):
        weights = normed(tf.constant(query), None)[0]
    close(value(weights).sum(1), [1, 1])


def case_monotonic():
    p, before = tf.constant([[0.5, 0.5, 0.5]]), tf.constant([[1.0, 0.0, 0.0]])
    recursive, parallel = value([seq2seq.monotonic_attention(p, before, mode) for mode in ("recursive", "parallel")])
    close(recursive, [[0.5, 0.25, 0.125]])
    close(parallel, recursive)
    close(value(seq2seq.monotonic_attention(tf.constant([[0.0, 1.0, 1.0]]), before, "hard")), [[0, 1, 0]])
    for kind in (seq2seq.BahdanauMonotonicAttention, seq2seq.LuongMonotonicAttention):
        mechanism = kind(6, tf.constant(MEMORY), [4, 2])
        with tf.variable_scope(kind.__name__):
            found = mechanism(tf.zeros([2, 6]), mechanism.initial_state(2, tf.float32))[0]
        assert (value(found) >= 0).all()
    close(value(seq2seq.hardmax(tf.constant([[1.0, 3.0, 2.0]]))), [[0, 1, 0]])
    close(value(seq2seq.safe_cumprod(tf.constant([0.5, 0.5, 1.0]))), [0.5, 0.25, 0.25])


def case_attention_wrapper():
    mechanism = seq2seq.BahdanauAttention(6, tf.constant(MEMORY), [4, 2])
    cell = seq2seq.AttentionWrapper(
        tf.nn.rnn_cell.BasicLSTMCell(5), mechanism, attention_layer_size=8, alignment_history=True
    )
    first = tf.nn.rnn_cell.LSTMStateTuple(tf.ones([2, 5]), tf.ones([2, 5]))
    start = cell.zero_state(2, tf.float32).clone(cell_state=first)
    helper = seq2seq.TrainingHelper(tf.constant(INPUTS), [5, 5])
    decoder = seq2seq.BasicDecoder(cell, helper, start)
    outputs, state, _ = seq2seq.dynamic_decode(decoder)
    prefix = "decoder/attention_wrapper/"
    assert {prefix + "attention_layer/kernel", prefix + "basic_lstm_cell/kernel",
            prefix + "bahdanau_attention/query_layer/kernel", "memory_layer/kernel"} <= set(names())  # fmt: skip
    found, history, last = value([outputs.rnn_output, state.alignment_history.stack(), state.alignments])
    assert found.shape == (2, 5, 8) and history.shape == (5, 2, 4)
    close(history[-1], last)
    close(history.sum(-1), np.ones((5, 2)))
    assert tf.gradients(outputs.rnn_output, tf.trainable_variables()).count(None) == 0


def case_two_attentions_without_layers():
    mechanisms = [seq2seq.LuongAttention(5, tf.constant(MEMORY), name=name) for name in "ab"]
    cell = seq2seq.AttentionWrapper(tf.nn.rnn_cell.GRUCell(5), mechanisms, output_attention=False)
    outputs, _ = tf.nn.dynamic_rnn(cell, tf.constant(INPUTS), dtype=tf.float32)
    assert value(outputs).shape == (2, 5, 5)


def case_gather_tree():
    ids = np.array([[[1, 2]], [[3, 4]], [[5, 6]]])
    parents = np.array([[[0, 0]], [[1, 0]], [[0, 0]]])
    found = value(seq2seq.gather_tree(ids, parents, [3], 9))
    assert found[:, 0].tolist() == [[2, 2], [3, 3], [5, 6]]
    ended = value(seq2seq.gather_tree(ids, parents, [2], 3))
    assert ended[:, 0].tolist() == [[2, 1], [3, 4], [3, 3]]
    tiled = value(seq2seq.tile_batch(tf.constant([[1, 2], [3, 4]]), 2))
    assert tiled.tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]


class MarkovCell(tf.nn.rnn_cell.RNNCell):
    """Logits that depend on the last symbol only, so that every sequence can be counted."""

    def __init__(self, table):
        super().__init__()
        self._table = tf.constant(table, tf.float32)

    state_size = property(lambda self: 1)
    output_size = property(lambda self: 4)

    def call(self, inputs, state):
        return tf.matmul(inputs, self._table), state + 1


def case_beam_search_finds_the_best():
    table = RANDOM.randn(4, 4)
    cell = MarkovCell(table)
    state = seq2seq.tile_batch(tf.zeros([1, 1]), 16)
    decoder = seq2seq.BeamSearchDecoder(cell, tf.eye(4), tf.constant([1]), 0, state, 16)
    outputs, final, _ = seq2seq.dynamic_decode(decoder, maximum_iterations=3)
    found, log_probs = value([outputs.predicted_ids, final.log_probs])
    logs = np.log(softmax(table))
    scores = {}
    for sequence in itertools.product(range(4), repeat=3):
        score, last, ended = 0.0, 1, False
        for symbol in sequence:
            if ended:
                if symbol != 0:
                    score = -np.inf
                continue
            score, last, ended = score + logs[last, symbol], symbol, symbol == 0
        scores[sequence] = score
    best = sorted(scores, key=scores.get, reverse=True)[:4]
    assert [tuple(found[0, :, beam]) for beam in range(4)] == best
    close(log_probs[0, :4], [scores[each] for each in best], 1e-4)


def case_sequence_loss():
    logits = RANDOM.randn(2, 3, 4).astype(np.float32)
    targets, weights = np.array([[0, 1, 2], [3, 0, 0]]), np.array([[1, 1, 1], [1, 0, 0]], np.float32)
    each = -np.log(softmax(logits))[np.arange(2)[:, None], np.arange(3), targets] * weights
    tensors = tf.constant(logits), tf.constant(targets), tf.constant(weights)
    close(value(seq2seq.sequence_loss(*tensors)), each.sum() / 4)
    close(value(seq2seq.sequence_loss(*tensors, average_across_batch=False)), each.sum(1) / [3, 1])
    close(value(seq2seq.sequence_loss(*tensors, average_across_timesteps=False)), each.sum(0) / [2, 1, 1])
    close(value(seq2seq.sequence_loss(*tensors, average_across_timesteps=False, average_across_batch=False)), each)
    summed = seq2seq.sequence_loss(*tensors, average_across_timesteps=False, average_across_batch=False,
                                   sum_over_timesteps=True, sum_over_batch=True)  # fmt: skip
    close(value(summed), each.sum() / 4)


SCORES, TRANSITIONS = RANDOM.randn(2, 4, 3).astype(np.float32), RANDOM.randn(3, 3).astype(np.float32)
TAGS, LENGTHS = np.array([[0, 1, 2, 1], [2, 0, 0, 0]]), np.array([4, 2])


def all_scores(row):
    length = LENGTHS[row]
    return {
        tags: sum(SCORES[row, t, tag] for t, tag in enumerate(tags))
        + sum(TRANSITIONS[a, b] for a, b in zip(tags, tags[1:]))
        for tags in itertools.product(range(3), repeat=length)
    }


def case_crf_counts_all_sequences():
    found, transitions = crf.crf_log_likelihood(tf.constant(SCORES), tf.constant(TAGS), tf.constant(LENGTHS),
                                                tf.constant(TRANSITIONS))  # fmt: skip
    norm = crf.crf_log_norm(tf.constant(SCORES), tf.constant(LENGTHS), tf.constant(TRANSITIONS))
    likelihoods, norms = value([found, norm])
    for row in range(2):
        scores = all_scores(row)
        log_sum = np.log(np.exp(list(scores.values())).sum())
        close(norms[row], log_sum, 1e-4)
        close(likelihoods[row], scores[tuple(TAGS[row, : LENGTHS[row]])] - log_sum, 1e-4)
    assert tf.gradients(found, tf.constant(0.0)) == [None]


def case_crf_makes_its_transitions():
    likelihood, transitions = crf.crf_log_likelihood(tf.constant(SCORES), tf.constant(TAGS), tf.constant(LENGTHS))
    assert names() == ["transitions"] and tf.gradients(likelihood, transitions)[0] is not None
    before = tf.reduce_mean(-likelihood)
    train = tf.train.GradientDescentOptimizer(0.5).minimize(before)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        first = session.run(before)
        for _ in range(5):
            session.run(train)
        assert session.run(before) < first


def case_crf_decodes():
    tags, scores = value(crf.crf_decode(tf.constant(SCORES), tf.constant(TRANSITIONS), tf.constant(LENGTHS)))
    for row in range(2):
        known = all_scores(row)
        best = max(known, key=known.get)
        assert tags[row].tolist() == [*best, *[0] * (4 - len(best))]
        close(scores[row], known[best], 1e-4)
        path, score = crf.viterbi_decode(SCORES[row, : LENGTHS[row]], TRANSITIONS)
        assert tuple(path) == best
        close(score, known[best], 1e-4)
    single, _ = value(crf.crf_decode(tf.constant(SCORES[:, :1]), tf.constant(TRANSITIONS), tf.constant([1, 1])))
    assert single[:, 0].tolist() == SCORES[:, 0].argmax(1).tolist()
    allowed = tf.one_hot(TAGS, 3, True, False, dtype=tf.bool)
    arguments = tf.constant(LENGTHS), tf.constant(TRANSITIONS)
    close(*value([crf.crf_multitag_sequence_score(tf.constant(SCORES), allowed, *arguments),
                  crf.crf_sequence_score(tf.constant(SCORES), tf.constant(TAGS), *arguments)]), 1e-4)  # fmt: skip
    cell = crf.CrfForwardRnnCell(tf.constant(TRANSITIONS))
    _, alphas = tf.nn.dynamic_rnn(cell, tf.constant(SCORES[:, 1:]), LENGTHS - 1, tf.constant(SCORES[:, 0]))
    close(*value([tf.reduce_logsumexp(alphas, 1), crf.crf_log_norm(tf.constant(SCORES), *arguments)]), 1e-4)
