"""Stacks bidirectional RNN layers, and runs cells over all time steps in one call."""

from __future__ import annotations

import abc

import tensorflow.compat.v1 as tf


def transpose_batch_time(x):
    """Swaps the first two axes of tensors; tensors of a lower or unknown rank are unchanged."""
    if x.shape.rank is None or x.shape.rank < 2:
        return x
    return tf.transpose(x, [1, 0, *range(2, x.shape.rank)])


def reversed_in_time(tensor, lengths, time_axis=0):
    """Reverses each sequence of a tensor along time; padding after a sequence's length stays in place."""
    if lengths is None:
        return tf.reverse(tensor, [time_axis])
    return tf.reverse_sequence(tensor, lengths, time_axis, batch_axis=1 - time_axis)


def stack_bidirectional_rnn(
    cells_fw, cells_bw, inputs, initial_states_fw=None, initial_states_bw=None, dtype=None, sequence_length=None,
    scope=None,
):  # fmt: skip
    """Runs a stack of bidirectional RNN layers, unrolled over lists of time steps.

    Args:
      cells_fw, cells_bw: lists of cells, one for each layer.
      inputs: list of [batch, width], one for each time step.

    Returns:
      (outputs, final states of the forward cells, final states of the backward cells). Outputs are a list of
      [batch, forward width + backward width], one for each time step; the states are lists over layers.
    """

    def run_layer(*arguments, **states):
        return tf.nn.static_bidirectional_rnn(
            *arguments, sequence_length=sequence_length, dtype=dtype, scope=tf.get_variable_scope(), **states
        )

    return _run_stack(
        "stack_bidirectional_rnn", run_layer, cells_fw, cells_bw, inputs, initial_states_fw, initial_states_bw, scope
    )


def stack_bidirectional_dynamic_rnn(
    cells_fw, cells_bw, inputs, initial_states_fw=None, initial_states_bw=None, dtype=None, sequence_length=None,
    parallel_iterations=None, time_major=False, scope=None, swap_memory=False,
):  # fmt: skip
    """Runs a stack of bidirectional RNN layers.

    Args:
      cells_fw, cells_bw: lists of cells, one for each layer.
      inputs: [batch, time, width] ([time, batch, width] with `time_major`).

    Returns:
      (outputs, final states of the forward cells, final states of the backward cells). Outputs are
      [batch, time, forward width + backward width]; the states are tuples over layers.

    Graph: variables below `stack_bidirectional_rnn/cell_<layer>/bidirectional_rnn/`.
    """

    def run_layer(*arguments, **states):
        outputs, (state_fw, state_bw) = tf.nn.bidirectional_dynamic_rnn(
            *arguments, sequence_length=sequence_length, parallel_iterations=parallel_iterations, dtype=dtype,
            swap_memory=swap_memory, time_major=time_major, **states,
        )  # fmt: skip
        return tf.concat(outputs, 2), state_fw, state_bw

    where = "stack_bidirectional_dynamic_rnn"
    return _run_stack(where, run_layer, cells_fw, cells_bw, inputs, initial_states_fw, initial_states_bw, scope)


def _run_stack(function_name, run_layer, cells_fw, cells_bw, layer, initial_states_fw, initial_states_bw, scope):
    """Runs each layer on the outputs of the layer before; `run_layer` returns outputs and two final states."""
    are_lists = isinstance(cells_fw, list) and isinstance(cells_bw, list)
    if not are_lists or len(cells_fw) != len(cells_bw) or not cells_fw:
        raise ValueError(f"{function_name}: cells_fw and cells_bw must be lists of the same length, at least 1.")
    states_fw, states_bw = [], []
    with tf.variable_scope(scope or "stack_bidirectional_rnn"):
        for depth, (cell_fw, cell_bw) in enumerate(zip(cells_fw, cells_bw)):
            with tf.variable_scope(f"cell_{depth}"):
                layer, state_fw, state_bw = run_layer(
                    cell_fw, cell_bw, layer,
                    initial_state_fw=initial_states_fw[depth] if initial_states_fw else None,
                    initial_state_bw=initial_states_bw[depth] if initial_states_bw else None,
                )  # fmt: skip
                states_fw.append(state_fw)
                states_bw.append(state_bw)
    return layer, tuple(states_fw), tuple(states_bw)


class FusedRNNCell(abc.ABC):
    """A base class of cells whose call processes all time steps of inputs [time, batch, width]."""

    @abc.abstractmethod
    def __call__(self, inputs, initial_state=None, dtype=None, sequence_length=None, scope=None):
        """Returns (outputs [time, batch, width], final state)."""


class FusedRNNCellAdaptor(FusedRNNCell):
    """A fused cell that runs a plain cell over all time steps."""

    def __init__(self, cell, use_dynamic_rnn=False):
        self._cell, self._is_dynamic = cell, use_dynamic_rnn

    def __call__(self, inputs, initial_state=None, dtype=None, sequence_length=None, scope=None):
        is_list = isinstance(inputs, list)
        if self._is_dynamic:
            outputs, state = tf.nn.dynamic_rnn(
                self._cell, tf.stack(inputs) if is_list else inputs, sequence_length=sequence_length,
                initial_state=initial_state, dtype=dtype, time_major=True, scope=scope,
            )  # fmt: skip
            return (tf.unstack(outputs) if is_list else outputs), state
        outputs, state = tf.nn.static_rnn(
            self._cell, inputs if is_list else tf.unstack(inputs), initial_state=initial_state, dtype=dtype,
            sequence_length=sequence_length, scope=scope,
        )  # fmt: skip
        return (outputs if is_list else tf.stack(outputs)), state


class TimeReversedFusedRNN(FusedRNNCell):
    """A fused cell that runs another fused cell over each sequence in reverse."""

    def __init__(self, cell):
        self._cell = cell

    def _reverse(self, tensor, sequence_length):
        if isinstance(tensor, list):
            return tf.unstack(self._reverse(tf.stack(tensor), sequence_length))
        return reversed_in_time(tensor, sequence_length)

    def __call__(self, inputs, initial_state=None, dtype=None, sequence_length=None, scope=None):
        outputs, state = self._cell(
            self._reverse(inputs, sequence_length), initial_state=initial_state, dtype=dtype,
            sequence_length=sequence_length, scope=scope,
        )  # fmt: skip
        return self._reverse(outputs, sequence_length), state
