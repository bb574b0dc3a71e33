"""Defines decoders over lists of time steps, and losses for them."""

from __future__ import annotations

import copy

import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.rnn.linear import _linear


def sequence_loss_by_example(
    logits, targets, weights, average_across_timesteps=True, softmax_loss_function=None, name=None
):
    """Returns the weighted cross entropy of each sequence.

    Args:
      logits: list with a tensor [batch, classes] for each time step.
      targets, weights: lists with a tensor [batch] for each time step.
      average_across_timesteps: whether to divide by the sum of the weights.
      softmax_loss_function: `(labels=, logits=) -> [batch]`; default: sparse softmax cross entropy.

    Returns:
      [batch].
    """
    if not len(logits) == len(targets) == len(weights):
        raise ValueError("sequence_loss_by_example: logits, targets and weights must be lists of the same length; got "
                         f"{len(logits)}, {len(targets)}, {len(weights)}.")  # fmt: skip
    function = softmax_loss_function or tf.nn.sparse_softmax_cross_entropy_with_logits
    with tf.name_scope(name, "sequence_loss_by_example", [*logits, *targets, *weights]):
        losses = [
            function(labels=tf.reshape(target, [-1]), logits=logit) * weight
            for logit, target, weight in zip(logits, targets, weights)
        ]
        total = tf.add_n(losses)
        return total / (tf.add_n(list(weights)) + 1e-12) if average_across_timesteps else total


def sequence_loss(
    logits, targets, weights, average_across_timesteps=True, average_across_batch=True, softmax_loss_function=None,
    name=None,
):  # fmt: skip
    """Returns the sum of `sequence_loss_by_example` over the batch; with `average_across_batch`, the mean."""
    with tf.name_scope(name, "sequence_loss", [*logits, *targets, *weights]):
        cost = tf.reduce_sum(
            sequence_loss_by_example(logits, targets, weights, average_across_timesteps, softmax_loss_function)
        )
        return cost / tf.cast(tf.shape(targets[0])[0], cost.dtype) if average_across_batch else cost


def rnn_decoder(decoder_inputs, initial_state, cell, loop_function=None, scope=None):
    """Runs a cell over a list of inputs; `loop_function(previous output, step)`, if given, makes the next input."""
    with tf.variable_scope(scope or "rnn_decoder"):
        state, outputs = initial_state, []
        for step, inputs in enumerate(decoder_inputs):
            if loop_function is not None and outputs:
                with tf.variable_scope("loop_function", reuse=True):
                    inputs = loop_function(outputs[-1], step)
            if step:
                tf.get_variable_scope().reuse_variables()
            output, state = cell(inputs, state)
            outputs.append(output)
    return outputs, state


def basic_rnn_seq2seq(encoder_inputs, decoder_inputs, cell, dtype=tf.float32, scope=None):
    """Encodes a list of inputs and decodes another list with a copy of the cell; returns (outputs, state)."""
    with tf.variable_scope(scope or "basic_rnn_seq2seq"):
        _, state = tf.nn.static_rnn(copy.deepcopy(cell), encoder_inputs, dtype=dtype)
        return rnn_decoder(decoder_inputs, state, cell)


