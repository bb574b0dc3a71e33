"""Defines decoders, and the loop that runs a decoder."""

from __future__ import annotations

import abc
import collections
import contextlib

import tensorflow.compat.v1 as tf

from npu_bridge.base.tf_internals.contrib import flatten_up_to
from tensorflow1_compat.contrib.rnn.loops import transpose_batch_time
from tensorflow1_compat.contrib.rnn.wrappers import check_cell
from tensorflow1_compat.contrib.seq2seq.structure import select_rows

_transpose_batch_time = transpose_batch_time

BasicDecoderOutput = collections.namedtuple("BasicDecoderOutput", ("rnn_output", "sample_id"))


class Decoder(abc.ABC):
    """The interface of decoders that `dynamic_decode` runs."""

    @property
    @abc.abstractmethod
    def batch_size(self):
        """The batch size, an int32 scalar."""

    @property
    @abc.abstractmethod
    def output_size(self):
        """The shapes of a step's outputs without the batch, in the structure of the outputs."""

    @property
    @abc.abstractmethod
    def output_dtype(self):
        """The dtypes of a step's outputs, in the structure of the outputs."""

    @abc.abstractmethod
    def initialize(self, name=None):
        """Returns (finished: bool [batch], first inputs, first state)."""

    @abc.abstractmethod
    def step(self, time, inputs, state, name=None):
        """Returns (outputs, next state, next inputs, finished)."""

    def finalize(self, outputs, final_state, sequence_lengths):
        """Returns (outputs, final state) after the loop; overriding it is optional."""
        raise NotImplementedError

    @property
    def tracks_own_finished(self):
        """Whether `step` itself reports all finished sequences; False lets `dynamic_decode` remember them."""
        return False


class BasicDecoder(Decoder):
    """A decoder made of a cell, a helper, and an optional layer that computes logits from outputs.

    Outputs are `BasicDecoderOutput(rnn_output, sample_id)`.
    """

    def __init__(self, cell, helper, initial_state, output_layer=None):
        check_cell("BasicDecoder", cell)
        if not hasattr(helper, "next_inputs"):
            raise TypeError(f"BasicDecoder: helper must be a Helper; got {type(helper).__name__}.")
        self._cell, self._helper, self._initial_state, self._output_layer = cell, helper, initial_state, output_layer

    @property
    def batch_size(self):
        return self._helper.batch_size

    @property
    def output_size(self):
        size = self._cell.output_size
        if self._output_layer is not None:
            batched = tf.TensorShape([None]).concatenate(tf.TensorShape(size))
            size = self._output_layer.compute_output_shape(batched)[1:]
        return BasicDecoderOutput(size, self._helper.sample_ids_shape)

    @property
    def output_dtype(self):
        return BasicDecoderOutput(tf.nest.flatten(self._initial_state)[0].dtype, self._helper.sample_ids_dtype)

    def initialize(self, name=None):
        return (*self._helper.initialize(), self._initial_state)

    def step(self, time, inputs, state, name=None):
        with tf.name_scope(name, "BasicDecoderStep"):
            outputs, cell_state = self._cell(inputs, state)
            if self._output_layer is not None:
                outputs = self._output_layer(outputs)
            samples = self._helper.sample(time=time, outputs=outputs, state=cell_state)
            finished, inputs, state = self._helper.next_inputs(
                time=time, outputs=outputs, state=cell_state, sample_ids=samples
            )
        return BasicDecoderOutput(outputs, samples), state, inputs, finished


def dynamic_decode(
    decoder, output_time_major=False, impute_finished=False, maximum_iterations=None, parallel_iterations=32,
    swap_memory=False, scope=None, **kwargs,
):  # fmt: skip
    """Runs a decoder until every sequence is finished.

    Args:
      decoder: a `Decoder`.
      output_time_major: whether outputs are [time, batch, ...] rather than [batch, time, ...].
      impute_finished: whether a finished sequence keeps its state and has zero outputs.
      maximum_iterations: maximum number of steps.

    Returns:
      (outputs, final state, lengths: int32 [batch]).

    Graph: variables in the scope `decoder`.
    """
    if not hasattr(decoder, "step"):
        raise TypeError(f"dynamic_decode: decoder must be a Decoder; got {type(decoder).__name__}.")
    with tf.variable_scope(scope, "decoder") as variable_scope:
        if variable_scope.caching_device is None:
            variable_scope.set_caching_device(lambda op: op.device)
        limit = None if maximum_iterations is None else tf.convert_to_tensor(maximum_iterations, tf.int32)
        finished, inputs, state = decoder.initialize()
        sizes = flatten_up_to(decoder.output_dtype, decoder.output_size)  # a shape is not a nested structure here
        dtypes, batch_size = tf.nest.flatten(decoder.output_dtype), decoder.batch_size
        shapes = [tf.TensorShape(size) for size in sizes]
        zeros = [tf.zeros(tf.stack([batch_size, *shape.as_list()]), dtype) for shape, dtype in zip(shapes, dtypes)]
        zeros = tf.nest.pack_sequence_as(decoder.output_dtype, zeros)
        if limit is not None:
            finished = tf.logical_or(finished, limit <= 0)
        batch = tf.get_static_value(decoder.batch_size)
        arrays = [
            tf.TensorArray(
                dtype, size=0, dynamic_size=True, clear_after_read=False,
                element_shape=tf.TensorShape([batch]).concatenate(shape),
            )
            for dtype, shape in zip(dtypes, shapes)
        ]  # fmt: skip

        def body(time, arrays, state, inputs, finished, lengths):
            outputs, next_state, next_inputs, done = decoder.step(time, inputs, state)
            now_finished = done if decoder.tracks_own_finished else tf.logical_or(done, finished)
            tf.nest.assert_same_structure(state, next_state)
            lengths = tf.where(tf.logical_not(finished), tf.fill(tf.shape(lengths), time + 1), lengths)
            if impute_finished:
                outputs = tf.nest.map_structure(lambda out, zero: select_rows(finished, zero, out), outputs, zeros)
                next_state = tf.nest.pack_sequence_as(state, [
                    _freeze_state(finished, new, old)
                    for new, old in zip(tf.nest.flatten(next_state), tf.nest.flatten(state))
                ])  # fmt: skip
            arrays = [array.write(time, out) for array, out in zip(arrays, tf.nest.flatten(outputs))]
            if limit is not None:
                now_finished = tf.logical_or(now_finished, time + 1 >= limit)
            return time + 1, arrays, next_state, next_inputs, now_finished, lengths

        lengths = tf.zeros_like(finished, tf.int32)
        _, arrays, state, _, _, lengths = tf.while_loop(
            lambda time, arrays, state, inputs, finished, lengths: tf.logical_not(tf.reduce_all(finished)), body,
            (tf.constant(0), arrays, state, inputs, finished, lengths),
            parallel_iterations=parallel_iterations, maximum_iterations=limit, swap_memory=swap_memory,
        )  # fmt: skip
        outputs = tf.nest.pack_sequence_as(decoder.output_dtype, [array.stack() for array in arrays])
        with contextlib.suppress(NotImplementedError):
            outputs, state = decoder.finalize(outputs, state, lengths)
        if not output_time_major:
            outputs = tf.nest.map_structure(transpose_batch_time, outputs)
        return outputs, state, lengths


def _freeze_state(finished, new, old):
    """Returns the old state for finished sequences, else the new state; scalars and TensorArrays are always new."""
    if isinstance(old, tf.TensorArray) or new.shape.rank == 0:
        return new
    return select_rows(finished, old, new)
