"""Defines attention mechanisms."""

from __future__ import annotations

import functools
import math

import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.seq2seq.structure import read_only


def _prepare_memory(memory, lengths):
    """Returns the memory, a tensor or nested tensors, with zeros after each sequence's end."""
    memory = tf.nest.map_structure(lambda each: tf.convert_to_tensor(each, name="memory"), memory)
    if lengths is None:
        return memory

    def mask_padding(tensor):
        mask = tf.sequence_mask(lengths, tf.shape(tensor)[1], tensor.dtype)
        return tensor * tf.reshape(mask, tf.concat([tf.shape(mask), tf.ones([tf.rank(tensor) - 2], tf.int32)], 0))

    return tf.nest.map_structure(mask_padding, memory)


class AttentionMechanism:
    """A base class of attention mechanisms over a memory.

    A call with a query and the last state returns alignments and the next state.

    Attributes:
      keys: [batch, time, units], the output of `memory_layer` for the memory.
      values: [batch, time, depth], the memory.
    """

    _scope = "attention"

    def __init__(
        self, query_layer, memory, probability_fn, memory_sequence_length=None, memory_layer=None,
        score_mask_value=None, name=None,
    ):  # fmt: skip
        self._name, self._query_layer, self._memory_layer = name or type(self).__name__, query_layer, memory_layer
        self.dtype = tf.nest.flatten(memory)[0].dtype if tf.is_tensor(tf.nest.flatten(memory)[0]) else tf.float32
        self._lengths = None if memory_sequence_length is None else tf.convert_to_tensor(memory_sequence_length)
        self._mask_value = -math.inf if score_mask_value is None else score_mask_value
        self._probability_fn = probability_fn
        with tf.name_scope(name, "BaseAttentionMechanismInit", tf.nest.flatten(memory)):
            self._values = _prepare_memory(memory, self._lengths)
            self._keys = memory_layer(self._values) if memory_layer is not None else self._values
        self._batch_size = tf.compat.dimension_value(self._keys.shape[0]) or tf.shape(self._keys)[0]
        self._alignments_size = tf.compat.dimension_value(self._keys.shape[1]) or tf.shape(self._keys)[1]

    memory_layer = read_only("_memory_layer")
    query_layer = read_only("_query_layer")
    values = read_only("_values")
    keys = read_only("_keys")
    batch_size = read_only("_batch_size")
    alignments_size = state_size = read_only("_alignments_size")

    def initial_alignments(self, batch_size, dtype):
        """Returns zeros [batch, time]."""
        return tf.zeros([batch_size, self._alignments_size], dtype)

    def initial_state(self, batch_size, dtype):
        """Returns the initial state, which consists of the initial alignments."""
        return self.initial_alignments(batch_size, dtype)

    def _mask_scores(self, score):
        if self._lengths is None:
            return score
        mask = tf.sequence_mask(self._lengths, tf.shape(score)[1])
        return tf.where(mask, score, self._mask_value * tf.ones_like(score))

    def _score(self, query):
        raise NotImplementedError

    def __call__(self, query, state):
        """Returns (alignments [batch, time], next state)."""
        with tf.variable_scope(None, self._scope, [query]):
            alignments = self._probability_fn(self._mask_scores(self._score(query)), state)
        return alignments, alignments


_BaseAttentionMechanism = AttentionMechanism


def _make_dense_layer(num_units, name, dtype):
    return tf.layers.Dense(num_units, name=name, use_bias=False, dtype=dtype)


def _wrap_to_ignore_state(probability_fn):
    """Makes a function of scores accept the last state as a second argument, which it ignores."""
    function = probability_fn or tf.nn.softmax
    return lambda score, _: function(score)


class LuongAttention(AttentionMechanism):
    """Multiplicative attention (Luong and others).

    Args:
      num_units: depth of queries and keys.
      memory: the memory to attend to, [batch, time, depth].
      memory_sequence_length: integers [batch]; attention ignores entries after this length.
      probability_fn: function from scores to alignments; default: softmax.
    """

    _scope = "luong_attention"

    def __init__(
        self, num_units, memory, memory_sequence_length=None, scale=False, probability_fn=None, score_mask_value=None,
        dtype=None, custom_key_value_fn=None, name="LuongAttention",
    ):  # fmt: skip
        layer = _make_dense_layer(num_units, "memory_layer", dtype or tf.float32)
        super().__init__(
            None, memory, _wrap_to_ignore_state(probability_fn), memory_sequence_length, layer, score_mask_value, name
        )
        self._num_units, self._scale = num_units, scale
        if custom_key_value_fn is not None:
            self._keys, self._values = custom_key_value_fn(self._keys, self._values)

    def _score(self, query):
        if query.shape[-1] != self._keys.shape[-1]:
            raise ValueError(f"{self._name}: the query has depth {query.shape[-1]}, but the keys have depth "
                             f"{self._keys.shape[-1]}. Set num_units to the query's depth.")  # fmt: skip
        score = tf.squeeze(tf.matmul(query[:, None], self._keys, transpose_b=True), [1])
        if self._scale:
            score = tf.get_variable("attention_g", [], query.dtype, initializer=tf.ones_initializer()) * score
        return score


