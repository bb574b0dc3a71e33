"""Sparsifies gradients: each step sends only the largest values; the other values are sent in later steps."""

from __future__ import annotations

import abc
import logging
import math
from typing import Any

from npu_bridge import collective
from npu_bridge.base.arguments import check_choice, check_number, check_switch
from npu_bridge.base.errors import message, say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.collective import fragments
from npu_bridge.gradients.arithmetic import average_sparse_rows, unscale_in_float32
from npu_bridge.gradients.graph_mode import group_in_graph, make_tensors_if, run_if, variable_like
from npu_bridge.gradients.stage import VERDICT
from npu_bridge.gradients.stages.all_reduce import (
    AllReduce,
    replace_gradients,
    static_bytes,
    wait_for_all_gradients,
)

# Gradients with at least _SAMPLED_SIZE values are sampled at every _SAMPLED_EVERY-th value, unless a larger share than
# _SAMPLED_DENSITY is sent.
_SAMPLED_SIZE, _SAMPLED_EVERY, _SAMPLED_DENSITY = 2**14, 32, 0.1


class _SparsifyingReduction(AllReduce, abc.ABC):
    """Base of stages that average dense gradients by sending only some values, with their positions.

    With error feedback, a rank stores the unscaled values that it did not send, and adds them to the next gradient. A
    skipped step leaves these values unchanged, bit for bit. Sparse gradients are sent completely. With one rank this
    stage does nothing.
    """

    needs = (VERDICT,)

    def __init__(self, error_feedback: bool):
        super().__init__(type(self).__name__)
        error_feedback = check_switch(type(self).__name__, "error_feedback", error_feedback, "Leave it out for True.")
        self._has_feedback = self.needs_variables = error_feedback
        # Unsent values would be added to gradients of another scale, and a sum can be too large where no gradient is.
        self.needs_unscaled_gradients, self.keeps_usable = error_feedback, not error_feedback
        self._residuals: tf.Module | None = None
        self._residual_of: dict = {}

    def state(self):
        if not self._has_feedback:
            return {}
        if self._residuals is None:
            self._residuals = tf.Module(name="not_sent")
        return {"not_sent": self._residuals}

    def create_variables(self, variables, gradients=None):
        if self._sends_selected_values() and self._has_feedback:
            for position, variable in enumerate(variables):
                if gradients is None or isinstance(gradients[position], tf.Tensor):
                    self._residual_variable(variable)

    def variables_of_this_rank(self):
        return list(self._residual_of.values())

    def agreed_settings(self, grads_and_vars):
        return {**super().agreed_settings(grads_and_vars), type(self).__name__: str(self.get_config())}

    def all_reduce(self, step):
        if not self._sends_selected_values():
            super().all_reduce(step)
            return
        ranks = collective.current()
        with tf.name_scope(f"{self.transfer_name}_SparsifyingReduction"):
            wide = [
                None if sent is None else unscale_in_float32(sent, step.divisor)
                for sent in wait_for_all_gradients(step.on_wire)
            ]
            variables = [variable for _, variable in step.grads_and_vars]
            means = {
                position: average_sparse_rows(
                    grad, ranks.all_gather, ranks.size, f"{self.transfer_name}_sparse_{position}"
                )
                for position, grad in enumerate(wide)
                if isinstance(grad, tf.IndexedSlices)
            }
            cut = self.fragments(step.grads_and_vars)
            # Sparse gradients are averaged above; frozen variables have no gradient.
            sizes_bytes = [static_bytes(grad) if isinstance(grad, tf.Tensor) else 0 for grad in wide]
            for number, positions in enumerate(fragments.split_large_fragments(cut, sizes_bytes, ranks.size)):
                pairs = [(wide[position], variables[position]) for position in positions]
                means.update(
                    zip(positions, self._average_fragment(pairs, step, ranks, f"{self.transfer_name}_values_{number}"))
                )
            replace_gradients(step, means)
        step.mark_as_unscaled()

    def after_update(self, step):
        kept = [(residual, step.notes.get((self, key))) for key, residual in self._residual_of.items()]
        kept = [(residual, left) for residual, left in kept if left is not None]
        if not kept:
            return None

        def keep():
            assigned = [residual.assign(left) for residual, left in kept]
            return group_in_graph(*assigned)

        with tf.name_scope(f"{self.transfer_name}_SparsifyingReduction"):
            return run_if(step.should_apply, keep)

    def _check_numbers(self, grads_and_vars):
        super()._check_numbers(grads_and_vars)
        for grad, variable in grads_and_vars:
            if grad is not None and grad.dtype.size > tf.float32.size and self._sends_selected_values():
                kind, got = type(self).__name__, f"the gradient of {variable.name} of {grad.dtype.name}"
                fix = f"Train in float32, or leave {kind} out."
                raise TypeError(message(kind, "selected values are sent in 32 bits", "float32 or 16 bits", got, fix))

    def _average_fragment(self, pairs, step, ranks, name):
        """Averages the gradients of a fragment over the ranks; one all-gather sends all their selected values."""
        flats = [tf.reshape(grad, [-1]) for grad, _ in pairs]
        if self._has_feedback:
            flats = [
                flat + tf.reshape(self._residual_variable(variable).read_value(), [-1])
                for flat, (_, variable) in zip(flats, pairs)
            ]
        sizes = [_number_of_values(flat) for flat in flats]
        chosen, positions, first = [], [], 0
        for unit in self._selection_ranges(len(pairs)):
            vector = flats[unit.start] if len(unit) == 1 else tf.concat([flats[number] for number in unit], axis=0)
            selected = self._select_positions(vector)
            chosen.append(tf.gather(vector, selected))
            positions.append(selected + first)
            first += _number_of_values(vector)
            if self._has_feedback:
                left = tf.tensor_scatter_nd_update(vector, selected[:, tf.newaxis], tf.zeros_like(chosen[-1]))
                for number, part in zip(unit, _split_vector(left, [sizes[number] for number in unit])):
                    variable = pairs[number][1]
                    step.notes[self, variable.ref()] = tf.reshape(part, variable.shape)
        # Values as int32 bits, next to their positions, so that one all-gather sends both.
        rows = tf.stack([tf.bitcast(tf.concat(chosen, axis=0), tf.int32), tf.concat(positions, axis=0)], axis=1)
        of_ranks = ranks.all_gather(rows, name)
        values = tf.bitcast(of_ranks[:, 0], tf.float32) / ranks.size
        total = tf.math.unsorted_segment_sum(values, of_ranks[:, 1], first)
        parts = _split_vector(total, sizes)
        return [tf.ensure_shape(tf.reshape(part, tf.shape(grad)), grad.shape) for part, (grad, _) in zip(parts, pairs)]

    def _residual_variable(self, variable: Any) -> Any:
        key = variable.ref()
        if key not in self._residual_of:
            made = variable_like(variable, type(self).__name__, "not_sent", tf.float32)
            setattr(self.state()["not_sent"], f"residual_{len(self._residual_of)}", made)
            self._residual_of[key] = made
        return self._residual_of[key]

    def _sends_selected_values(self) -> bool:
        """Returns whether to send selected values: not with one rank, nor if dense all-reduces send fewer bytes."""
        return collective.current().size > 1

    def _selection_ranges(self, count: int) -> list[range]:
        """Returns ranges of gradients of a fragment; values are selected from all gradients of a range together."""
        return [range(number, number + 1) for number in range(count)]

    @abc.abstractmethod
    def _select_positions(self, vector: tf.Tensor) -> tf.Tensor:
        """Returns the positions of the values to send in a vector, int32."""


