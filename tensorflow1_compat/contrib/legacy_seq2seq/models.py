"""Defines models with an encoder and a decoder over lists of time steps."""

from __future__ import annotations

import copy

import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.legacy_seq2seq import decoders
from tensorflow1_compat.contrib.rnn.wrappers import EmbeddingWrapper, OutputProjectionWrapper


def _encode(cell, inputs, symbols, size, dtype):
    """Runs a copy of the cell over embedded symbols; returns (outputs, state)."""
    return tf.nn.static_rnn(EmbeddingWrapper(copy.deepcopy(cell), symbols, size), inputs, dtype=dtype)


def _decode_with_feedback(feed_previous, decoder):
    """Calls `decoder(feeds_back, trains_embedding)` and returns its (outputs, state).

    `feeds_back` tells whether a step's most likely symbol is the next input. `trains_embedding` tells whether the
    embedding learns from these symbols; it is False, as in 1.15, if `feed_previous` is a tensor.
    """
    if isinstance(feed_previous, bool):
        return decoder(feed_previous, True)
    made = []

    def decode_in_branch(feeds_back):
        with tf.variable_scope(tf.get_variable_scope(), reuse=True if made else None):
            made.append(decoder(feeds_back, False))
        return tf.nest.flatten(made[-1])

    found = tf.cond(feed_previous, lambda: decode_in_branch(True), lambda: decode_in_branch(False))
    return tf.nest.pack_sequence_as(made[-1], found)


def embedding_rnn_seq2seq(
    encoder_inputs, decoder_inputs, cell, num_encoder_symbols, num_decoder_symbols, embedding_size,
    output_projection=None, feed_previous=False, dtype=None, scope=None,
):  # fmt: skip
    """Encodes symbols (list of int32 [batch]), and decodes with `embedding_rnn_decoder`; returns (outputs, state)."""
    with tf.variable_scope(scope or "embedding_rnn_seq2seq", dtype=dtype) as scope:
        _, state = _encode(cell, encoder_inputs, num_encoder_symbols, embedding_size, scope.dtype)
        cell = OutputProjectionWrapper(cell, num_decoder_symbols) if output_projection is None else cell
        return _decode_with_feedback(feed_previous, lambda feeds_back, trains: decoders.embedding_rnn_decoder(
            decoder_inputs, state, cell, num_decoder_symbols, embedding_size, output_projection, feeds_back, trains
        ))  # fmt: skip


def embedding_attention_seq2seq(
    encoder_inputs, decoder_inputs, cell, num_encoder_symbols, num_decoder_symbols, embedding_size, num_heads=1,
    output_projection=None, feed_previous=False, dtype=None, scope=None, initial_state_attention=False,
):  # fmt: skip
    """Encodes symbols, and decodes with attention over the encoder's outputs; returns (outputs, state)."""
    with tf.variable_scope(scope or "embedding_attention_seq2seq", dtype=dtype) as scope:
        outputs, state = _encode(cell, encoder_inputs, num_encoder_symbols, embedding_size, scope.dtype)
        states, size = tf.stack(outputs, 1), None
        if output_projection is None:
            cell, size = OutputProjectionWrapper(cell, num_decoder_symbols), num_decoder_symbols
        return _decode_with_feedback(feed_previous, lambda feeds_back, trains: decoders.embedding_attention_decoder(
            decoder_inputs, state, states, cell, num_decoder_symbols, embedding_size, num_heads, size,
            output_projection, feeds_back, trains, initial_state_attention=initial_state_attention,
        ))  # fmt: skip


def tied_rnn_seq2seq(encoder_inputs, decoder_inputs, cell, loop_function=None, dtype=tf.float32, scope=None):
    """Encodes and decodes like `basic_rnn_seq2seq`, but encoder and decoder share their weights."""
    with tf.variable_scope("combined_tied_rnn_seq2seq"):
        scope = scope or "tied_rnn_seq2seq"
        _, state = tf.nn.static_rnn(cell, encoder_inputs, dtype=dtype, scope=scope)
        tf.get_variable_scope().reuse_variables()
        return decoders.rnn_decoder(decoder_inputs, state, cell, loop_function, scope)


def embedding_tied_rnn_seq2seq(
    encoder_inputs, decoder_inputs, cell, num_symbols, embedding_size, num_decoder_symbols=None,
    output_projection=None, feed_previous=False, dtype=None, scope=None,
):  # fmt: skip
    """Encodes and decodes like `tied_rnn_seq2seq`, over symbols of one shared embedding."""
    with tf.variable_scope(scope or "embedding_tied_rnn_seq2seq", dtype=dtype) as scope:
        dtype, table = scope.dtype, tf.get_variable("embedding", [num_symbols, embedding_size])
        sources, wanted = ([tf.nn.embedding_lookup(table, each) for each in symbols]
                           for symbols in (encoder_inputs, decoder_inputs))  # fmt: skip
        if output_projection is None:
            cell = OutputProjectionWrapper(cell, num_decoder_symbols or num_symbols)
        return _decode_with_feedback(feed_previous, lambda feeds_back, trains: tied_rnn_seq2seq(
            sources, wanted, cell,
            decoders._make_feedback(table, output_projection, trains) if feeds_back else None, dtype,
        ))  # fmt: skip


def model_with_buckets(
    encoder_inputs, decoder_inputs, targets, weights, buckets, seq2seq, softmax_loss_function=None,
    per_example_loss=False, name=None,
):  # fmt: skip
    """Builds one model for sequences of several lengths.

    Args:
      buckets: ascending pairs (encoder length, decoder length).
      seq2seq: `(encoder inputs, decoder inputs) -> (outputs, state)`, called for each bucket with shared weights.

    Returns:
      (outputs, losses), two lists with an element for each bucket.
    """
    longest_source, longest_target = buckets[-1]
    needed = (
        ("encoder_inputs", encoder_inputs, longest_source),
        ("targets", targets, longest_target),
        ("weights", weights, longest_target),
    )
    for what, inputs, longest in needed:
        if len(inputs) < longest:
            raise ValueError(
                f"model_with_buckets: {what} has {len(inputs)} steps; the last bucket needs at least {longest}."
            )
    loss = decoders.sequence_loss_by_example if per_example_loss else decoders.sequence_loss
    outputs, losses = [], []
    with tf.name_scope(name, "model_with_buckets", [*encoder_inputs, *decoder_inputs, *targets, *weights]):
        for source, target in buckets:
            with tf.variable_scope(tf.get_variable_scope(), reuse=True if outputs else None):
                found, _ = seq2seq(encoder_inputs[:source], decoder_inputs[:target])
                outputs.append(found)
                losses.append(
                    loss(found, targets[:target], weights[:target], softmax_loss_function=softmax_loss_function)
                )
    return outputs, losses