class BahdanauAttention(AttentionMechanism):
    """Additive attention (Bahdanau and others).

    The variables are `query_layer/kernel`, `memory_layer/kernel` and `attention_v`.

    Args: see `LuongAttention`. `normalize` adds the variables `attention_g` and `attention_b`.
    """

    _scope = "bahdanau_attention"

    def __init__(
        self, num_units, memory, memory_sequence_length=None, normalize=False, probability_fn=None,
        score_mask_value=None, dtype=None, custom_key_value_fn=None, name="BahdanauAttention",
    ):  # fmt: skip
        dtype = dtype or tf.float32
        super().__init__(
            _make_dense_layer(num_units, "query_layer", dtype), memory, _wrap_to_ignore_state(probability_fn),
            memory_sequence_length, _make_dense_layer(num_units, "memory_layer", dtype), score_mask_value, name,
        )  # fmt: skip
        self._num_units, self._normalize = num_units, normalize
        if custom_key_value_fn is not None:
            self._keys, self._values = custom_key_value_fn(self._keys, self._values)

    def _score(self, query):
        wanted = self._query_layer(query)[:, None]
        v = tf.get_variable("attention_v", [self._num_units], query.dtype)
        if not self._normalize:
            return tf.reduce_sum(v * tf.tanh(self._keys + wanted), [2])
        first = tf.constant_initializer(math.sqrt(1.0 / self._num_units))
        g = tf.get_variable("attention_g", [], query.dtype, initializer=first)
        b = tf.get_variable("attention_b", [self._num_units], query.dtype, initializer=tf.zeros_initializer())
        direction = g * v * tf.rsqrt(tf.reduce_sum(tf.square(v)))
        return tf.reduce_sum(direction * tf.tanh(self._keys + wanted + b), [2])


def safe_cumprod(x, *args, **kwargs):
    """Returns the cumulative product of values, clipped to [tiny, 1], computed as a sum of logs."""
    x = tf.convert_to_tensor(x)
    return tf.exp(tf.cumsum(tf.log(tf.clip_by_value(x, x.dtype.as_numpy_dtype(1e-30), 1)), *args, **kwargs))


def monotonic_attention(p_choose_i, previous_attention, mode):
    """Returns the expected alignments of monotonic attention (Raffel and others).

    `mode` is "recursive", "parallel" or "hard".
    """
    p = tf.convert_to_tensor(p_choose_i)
    if mode == "recursive":
        shifted = tf.concat([tf.ones_like(p[:, :1]), 1 - p[:, :-1]], 1)
        pairs = (tf.transpose(shifted), tf.transpose(previous_attention))
        carried = tf.scan(lambda x, each: each[0] * x + each[1], pairs, tf.zeros_like(p[:, 0]))
        return p * tf.transpose(carried)
    if mode == "parallel":
        survives = safe_cumprod(1 - p, axis=1, exclusive=True)
        return p * survives * tf.cumsum(previous_attention / tf.clip_by_value(survives, 1e-10, 1.0), axis=1)
    if mode == "hard":
        p = p * tf.cumsum(previous_attention, axis=1)
        return p * tf.cumprod(1 - p, axis=1, exclusive=True)
    raise ValueError(f"monotonic_attention: mode must be 'recursive', 'parallel' or 'hard'; got {mode!r}.")


def _monotonic_alignments(score, previous, sigmoid_noise, mode, seed=None):
    if sigmoid_noise > 0:
        score += sigmoid_noise * tf.random_normal(tf.shape(score), dtype=score.dtype, seed=seed)
    p = tf.cast(score > 0, score.dtype) if mode == "hard" else tf.sigmoid(score)
    return monotonic_attention(p, previous, mode)


class _MonotonicAttentionMixin:
    """A mixin of monotonic attention: adds the variable `attention_score_bias` to scores; starts at the first entry."""

    def _set_monotonic(self, sigmoid_noise, sigmoid_noise_seed, score_bias_init, mode):
        self._bias_init = score_bias_init
        self._probability_fn = functools.partial(
            _monotonic_alignments, sigmoid_noise=sigmoid_noise, mode=mode, seed=sigmoid_noise_seed
        )

    def _score(self, query):
        score = super()._score(query)
        first = tf.constant_initializer(self._bias_init)
        return score + tf.get_variable("attention_score_bias", [], query.dtype, initializer=first)

    def initial_alignments(self, batch_size, dtype):
        """Returns 1 at the first entry and 0 elsewhere."""
        return tf.one_hot(tf.zeros([batch_size], tf.int32), self._alignments_size, dtype=dtype)


class BahdanauMonotonicAttention(_MonotonicAttentionMixin, BahdanauAttention):
    """A monotonic `BahdanauAttention`, which only moves forward in the memory."""

    _scope = "bahdanau_monotonic_attention"

    def __init__(
        self, num_units, memory, memory_sequence_length=None, normalize=False, score_mask_value=None, sigmoid_noise=0.0,
        sigmoid_noise_seed=None, score_bias_init=0.0, mode="parallel", dtype=None, name="BahdanauMonotonicAttention",
    ):  # fmt: skip
        super().__init__(
            num_units, memory, memory_sequence_length, normalize, None, score_mask_value, dtype, name=name
        )  # fmt: skip
        self._set_monotonic(sigmoid_noise, sigmoid_noise_seed, score_bias_init, mode)


class LuongMonotonicAttention(_MonotonicAttentionMixin, LuongAttention):
    """A monotonic `LuongAttention`, which only moves forward in the memory."""

    _scope = "luong_monotonic_attention"

    def __init__(
        self, num_units, memory, memory_sequence_length=None, scale=False, score_mask_value=None, sigmoid_noise=0.0,
        sigmoid_noise_seed=None, score_bias_init=0.0, mode="parallel", dtype=None, name="LuongMonotonicAttention",
    ):  # fmt: skip
        super().__init__(num_units, memory, memory_sequence_length, scale, None, score_mask_value, dtype, name=name)
        self._set_monotonic(sigmoid_noise, sigmoid_noise_seed, score_bias_init, mode)