def attention_decoder(
    decoder_inputs, initial_state, attention_states, cell, output_size=None, num_heads=1, loop_function=None,
    dtype=None, scope=None, initial_state_attention=False,
):  # fmt: skip
    """Runs a cell that attends to `attention_states` [batch, time, depth] at each step; returns (outputs, state).

    Args:
      decoder_inputs: list with a tensor [batch, width] for each step.
      output_size: width of outputs; by default the output width of the cell.
      num_heads: number of attention heads.
      initial_state_attention: whether to attend to `attention_states` before the first step.
    """
    if not decoder_inputs or num_heads < 1:
        raise ValueError("attention_decoder: expected at least one input and one head.")
    output_size = output_size or cell.output_size
    with tf.variable_scope(scope or "attention_decoder", dtype=dtype) as scope:
        dtype = scope.dtype
        batch, depth = tf.shape(decoder_inputs[0])[0], tf.compat.dimension_value(attention_states.shape[2])
        length = tf.compat.dimension_value(attention_states.shape[1]) or tf.shape(attention_states)[1]
        hidden = tf.reshape(attention_states, [-1, length, 1, depth])
        heads = []
        for head in range(num_heads):
            kernel = tf.get_variable(f"AttnW_{head}", [1, 1, depth, depth], dtype=dtype)
            vector = tf.get_variable(f"AttnV_{head}", [depth], dtype=dtype)
            heads.append((tf.nn.conv2d(hidden, kernel, [1, 1, 1, 1], "SAME"), vector))

        def attention(query):
            query = tf.concat(tf.nest.flatten(query), 1)
            looks = []
            for head, (features, vector) in enumerate(heads):
                with tf.variable_scope(f"Attention_{head}"):
                    wanted = tf.reshape(_linear(query, depth, bias=True), [-1, 1, 1, depth])
                    score = tf.reduce_sum(vector * tf.tanh(features + wanted), [2, 3])
                    weights = tf.reshape(tf.nn.softmax(score), [-1, length, 1, 1])
                    looks.append(tf.reshape(tf.reduce_sum(weights * hidden, [1, 2]), [-1, depth]))
            return looks

        state, outputs, previous = initial_state, [], None
        looks = [tf.zeros(tf.stack([batch, depth]), dtype) for _ in range(num_heads)]
        for look in looks:
            look.set_shape([None, depth])
        if initial_state_attention:
            looks = attention(initial_state)
        for step, inputs in enumerate(decoder_inputs):
            if step:
                tf.get_variable_scope().reuse_variables()
            if loop_function is not None and previous is not None:
                with tf.variable_scope("loop_function", reuse=True):
                    inputs = loop_function(previous, step)
            width = tf.compat.dimension_value(inputs.shape[1])
            output, state = cell(_linear([tf.cast(inputs, dtype), *looks], width, bias=True), state)
            with tf.variable_scope(
                tf.get_variable_scope(), reuse=True if not step and initial_state_attention else None
            ):
                looks = attention(state)
            with tf.variable_scope("AttnOutputProjection"):
                output = _linear([output, *looks], output_size, bias=True)
            previous = output if loop_function is not None else None
            outputs.append(output)
    return outputs, state


def embedding_rnn_decoder(
    decoder_inputs, initial_state, cell, num_symbols, embedding_size, output_projection=None, feed_previous=False,
    update_embedding_for_previous=True, scope=None,
):  # fmt: skip
    """Runs `rnn_decoder` over symbols, a list of int32 [batch].

    With `feed_previous`, the most likely symbol of a step is the input of the next step.
    """
    with tf.variable_scope(scope or "embedding_rnn_decoder"):
        table = tf.get_variable("embedding", [num_symbols, embedding_size])
        again = _make_feedback(table, output_projection, update_embedding_for_previous) if feed_previous else None
        return rnn_decoder([tf.nn.embedding_lookup(table, each) for each in decoder_inputs], initial_state, cell, again)


def embedding_attention_decoder(
    decoder_inputs, initial_state, attention_states, cell, num_symbols, embedding_size, num_heads=1, output_size=None,
    output_projection=None, feed_previous=False, update_embedding_for_previous=True, dtype=None, scope=None,
    initial_state_attention=False,
):  # fmt: skip
    """Runs `attention_decoder` over symbols; see `embedding_rnn_decoder`."""
    with tf.variable_scope(scope or "embedding_attention_decoder", dtype=dtype):
        table = tf.get_variable("embedding", [num_symbols, embedding_size])
        again = _make_feedback(table, output_projection, update_embedding_for_previous) if feed_previous else None
        embedded = [tf.nn.embedding_lookup(table, each) for each in decoder_inputs]
        return attention_decoder(
            embedded, initial_state, attention_states, cell, output_size or cell.output_size, num_heads, again,
            initial_state_attention=initial_state_attention,
        )  # fmt: skip


def _make_feedback(embedding_table, projection, is_trained):
    def next_input(previous, _):
        logits = previous if projection is None else tf.nn.xw_plus_b(previous, projection[0], projection[1])
        embedded = tf.nn.embedding_lookup(embedding_table, tf.argmax(logits, 1))
        return embedded if is_trained else tf.stop_gradient(embedded)

    return next_input