def _number_of_values(flat):
    return tf.size(flat) if flat.shape.num_elements() is None else flat.shape.num_elements()


def _split_vector(flat, sizes):
    return [flat] if len(sizes) == 1 else tf.split(flat, sizes)


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class TopK(_SparsifyingReduction):
    """Sends only the values of each gradient with the largest magnitudes, in place of the all-reduce.

    Each of the N ranks receives the values and positions of all other ranks, which saves bytes only at a density below
    1 / N. At higher densities gradients are all-reduced as without this stage, and this is logged once.

    Args:
      density: share of the values that is sent, above 0 and at most 1. At least one value is sent.
      error_feedback: add the values that were not sent to the gradient of the next step, instead of losing them.
      per: "tensor" to send this share of each gradient, "fragment" for this share of all gradients that are sent
        together (`FUSION_TENSOR_SIZE` bytes), so that large values of one gradient displace small values of another.
    Raises:
      TypeError: `density` is not a number, or `error_feedback` is not a boolean.
      ValueError: `density` is out of its range, or `per` is neither "tensor" nor "fragment".
    Graph: with error feedback, a variable in the shape of each trained variable; its values differ between ranks.
    """

    def __init__(self, density: float, error_feedback: bool = True, per: str = "tensor"):
        super().__init__(error_feedback)
        fix = "Use 0.01 to send one value of a hundred."
        self._density = check_number("TopK", "density", density, fix, above=0, at_most=1)
        fix = "Leave it out for a share of each gradient."
        self._per = check_choice("TopK", "per", per, ("tensor", "fragment"), fix)

    def get_config(self):
        return {"density": self._density, "error_feedback": self._has_feedback, "per": self._per}

    def sent_bytes(self, other_bytes, ranks):
        if self._is_dense_cheaper(ranks):
            return other_bytes
        of_dense = 2 * (ranks - 1) / ranks * tf.float32.size  # a ring all-reduce
        of_sparse = (ranks - 1) * self._density * (tf.float32.size + tf.int32.size)  # a message to each other rank
        return other_bytes * of_sparse / of_dense

    def _is_dense_cheaper(self, ranks):
        return self._density * ranks >= 1

    def _sends_selected_values(self):
        ranks = collective.current().size
        is_dense = ranks > 1 and self._is_dense_cheaper(ranks)
        if is_dense:
            limit = f"1 / {ranks}"
            say_once(
                logging.INFO, f"TopK: density={self._density} is not below {limit}; gradients are sent completely."
            )
        return ranks > 1 and not is_dense

    def _selection_ranges(self, count):
        return super()._selection_ranges(count) if self._per == "tensor" else [range(count)]

    def _select_positions(self, vector):
        size, magnitudes = vector.shape.num_elements(), tf.abs(vector)
        if size is None:
            count = tf.cast(tf.math.ceil(self._density * tf.cast(tf.size(vector), tf.float64)), tf.int32)
            return tf.math.top_k(magnitudes, k=count, sorted=False).indices
        count = math.ceil(self._density * size)

        def of_all():
            return [tf.math.top_k(magnitudes, k=count, sorted=False).indices]

        if size < _SAMPLED_SIZE or self._density > _SAMPLED_DENSITY:
            return of_all()[0]
        # Finding the largest values costs far more than one pass. A sample shows which values are too small; if the
        # sample misleads, all values are searched.
        in_sample = count / _SAMPLED_EVERY
        enough = math.ceil(1.25 * in_sample + 4 * math.sqrt(in_sample))
        bound = tf.math.top_k(magnitudes[::_SAMPLED_EVERY], k=enough).values[-1]
        candidates = tf.cast(tf.where(magnitudes >= bound)[:, 0], tf.int32)

        def of_candidates():
            best = tf.math.top_k(tf.gather(magnitudes, candidates), k=count, sorted=False).indices
            return [tf.gather(candidates, best)]

        return tf.ensure_shape(make_tensors_if(tf.size(candidates) >= count, of_candidates, of_all)[0], [count])


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class Threshold(_SparsifyingReduction):
    """Sends only the values of each unscaled gradient whose magnitude is at least `value`.

    Args:
      value: the smallest magnitude that is sent, above 0.
      error_feedback: as in `TopK`.
    Raises:
      TypeError: `value` is not a number, or `error_feedback` is not a boolean.
      ValueError: `value` is out of its range.
    Graph: as in `TopK`.
    """

    def __init__(self, value: float, error_feedback: bool = True):
        super().__init__(error_feedback)
        self._value = check_number("Threshold", "value", value, "Use 1e-3.", above=0)
        self.needs_unscaled_gradients = True

    def get_config(self):
        return {"value": self._value, "error_feedback": self._has_feedback}

    def sent_bytes(self, other_bytes, ranks):
        return None

    def _select_positions(self, vector):
        return tf.cast(tf.where(tf.abs(vector) >= self._value)[:, 0], tf.int32)
