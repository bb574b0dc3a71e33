"""Defines beam search."""

from __future__ import annotations

import collections

import numpy as np
import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.rnn.wrappers import check_cell
from tensorflow1_compat.contrib.seq2seq.decoder import Decoder
from tensorflow1_compat.contrib.seq2seq.structure import make_lookup_function, read_only

BeamSearchDecoderState = collections.namedtuple(
    "BeamSearchDecoderState",
    ("cell_state", "log_probs", "finished", "lengths", "accumulated_attention_probs"),
    defaults=((),),
)
BeamSearchDecoderOutput = collections.namedtuple("BeamSearchDecoderOutput", ("scores", "predicted_ids", "parent_ids"))
FinalBeamSearchDecoderOutput = collections.namedtuple(
    "FinalBeamSearchDecoderOutput", ("predicted_ids", "beam_search_decoder_output")
)


def tile_batch(t, multiplier, name=None):
    """Repeats each batch entry `multiplier` times in a row, for all tensors of a nested structure."""

    def tile(tensor):
        tensor = tf.convert_to_tensor(tensor)
        repeated = tf.repeat(tensor, multiplier, axis=0)
        batch = tf.compat.dimension_value(tensor.shape[0])
        known = isinstance(multiplier, int) and batch is not None
        repeated.set_shape(tf.TensorShape([batch * multiplier if known else None]).concatenate(tensor.shape[1:]))
        return repeated

    with tf.name_scope(name, "tile_batch", [*tf.nest.flatten(t), multiplier]):
        return tf.nest.map_structure(tile, t)


def gather_tree(step_ids, parent_ids, max_sequence_lengths, end_token, name=None):
    """Returns the full sequence of each beam from the ids and parent beams of all steps.

    Args:
      step_ids, parent_ids: int32 [time, batch, beams].
      max_sequence_lengths: int32 [batch].
      end_token: int32 scalar, which fills a sequence after its first `end_token` and after its length.

    Returns:
      int32 [time, batch, beams].
    """
    with tf.name_scope(name, "GatherTree"):
        step_ids = tf.convert_to_tensor(step_ids, tf.int32)
        parent_ids = tf.convert_to_tensor(parent_ids, tf.int32)
        time, batch, beams = (tf.shape(step_ids)[axis] for axis in range(3))
        lengths = tf.minimum(tf.cast(max_sequence_lengths, tf.int32), time)[:, None]
        own = tf.broadcast_to(tf.range(beams)[None], [batch, beams])
        nothing = tf.fill([batch, beams], tf.cast(end_token, tf.int32))

        def backward(carry, at):
            beam, _ = carry
            ids, parents, step = at
            is_inside = tf.broadcast_to(step < lengths, [batch, beams])
            found = tf.where(is_inside, tf.gather(ids, beam, batch_dims=1), nothing)
            return tf.where(is_inside, tf.gather(parents, beam, batch_dims=1), beam), found

        _, found = tf.scan(backward, (step_ids, parent_ids, tf.range(time)), (own, nothing), reverse=True)
        is_end = tf.cast(tf.equal(found, end_token), tf.int32)
        ended = tf.cumsum(is_end, axis=0, exclusive=True) > 0
        found = tf.where(ended, tf.fill(tf.shape(found), tf.cast(end_token, tf.int32)), found)
        found.set_shape(step_ids.shape)
        return found


def gather_tree_from_array(t, parent_ids, sequence_length):
    """Returns each beam's full sequence from step values [time, batch, beams, ...] or [time, batch * beams, ...]."""
    time, batch, beams = (tf.shape(parent_ids)[axis] for axis in range(3))
    own = tf.broadcast_to(tf.range(beams)[None, None], [time, batch, beams])
    lengths = tf.cast(tf.reduce_max(sequence_length, axis=1), tf.int32)
    sorted_beams = gather_tree(own, parent_ids, lengths, end_token=tf.constant(-1))
    mask = tf.transpose(tf.sequence_mask(sequence_length, time), [2, 0, 1])
    sorted_beams = tf.where(mask & (sorted_beams >= 0), sorted_beams, own)
    split = tf.reshape(t, [time, batch, beams, -1])
    found = tf.reshape(tf.gather(split, sorted_beams, axis=2, batch_dims=2), tf.shape(t))
    found.set_shape(t.shape)
    return found


