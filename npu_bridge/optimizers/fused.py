"""Runs rules on many variables at once: joins small variables into flat tensors, uses one-pass kernels for large ones.

Results equal those of `unfused` except for rounding, as sums over tensors are added up in another order. Slots stay
separate variables, so checkpoints are the same for both modules. Every update reads the weights anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from npu_bridge.base.arguments import check_switch
from npu_bridge.base.flat_tensors import concatenate_flat, contiguous_slice
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.optimizers import flat_slots, kernels, unfused
from npu_bridge.optimizers.groups import VariableTreatment
from npu_bridge.optimizers.hypers import compute_hyper_values
from npu_bridge.optimizers.rule import TensorReductions

# Variables of up to this many elements are joined. For larger variables, computing takes longer than starting ops.
JOINED_ELEMENTS = 2**16
# The size of a joined tensor, so that the output of one op is still in the cache when the next one reads it.
FLAT_ELEMENTS = 2**17


def check_fused_argument(owner: str, fused: Any) -> bool:
    """Returns the argument `fused` of an optimizer, False for None; raises TypeError unless it is a boolean."""
    return fused is not None and check_switch(owner, "fused", fused)


@dataclasses.dataclass
class PendingUpdate:
    """A variable to update, with its dense gradient, its slots by name, and its treatment (rule and settings)."""

    variable: Any
    gradient: tf.Tensor
    slots: dict
    treatment: VariableTreatment

    @property
    def element_count(self) -> int | None:
        """The number of elements of the variable; None if its shape is not fully known."""
        return self.variable.shape.num_elements() if self.variable.shape.is_fully_defined() else None


class _RowReductions(TensorReductions):
    """Computes a sum for each tensor of a batch; the tensors have one size and are the rows of a matrix."""

    def sum(self, values):
        return tf.reduce_sum(values, 1, keepdims=True)


def update_variables_together(
    pending_updates: Sequence[PendingUpdate],
    updates_done: tf.Tensor,
    learning_rate_of: Callable[[VariableTreatment], Any] = lambda treatment: None,
) -> list:
    """Updates variables and their slots.

    Args:
      pending_updates: the variables, in the order in which their gradients become known.
      updates_done: number of updates before this one, an integer scalar.
      learning_rate_of: function that returns the current learning rate for a treatment, or None to use the rate of the
        rule.
    Returns:
      The ops to wait for; Nones in eager execution.
    """
    known = {}

    def hypers_of(treatment, dtype):
        if (treatment, dtype) not in known:
            hypers = known[treatment, dtype] = compute_hyper_values(
                treatment, updates_done, dtype, learning_rate_of(treatment)
            )
            kernels.add_kernel_scalars(treatment.rule, hypers)
        return known[treatment, dtype]

    updated = []
    for batch in _group_into_batches(pending_updates):
        first = batch[0]
        hypers = hypers_of(first.treatment, unfused.update_dtype(first.variable))
        with tf.device(first.variable.device):
            if len(batch) > 1:
                updated += _update_joined_variables(batch, hypers)
            elif _has_kernel(first):
                updated.append(
                    kernels.update_variable(first.variable, first.gradient, first.slots, first.treatment.rule, hypers)
                )
            else:
                updated.append(
                    unfused.update_variable(first.variable, first.gradient, first.slots, first.treatment, hypers)
                )
    return updated


def _group_into_batches(pending_updates):
    """Groups variables that are updated together: with equal treatment, dtype and device, up to a number of elements.

    For rules that use norms of whole tensors, all variables of a batch have one size and become rows of a matrix. Sums
    over parts of different lengths would take most of the time of an update.
    """
    batches, open_batches, filled = [], {}, {}
    for one in pending_updates:
        key = fused_batch_key(one.variable, one.treatment)
        is_one_op = not one.slots and _has_kernel(one) and not one.treatment.rule.reads_parameter
        if key is None or is_one_op:
            batches.append([one])
            continue
        if key not in open_batches or filled[key] + one.element_count > FLAT_ELEMENTS:
            open_batches[key], filled[key] = [], 0
            batches.append(open_batches[key])
        open_batches[key].append(one)
        filled[key] += one.element_count
    return batches


def fused_batch_key(variable: Any, treatment: VariableTreatment) -> tuple | None:
    """Returns a key that is equal for variables that can be updated together; None for a variable updated alone."""
    elements = variable.shape.num_elements() if variable.shape.is_fully_defined() else None
    is_small = elements is not None and elements <= JOINED_ELEMENTS
    if not (is_small and treatment.rule.is_elementwise_or_norms):
        return None
    size = elements if _needs_norm_of_each_variable(treatment) else None
    return treatment, variable.dtype.base_dtype, variable.device, size


def _has_kernel(pending):
    is_resource = all(hasattr(kept, "handle") for kept in (pending.variable, *pending.slots.values()))
    is_wide = unfused.update_dtype(pending.variable) == pending.variable.dtype.base_dtype
    return is_resource and is_wide and kernels.has_kernel(pending.treatment.rule)


def _needs_norm_of_each_variable(treatment):
    return treatment.adapts_layer and treatment.rule.uses_norms


def _update_joined_variables(batch, hypers):
    """Updates variables of equal treatment, dtype and device as one tensor; returns the ops.

    Every write depends on all reads, so no control dependencies are needed for TF 1 reference variables.
    """
    rule, sizes = batch[0].treatment.rule, [one.element_count for one in batch]
    own_dtype = batch[0].variable.dtype.base_dtype
    dtype = unfused.update_dtype(batch[0].variable)
    shape = [len(sizes), sizes[0]] if _needs_norm_of_each_variable(batch[0].treatment) else [sum(sizes)]
    gradient = tf.cast(_join_into_flat([one.gradient for one in batch], shape), dtype)
    parameter = None
    if rule.reads_parameter or own_dtype != dtype:
        parameter = tf.cast(_join_into_flat([one.variable for one in batch], shape), dtype)
    change, written = _compute_parameter_change(batch, parameter, gradient, hypers, sizes)
    if parameter is not None:
        for one, part in zip(batch, _split_into_tensors(tf.cast(parameter + change, own_dtype), batch)):
            written.append(one.variable.assign(part, read_value=False))
    else:
        for one, part in zip(batch, _split_into_tensors(change, batch)):
            written.append(one.variable.assign_add(part, read_value=False))
    return written


def _compute_parameter_change(batch, parameter, gradient, hypers, element_counts):
    """Returns the tensor to add to the joined parameter, and the ops that update the slots."""
    rule, shape = batch[0].treatment.rule, gradient.shape
    flat = flat_slots.find_or_make_flat_slots([one.slots for one in batch], element_counts)
    if flat is None:
        slots = {name: _join_into_flat([one.slots[name] for one in batch], shape) for name in batch[0].slots}
        amount, new_slots = rule.amount_with_decay(parameter, gradient, slots, hypers, _RowReductions())
        written = [
            one.slots[name].assign(part, read_value=False)
            for name, values in new_slots.items()
            for one, part in zip(batch, _split_into_tensors(values, batch))
        ]
        return -amount, written
    written = []
    with flat.lock_for_update([gradient] if parameter is None else [gradient, parameter], written):
        if kernels.has_kernel(rule):
            change = kernels.update_slots(
                parameter, gradient, flat.handles, rule, hypers, _RowReductions(), f"{flat.name}_change"
            )
            written.append(change)
        else:
            slots = {name: tf.reshape(values, shape) for name, values in flat.read().items()}
            amount, new_slots = rule.amount_with_decay(parameter, gradient, slots, hypers, _RowReductions())
            with tf.control_dependencies([amount, *new_slots.values()]):
                written += flat.write({name: tf.reshape(values, [-1]) for name, values in new_slots.items()})
            change = -amount
    return change, written


def _join_into_flat(tensors, shape):
    flat = contiguous_slice(tensors)
    flat = concatenate_flat(tensors) if flat is None else flat
    return flat if len(shape) == 1 else tf.reshape(flat, shape)


def _split_into_tensors(joined, batch):
    flat = joined if joined.shape.rank == 1 else tf.reshape(joined, [-1])
    parts = tf.split(flat, [one.element_count for one in batch])
    return [
        part if one.variable.shape.rank == 1 else tf.reshape(part, one.variable.shape)
        for one, part in zip(batch, parts)
    ]
