"""`tf.contrib.recurrent`: functions that run recurrent cells over sequences."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.rnn.loops import reversed_in_time


def functional_rnn(
    cell, inputs, sequence_length=None, initial_state=None, dtype=None, time_major=False, scope=None,
    use_tpu=False, reverse=False,
):  # fmt: skip
    """Calls `tf.nn.dynamic_rnn`; `reverse` runs from the end of each sequence to its start. `use_tpu` has no effect."""

    def reversed_if_requested(tensor):
        return reversed_in_time(tensor, sequence_length, 0 if time_major else 1) if reverse else tensor

    outputs, state = tf.nn.dynamic_rnn(
        cell, reversed_if_requested(inputs), sequence_length, initial_state, dtype, time_major=time_major, scope=scope
    )
    return reversed_if_requested(outputs), state


def bidirectional_functional_rnn(
    cell_fw, cell_bw, inputs, initial_state_fw=None, initial_state_bw=None, dtype=None, sequence_length=None,
    time_major=False, use_tpu=False, fast_reverse=False, scope=None,
):  # fmt: skip
    """Calls `tf.nn.bidirectional_dynamic_rnn`; `use_tpu` and `fast_reverse` have no effect."""
    return tf.nn.bidirectional_dynamic_rnn(
        cell_fw, cell_bw, inputs, sequence_length, initial_state_fw, initial_state_bw, dtype, time_major=time_major,
        scope=scope or "bidirectional_rnn",
    )  # fmt: skip