def _attention_alignments(cell_state):
    """Returns the alignments of an `AttentionWrapper`, [batch, beams, time]; several mechanisms are concatenated."""
    if not hasattr(cell_state, "alignments"):
        raise ValueError("BeamSearchDecoder: coverage_penalty_weight needs a cell that is an AttentionWrapper.")
    alignments = tf.nest.flatten(cell_state.alignments)
    return alignments[0] if len(alignments) == 1 else tf.concat(alignments, -1)


class BeamSearchDecoder(Decoder):
    """A decoder that keeps the `beam_width` most likely sequences at each step.

    Args:
      cell: an RNN cell; the memory of an attention cell must be tiled with `tile_batch`.
      embedding: an embedding table, or a function from ids to embeddings.
      start_tokens: int32 [batch].
      end_token: int32 scalar.
      initial_state: the initial state of the cell, tiled to [batch * beam_width, ...].
      beam_width: number of sequences to keep.
      output_layer: computes logits from outputs.
      length_penalty_weight: exponent of `(5 + length) / 6`, by which scores are divided.
      coverage_penalty_weight: factor of the sum of `log(min(attention, 1))` that is added to scores of ended sequences;
        the cell must then be an `AttentionWrapper`.
      reorder_tensor_arrays: whether arrays over time in the final state (`alignment_history`) become tensors in which
        each beam has its own past. As in 1.15, this needs elements whose shape is not fully known in the graph.

    `dynamic_decode` returns `FinalBeamSearchDecoderOutput(predicted_ids [batch, time, beams], ...)`.
    """

    tracks_own_finished = True
    batch_size = read_only("_batch_size")

    def __init__(
        self, cell, embedding, start_tokens, end_token, initial_state, beam_width, output_layer=None,
        length_penalty_weight=0.0, coverage_penalty_weight=0.0, reorder_tensor_arrays=True,
    ):  # fmt: skip
        check_cell("BeamSearchDecoder", cell)
        self._coverage_weight, self._reorder_tensor_arrays = coverage_penalty_weight, reorder_tensor_arrays
        self._cell, self._output_layer, self._beam_width = cell, output_layer, beam_width
        self._embedding_fn = make_lookup_function(embedding)
        self._start_tokens = tf.convert_to_tensor(start_tokens, tf.int32)
        self._end_token = tf.convert_to_tensor(end_token, tf.int32)
        self._length_penalty_weight = length_penalty_weight
        self._batch_size = tf.size(self._start_tokens)
        self._initial_cell_state = tf.nest.map_structure(self._split_beams, initial_state)
        tokens = tf.tile(self._start_tokens[:, None], [1, beam_width])
        self._start_inputs = self._embedding_fn(tokens)
        self._finished = tf.one_hot(tf.zeros([self._batch_size], tf.int32), beam_width, False, True, dtype=tf.bool)

    def _split_beams(self, tensor):
        if isinstance(tensor, tf.TensorArray) or tensor.shape.rank in (0, None):
            return tensor
        result = tf.reshape(tensor, tf.concat([[self._batch_size, self._beam_width], tf.shape(tensor)[1:]], 0))
        result.set_shape(tf.TensorShape([tf.get_static_value(self._batch_size), self._beam_width]).concatenate(
            tensor.shape[1:]
        ))  # fmt: skip
        return result

    def _merge_beams(self, tensor):
        if isinstance(tensor, tf.TensorArray) or tensor.shape.rank in (0, None):
            return tensor
        result = tf.reshape(tensor, tf.concat([[self._batch_size * self._beam_width], tf.shape(tensor)[2:]], 0))
        result.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[2:]))
        return result

    @property
    def output_size(self):
        return BeamSearchDecoderOutput(*[tf.TensorShape([self._beam_width])] * 3)

    @property
    def output_dtype(self):
        dtype = tf.nest.flatten(self._initial_cell_state)[0].dtype
        return BeamSearchDecoderOutput(dtype, tf.int32, tf.int32)

    def initialize(self, name=None):
        dtype = tf.nest.flatten(self._initial_cell_state)[0].dtype
        only_first = tf.one_hot(
            tf.zeros([self._batch_size], tf.int32), self._beam_width, tf.cast(0.0, dtype), tf.cast(-np.inf, dtype)
        )
        state = BeamSearchDecoderState(
            self._initial_cell_state, only_first, self._finished,
            tf.zeros([self._batch_size, self._beam_width], tf.int64),
            tf.zeros_like(_attention_alignments(self._initial_cell_state)) if self._coverage_weight else (),
        )  # fmt: skip
        return self._finished, self._start_inputs, state

    def step(self, time, inputs, state, name=None):
        cell_state = tf.nest.map_structure(self._merge_beams, state.cell_state)
        outputs, next_cell_state = self._cell(self._merge_beams(inputs), cell_state)
        logits = self._split_beams(outputs)
        next_cell_state = tf.nest.map_structure(self._split_beams, next_cell_state)
        if self._output_layer is not None:
            logits = self._output_layer(logits)
        output, state = self._search(logits, next_cell_state, state)
        ids = output.predicted_ids
        inputs = tf.cond(tf.reduce_all(state.finished), lambda: self._start_inputs, lambda: self._embedding_fn(ids))
        return output, state, inputs, state.finished

    def _search(self, logits, cell_state, state):
        batch, beams = self._batch_size, self._beam_width
        vocabulary = tf.compat.dimension_value(logits.shape[-1]) or tf.shape(logits)[-1]
        log_probs, dtype = tf.nn.log_softmax(logits), logits.dtype
        only_end = tf.one_hot(self._end_token, vocabulary, tf.cast(0.0, dtype), dtype.as_numpy_dtype(dtype.min))
        log_probs = tf.compat.v2.where(state.finished[:, :, None], only_end, log_probs)
        total = state.log_probs[:, :, None] + log_probs
        grows = tf.one_hot(
            tf.fill([batch, beams], self._end_token), vocabulary, tf.constant(0, tf.int64), tf.constant(1, tf.int64)
        )
        grows = grows * tf.cast(tf.logical_not(state.finished), tf.int64)[:, :, None]
        lengths = state.lengths[:, :, None] + grows
        scores = total
        if self._length_penalty_weight:
            scores = total / tf.pow((5.0 + tf.cast(lengths, dtype)) / 6.0, tf.cast(self._length_penalty_weight, dtype))
        coverage = ()
        if self._coverage_weight:
            seen = _attention_alignments(cell_state) * tf.cast(tf.logical_not(state.finished), dtype)[:, :, None]
            coverage = state.accumulated_attention_probs + seen
            penalty = tf.reduce_sum(tf.log(tf.minimum(coverage, 1.0)), 2) * tf.cast(state.finished, dtype)
            scores += (penalty * tf.cast(self._coverage_weight, dtype))[:, :, None]
        best, places = tf.nn.top_k(tf.reshape(scores, [batch, -1]), beams)
        best.set_shape([None, beams])
        ids, parents = tf.cast(places % vocabulary, tf.int32), tf.cast(places // vocabulary, tf.int32)

        def gather_from_parents(tensor):
            if isinstance(tensor, tf.TensorArray) or tensor.shape.rank in (0, None, 1):
                return tensor
            moved = tf.gather(tensor, parents, batch_dims=1)
            moved.set_shape(tensor.shape)
            return moved

        was_finished = tf.gather(state.finished, parents, batch_dims=1)
        new_lengths = tf.gather(state.lengths, parents, batch_dims=1) + tf.cast(tf.logical_not(was_finished), tf.int64)
        new_probs = tf.gather(tf.reshape(total, [batch, -1]), places, batch_dims=1)
        new_probs.set_shape(state.log_probs.shape)
        new_state = BeamSearchDecoderState(
            tf.nest.map_structure(gather_from_parents, cell_state), new_probs,
            tf.logical_or(was_finished, tf.equal(ids, self._end_token)), new_lengths,
            tf.nest.map_structure(gather_from_parents, coverage),
        )  # fmt: skip
        return BeamSearchDecoderOutput(best, ids, parents), new_state

    def finalize(self, outputs, final_state, sequence_lengths):
        """Returns the full sequences of the final beams, the best beam first."""
        longest = tf.cast(tf.reduce_max(final_state.lengths, axis=1), tf.int32)
        predicted = gather_tree(outputs.predicted_ids, outputs.parent_ids, longest, self._end_token)
        if self._reorder_tensor_arrays:
            final_state = final_state._replace(cell_state=tf.nest.map_structure(
                lambda each: gather_tree_from_array(each.stack(), outputs.parent_ids, final_state.lengths)
                if isinstance(each, tf.TensorArray) and self._is_sorted(each.element_shape) else each,
                final_state.cell_state,
            ))  # fmt: skip
        return FinalBeamSearchDecoderOutput(predicted, outputs), final_state

    def _is_sorted(self, shape):
        """Returns whether 1.15 sorts the beams of an array of elements of this shape."""
        if not shape.rank:
            return False
        batch, (size, *others) = tf.get_static_value(self._batch_size), shape.as_list()
        return batch is None or size is None or (size == batch * self._beam_width and others[:1] in ([], [None]))
