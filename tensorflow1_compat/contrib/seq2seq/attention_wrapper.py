"""Defines `AttentionWrapper`, a cell that attends to a memory."""

from __future__ import annotations

import collections

import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.seq2seq.attention import (
    AttentionMechanism,
    BahdanauAttention,
    BahdanauMonotonicAttention,
    LuongAttention,
    LuongMonotonicAttention,
    _BaseAttentionMechanism,
    _make_dense_layer,
    monotonic_attention,
    safe_cumprod,
)


def hardmax(logits, name=None):
    """Returns the one-hot encoding of the position of the largest entry along the last axis."""
    return tf.one_hot(tf.argmax(logits, -1), tf.shape(logits)[-1], dtype=logits.dtype, name=name)


class AttentionWrapperState(
    collections.namedtuple(
        "AttentionWrapperState",
        ("cell_state", "attention", "time", "alignments", "alignment_history", "attention_state"),
    )
):
    """The state of an `AttentionWrapper`."""

    def clone(self, **kwargs):
        """Returns a copy with some fields replaced, such as `cell_state`."""
        return self._replace(**kwargs)


def _compute_attention(mechanism, cell_output, attention_state, attention_layer):
    """Returns (attention, alignments, next attention state)."""
    alignments, next_state = mechanism(cell_output, state=attention_state)
    context = tf.squeeze(tf.matmul(alignments[:, None], mechanism.values), [1])
    if attention_layer is None:
        return context, alignments, next_state
    return attention_layer(tf.concat([cell_output, context], 1)), alignments, next_state


