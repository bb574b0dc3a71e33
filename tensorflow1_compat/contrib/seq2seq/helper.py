"""Defines helpers, which choose the samples and the next inputs of a decoder."""

from __future__ import annotations

import abc

import numpy as np
import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.rnn.loops import transpose_batch_time
from tensorflow1_compat.contrib.seq2seq.structure import make_lookup_function, read_only, select_rows, unstack_ta

_transpose_batch_time, _unstack_ta = transpose_batch_time, unstack_ta


class Helper(abc.ABC):
    """The interface of helpers: `initialize`, `sample`, `next_inputs`, and the shape and dtype of samples."""

    @property
    @abc.abstractmethod
    def batch_size(self):
        """The batch size, an int32 scalar."""

    @property
    @abc.abstractmethod
    def sample_ids_shape(self):
        """The shape of a sample without the batch."""

    @property
    @abc.abstractmethod
    def sample_ids_dtype(self):
        """The dtype of samples."""

    @abc.abstractmethod
    def initialize(self, name=None):
        """Returns (finished: bool [batch], first inputs)."""

    @abc.abstractmethod
    def sample(self, time, outputs, state, name=None):
        """Returns the samples of this step."""

    @abc.abstractmethod
    def next_inputs(self, time, outputs, state, sample_ids, name=None):
        """Returns (finished: bool [batch], next inputs, next state)."""


def categorical_sample(logits, dtype=tf.int32, sample_shape=(), seed=None):
    """Draws classes from logits [batch, classes]; returns a tensor of shape `sample_shape` + [batch]."""
    shape = tf.concat([tf.cast(sample_shape, tf.int32), tf.shape(logits)[:1]], 0)
    count = int(np.prod(sample_shape))
    drawn = tf.reshape(tf.transpose(tf.random.categorical(logits, count, seed=seed, dtype=tf.int32)), shape)
    drawn.set_shape(tf.TensorShape(sample_shape).concatenate(logits.shape[:1]))
    return tf.cast(drawn, dtype)


def bernoulli_sample(probs=None, logits=None, dtype=tf.int32, sample_shape=(), seed=None):
    """Draws 1 with the given probability, else 0; returns shape `sample_shape` + the shape of `probs` or `logits`."""
    probs = tf.sigmoid(logits) if probs is None else tf.convert_to_tensor(probs)
    shape = tf.concat([tf.cast(sample_shape, tf.int32), tf.shape(probs)], 0)
    drawn = tf.random_uniform(shape, dtype=probs.dtype, seed=seed) < probs
    drawn.set_shape(tf.TensorShape(sample_shape).concatenate(probs.shape))
    return tf.cast(drawn, dtype)


class CustomHelper(Helper):
    """A helper whose methods call the functions given as arguments."""

    sample_ids_shape = read_only("_sample_ids_shape")
    sample_ids_dtype = read_only("_sample_ids_dtype")

    def __init__(self, initialize_fn, sample_fn, next_inputs_fn, sample_ids_shape=None, sample_ids_dtype=None):
        self._initialize_fn, self._sample_fn, self._next_inputs_fn = initialize_fn, sample_fn, next_inputs_fn
        self._sample_ids_shape = tf.TensorShape(sample_ids_shape or [])
        self._sample_ids_dtype, self._batch_size = sample_ids_dtype or tf.int32, None

    @property
    def batch_size(self):
        if self._batch_size is None:
            raise ValueError("CustomHelper: batch_size is only known after initialize().")
        return self._batch_size

    def initialize(self, name=None):
        finished, inputs = self._initialize_fn()
        if self._batch_size is None:
            self._batch_size = tf.size(finished)
        return finished, inputs

    def sample(self, time, outputs, state, name=None):
        return self._sample_fn(time=time, outputs=outputs, state=state)

    def next_inputs(self, time, outputs, state, sample_ids, name=None):
        return self._next_inputs_fn(time=time, outputs=outputs, state=state, sample_ids=sample_ids)