class AttentionWrapper(tf.nn.rnn_cell.RNNCell):
    """An RNN cell that attends to a memory at each step.

    Args:
      cell: the inner cell, which reads the inputs and the last attention.
      attention_mechanism: an `AttentionMechanism` or a list of them.
      attention_layer_size: width of the attention layer, one for each mechanism; None uses the context as attention.
      alignment_history: whether the state keeps the alignments of all steps in a TensorArray.
      cell_input_fn: `(inputs, attention) -> inputs of the inner cell`; default: concatenation.
      output_attention: whether the output is the attention; False outputs the inner cell's output.
      initial_cell_state: state of the inner cell that `zero_state` returns.
      attention_layer: a layer that replaces `attention_layer_size`.
    """

    def __init__(
        self, cell, attention_mechanism, attention_layer_size=None, alignment_history=False, cell_input_fn=None,
        output_attention=True, initial_cell_state=None, name=None, attention_layer=None, attention_fn=None,
        dtype=None,
    ):  # fmt: skip
        super().__init__(name=name, dtype=dtype)
        self._is_multi = isinstance(attention_mechanism, (list, tuple))
        self._attention_mechanisms = tuple(attention_mechanism) if self._is_multi else (attention_mechanism,)
        if attention_layer_size is not None and attention_layer is not None:
            raise ValueError("AttentionWrapper: expected attention_layer_size or attention_layer, not both.")
        count = len(self._attention_mechanisms)
        if not all(isinstance(each, AttentionMechanism) for each in self._attention_mechanisms):
            raise TypeError("AttentionWrapper: attention_mechanism must be an AttentionMechanism, or a list of them; "
                            f"got {attention_mechanism!r}.")  # fmt: skip
        self._attention_layers = None
        if attention_layer_size is not None:
            sizes = attention_layer_size if isinstance(attention_layer_size, (list, tuple)) else [attention_layer_size]
            if len(sizes) != count:
                raise ValueError(f"AttentionWrapper: {count} attention mechanisms need as many layers; got {sizes}.")
            self._attention_layers = [_make_dense_layer(size, "attention_layer", None) for size in sizes]
            self._attention_size = sum(sizes)
        elif attention_layer is not None:
            layers = attention_layer if isinstance(attention_layer, (list, tuple)) else [attention_layer]
            self._attention_layers = list(layers)
            self._attention_size = sum(
                tf.compat.dimension_value(layer.compute_output_shape(
                    [None, cell.output_size + tf.compat.dimension_value(mechanism.values.shape[-1])]
                )[-1])
                for layer, mechanism in zip(layers, self._attention_mechanisms)
            )  # fmt: skip
        else:
            self._attention_size = sum(
                tf.compat.dimension_value(mechanism.values.shape[-1]) for mechanism in self._attention_mechanisms
            )
        self._cell, self._output_attention, self._has_history = cell, output_attention, alignment_history
        self._cell_input_fn = cell_input_fn or (lambda inputs, attention: tf.concat([inputs, attention], -1))
        self._attention_fn = attention_fn or _compute_attention
        self._initial_cell_state = initial_cell_state

    def _single_or_tuple(self, items):
        items = tuple(items)
        return items if self._is_multi else items[0]

    @property
    def output_size(self):
        return self._attention_size if self._output_attention else self._cell.output_size

    @property
    def state_size(self):
        sizes = [mechanism.alignments_size for mechanism in self._attention_mechanisms]
        return AttentionWrapperState(
            self._cell.state_size, self._attention_size, tf.TensorShape([]), self._single_or_tuple(sizes),
            self._single_or_tuple(() for _ in sizes) if not self._has_history else self._single_or_tuple(sizes),
            self._single_or_tuple(mechanism.state_size for mechanism in self._attention_mechanisms),
        )  # fmt: skip

    def zero_state(self, batch_size, dtype):
        """Returns the initial state: zeros, or `initial_cell_state` for the inner cell."""
        with tf.name_scope(type(self).__name__ + "ZeroState"):
            start = self._initial_cell_state
            if start is None:
                start = self._cell.zero_state(batch_size, dtype)
            else:
                start = tf.nest.map_structure(lambda each: tf.identity(each, name="checked_cell_state"), start)
            mechanisms = self._attention_mechanisms
            alignments = [mechanism.initial_alignments(batch_size, dtype) for mechanism in mechanisms]
            histories = [
                tf.TensorArray(dtype, size=0, dynamic_size=True, element_shape=each.shape) if self._has_history else ()
                for each in alignments
            ]
            return AttentionWrapperState(
                cell_state=start, attention=tf.zeros([batch_size, self._attention_size], dtype), time=tf.constant(0),
                alignments=self._single_or_tuple(alignments), alignment_history=self._single_or_tuple(histories),
                attention_state=self._single_or_tuple(each.initial_state(batch_size, dtype) for each in mechanisms),
            )  # fmt: skip

    def call(self, inputs, state):
        """Returns (attention or the cell's output, next state)."""
        if not isinstance(state, AttentionWrapperState):
            raise TypeError(f"AttentionWrapper: state must be an AttentionWrapperState; got {type(state).__name__}. "
                            "Make the first state with zero_state().")  # fmt: skip
        cell_output, cell_state = self._cell(self._cell_input_fn(inputs, state.attention), state.cell_state)
        histories = state.alignment_history if self._is_multi else (state.alignment_history,)
        before = state.attention_state if self._is_multi else (state.attention_state,)
        attentions, alignments, states, kept = [], [], [], []
        for place, mechanism in enumerate(self._attention_mechanisms):
            layer = self._attention_layers[place] if self._attention_layers else None
            attention, alignment, next_state = self._attention_fn(mechanism, cell_output, before[place], layer)
            attentions.append(attention)
            alignments.append(alignment)
            states.append(next_state)
            kept.append(histories[place].write(state.time, alignment) if self._has_history else ())
        attention = attentions[0] if len(attentions) == 1 else tf.concat(attentions, 1)
        next_state = AttentionWrapperState(
            cell_state=cell_state, attention=attention, time=state.time + 1,
            alignments=self._single_or_tuple(alignments), alignment_history=self._single_or_tuple(kept),
            attention_state=self._single_or_tuple(states),
        )  # fmt: skip
        return attention if self._output_attention else cell_output, next_state