class _MostLikelyHelper(Helper):
    """A base class of helpers whose samples are the most likely classes; subclasses set `_batch_size`."""

    sample_ids_shape = tf.TensorShape([])
    sample_ids_dtype = tf.int32
    batch_size = read_only("_batch_size")

    def sample(self, time, outputs, state, name=None):
        return tf.argmax(outputs, axis=-1, output_type=tf.int32)


class TrainingHelper(_MostLikelyHelper):
    """A helper that feeds the true inputs; samples are the most likely classes.

    Args:
      inputs: a tensor or nested structure of [batch, time, ...], or of [time, batch, ...] with `time_major`.
      sequence_length: int32 [batch].
    """

    def __init__(self, inputs, sequence_length, time_major=False, name=None):
        inputs = tf.nest.map_structure(tf.convert_to_tensor, inputs)
        self._inputs = inputs
        if not time_major:
            inputs = tf.nest.map_structure(transpose_batch_time, inputs)
        self._input_tas = tf.nest.map_structure(unstack_ta, inputs)
        self._sequence_length = tf.convert_to_tensor(sequence_length, name="sequence_length")
        if self._sequence_length.shape.rank != 1:
            raise ValueError(f"{type(self).__name__}: sequence_length must be a vector; got {sequence_length}.")
        self._zero_inputs = tf.nest.map_structure(lambda each: tf.zeros_like(each[0]), inputs)
        self._batch_size = tf.size(self._sequence_length)

    @property
    def inputs(self):
        """The `inputs` argument."""
        return self._inputs

    @property
    def sequence_length(self):
        """int32 [batch]."""
        return self._sequence_length

    def _read_inputs(self, time):
        return tf.nest.map_structure(lambda array: array.read(time), self._input_tas)

    def initialize(self, name=None):
        finished = tf.equal(0, self._sequence_length)
        return finished, tf.cond(tf.reduce_all(finished), lambda: self._zero_inputs, lambda: self._read_inputs(0))

    def next_inputs(self, time, outputs, state, sample_ids=None, name=None):
        finished = time + 1 >= self._sequence_length
        inputs = tf.cond(tf.reduce_all(finished), lambda: self._zero_inputs, lambda: self._read_inputs(time + 1))
        return finished, inputs, state


class ScheduledEmbeddingTrainingHelper(TrainingHelper):
    """A helper that feeds, with a given probability, the embedding of a sample, else the true input (sample id -1)."""

    def __init__(
        self, inputs, sequence_length, embedding, sampling_probability, time_major=False, seed=None,
        scheduling_seed=None, name=None,
    ):  # fmt: skip
        super().__init__(inputs, sequence_length, time_major, name)
        self._embedding = make_lookup_function(embedding)
        self._probability, self._seed, self._scheduling_seed = sampling_probability, seed, scheduling_seed

    def sample(self, time, outputs, state, name=None):
        is_own = tf.random_uniform([self.batch_size], seed=self._scheduling_seed) < self._probability
        drawn = tf.cast(tf.reshape(tf.random.categorical(outputs, 1, seed=self._seed), [-1]), tf.int32)
        return tf.where(is_own, drawn, tf.fill([self.batch_size], -1))

    def next_inputs(self, time, outputs, state, sample_ids=None, name=None):
        finished, inputs, state = super().next_inputs(time, outputs, state, sample_ids)
        own = self._embedding(tf.maximum(sample_ids, 0))
        return finished, select_rows(sample_ids > -1, own, inputs), state


class ScheduledOutputTrainingHelper(TrainingHelper):
    """A helper that feeds, with a given probability, the last output, else the true input; adds `auxiliary_inputs`."""

    def __init__(
        self, inputs, sequence_length, sampling_probability, time_major=False, seed=None, next_inputs_fn=None,
        auxiliary_inputs=None, name=None,
    ):  # fmt: skip
        self._auxiliary_width = 0
        if auxiliary_inputs is not None:
            auxiliary_inputs = tf.convert_to_tensor(auxiliary_inputs)
            self._auxiliary_width = tf.compat.dimension_value(auxiliary_inputs.shape[-1])
            inputs = tf.concat([inputs, auxiliary_inputs], -1)
        super().__init__(inputs, sequence_length, time_major, name)
        self._probability, self._seed, self._next_inputs_fn = sampling_probability, seed, next_inputs_fn

    def sample(self, time, outputs, state, name=None):
        """Implements `Helper.sample`: a sample is 1 if the next input is the output."""
        return tf.cast(tf.random_uniform([self.batch_size], seed=self._seed) < self._probability, tf.int32)

    def next_inputs(self, time, outputs, state, sample_ids=None, name=None):
        finished, inputs, state = super().next_inputs(time, outputs, state, sample_ids)
        own = outputs if self._next_inputs_fn is None else self._next_inputs_fn(outputs)
        if self._auxiliary_width:
            own = tf.concat([own, inputs[:, -self._auxiliary_width :]], -1)
        return finished, select_rows(tf.cast(sample_ids, tf.bool), own, inputs), state


class GreedyEmbeddingHelper(_MostLikelyHelper):
    """A helper that feeds the embedding of the most likely class, until `end_token`.

    Args:
      embedding: an embedding table, or a function from ids to embeddings.
      start_tokens: int32 [batch].
      end_token: int32 scalar.
    """

    def __init__(self, embedding, start_tokens, end_token):
        self._embedding_fn = make_lookup_function(embedding)
        self._start_tokens = tf.convert_to_tensor(start_tokens, tf.int32, name="start_tokens")
        self._end_token = tf.convert_to_tensor(end_token, tf.int32, name="end_token")
        if self._start_tokens.shape.rank != 1 or self._end_token.shape.rank != 0:
            raise ValueError(f"{type(self).__name__}: start_tokens must be a vector, end_token a scalar.")
        self._batch_size = tf.size(self._start_tokens)
        self._start_inputs = self._embedding_fn(self._start_tokens)

    def initialize(self, name=None):
        return tf.tile([False], [self._batch_size]), self._start_inputs

    def next_inputs(self, time, outputs, state, sample_ids, name=None):
        finished = tf.equal(sample_ids, self._end_token)
        inputs = tf.cond(tf.reduce_all(finished), lambda: self._start_inputs, lambda: self._embedding_fn(sample_ids))
        return finished, inputs, state


class SampleEmbeddingHelper(GreedyEmbeddingHelper):
    """A helper that feeds the embedding of a class drawn from the outputs' softmax at a temperature."""

    def __init__(self, embedding, start_tokens, end_token, softmax_temperature=None, seed=None):
        super().__init__(embedding, start_tokens, end_token)
        self._temperature, self._seed = softmax_temperature, seed

    def sample(self, time, outputs, state, name=None):
        logits = outputs if self._temperature is None else outputs / self._temperature
        return categorical_sample(logits, seed=self._seed)


class InferenceHelper(CustomHelper):
    """A helper that feeds the results of `sample_fn(outputs)` until `end_fn(samples)` is true."""

    def __init__(self, sample_fn, sample_shape, sample_dtype, start_inputs, end_fn, next_inputs_fn=None):
        start = tf.convert_to_tensor(start_inputs)
        super().__init__(
            lambda: (tf.tile([False], [tf.shape(start)[0]]), start),
            lambda time, outputs, state: sample_fn(outputs),
            lambda time, outputs, state, sample_ids: (
                end_fn(sample_ids), sample_ids if next_inputs_fn is None else next_inputs_fn(sample_ids), state,
            ),
            sample_shape, sample_dtype,
        )  # fmt: skip
        self._batch_size = tf.shape(start)[0]
