"""Reduces gradients over the ranks for scripts that call `npu_allreduce` instead of using a distributed optimizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from npu_bridge import collective
from npu_bridge.base.errors import message, say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.collective import groups, wire_names
from npu_bridge.collective.checks import agreement
from npu_bridge.collective.composed import forbid_gradient, keep_in_function, sum_over_ranks, sum_together
from npu_bridge.collective.engines.communicator import REDUCTIONS, Communicator
from npu_bridge.gradients.arithmetic import gather_sparse_rows, map_values
from npu_bridge.gradients.first_step.start_values import compare_variables_before_first_run
from npu_bridge.gradients.graph_mode import is_building_graph
from npu_bridge.gradients.stages.all_reduce import cut_fragments
from npu_bridge.graph.variables import variables_updated_from

_BY_STRATEGY, _TOGETHER = 1, 2


def mean_or_sum(value: Any, is_mean: bool, communicator: Communicator, name: str) -> Any:
    """Returns the mean or the sum of one gradient over the ranks.

    Args:
      value: dense tensor, or `tf.IndexedSlices`, whose rows are gathered from all ranks without merging equal indices.
        The mean of integers is rounded down.
      is_mean: True for the mean, False for the sum.
      communicator: communicator of the ranks.
      name: prefix of the names of the collectives, the same on every rank.
    Returns:
      A dense tensor or `tf.IndexedSlices`, like `value`, of the same dtype.
    """
    if isinstance(value, tf.IndexedSlices):
        gathered = gather_sparse_rows(
            value, lambda part, of: keep_in_function(communicator, communicator.all_gather(part, of)), name
        )
        return map_values(gathered, lambda values: _divide_for_mean(values, is_mean, communicator))
    return _divide_for_mean(sum_over_ranks(communicator, tf.convert_to_tensor(value), name), is_mean, communicator)


def reduce_all(values: Sequence[Any], reduction: str, fusion: int, group: str) -> list:
    """Reduces a list of gradients over the ranks of a group.

    Args:
      values: dense tensors and `tf.IndexedSlices`.
      reduction: "mean", "sum", "max", "min" or "prod". Sparse values are summed for all reductions but "mean".
      fusion: how sums are sent: 0 one by one; 1 in the fragments of the group's split strategy, if the strategy fits
        the number of values; 2 all together.
      group: name of the group; a mean divides by its size.
    Returns:
      List of reduced values in the order of `values`.
    Raises:
      ValueError: the reduction or the group does not exist, or a value is None.
      RanksDisagreeError: another rank is about to reduce other values; checked when all ranks build a graph.
    """
    communicator = collective.group(group, "npu_allreduce")
    _check_values(values, reduction)
    if group == groups.WORLD and communicator.size > 1 and is_building_graph():
        plan = agreement.AllReducePlan("npu_allreduce", [_describe_value(*value) for value in enumerate(values)])
        plan.settings.update(reduction=reduction, fusion=fusion)
        agreement.agreements_of_process().check(
            plan, communicator.rank, communicator.size, training=wire_names.current_collectives_label()
        )
    with wire_names.record_collective_names() as transfers:
        results = _reduce(values, reduction, fusion, communicator, group)
    if group == groups.WORLD and communicator.size > 1 and is_building_graph():
        compare_variables_before_first_run("npu_allreduce", lambda: variables_updated_from(results), transfers)
    return results


def _reduce(values, reduction, fusion, communicator, group):
    name = f"npu_allreduce_{reduction}_{groups.members_label(communicator)}"
    is_mean = reduction == "mean"
    if is_mean and group != groups.WORLD:
        say_once(logging.INFO, "npu_allreduce: a mean in a group divides by the size of the group, not of the job.")
    if reduction not in ("mean", "sum"):
        return [_reduce_value(value, reduction, communicator, name) for value in values]
    if fusion not in (_BY_STRATEGY, _TOGETHER):
        return [mean_or_sum(value, is_mean, communicator, name) for value in values]
    values = [value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value) for value in values]
    results = {
        position: mean_or_sum(value, is_mean, communicator, f"{name}_{position}")
        for position, value in enumerate(values)
        if isinstance(value, tf.IndexedSlices)
    }
    for positions in _split_into_all_reduces(values, fusion, group):
        tensors = [values[position] for position in positions]
        sums = sum_together(communicator, tensors, f"{name}_{positions[0]}")
        results.update(zip(positions, (_divide_for_mean(total, is_mean, communicator) for total in sums)))
    return [results[position] for position in range(len(values))]


def _reduce_value(value, reduction, communicator, name):
    if isinstance(value, tf.IndexedSlices):
        return mean_or_sum(value, False, communicator, name)
    reduced = keep_in_function(communicator, communicator.reduce(tf.convert_to_tensor(value), reduction, name))
    return forbid_gradient(reduced, f"npu_allreduce with {reduction!r}")


def _describe_value(position, value):
    """Returns the properties of one value that must be equal on all ranks."""
    value = value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)
    if isinstance(value, tf.IndexedSlices):  # ranks can have different numbers of rows
        return agreement.PlannedGradient(f"value {position}", "", "a sparse gradient", value.dtype.name)
    shape = str(tuple(value.shape.as_list())) if value.shape.is_fully_defined() else "unknown"
    return agreement.PlannedGradient(f"value {position}", shape, "a dense gradient", value.dtype.name)


def _split_into_all_reduces(values, fusion, group):
    dense = [position for position, value in enumerate(values) if isinstance(value, tf.Tensor)]
    strategy = groups.groups_of_process().strategies.strategy_of(group)
    if fusion == _BY_STRATEGY and strategy.can_split(len(dense)):
        return cut_fragments(values, [f"value {position}" for position in range(len(values))], strategy)
    return [dense] if dense else []


def _divide_for_mean(total, is_mean, communicator):
    if not is_mean or communicator.size == 1:
        return total
    size = tf.cast(communicator.size, total.dtype)
    return total // size if total.dtype.is_integer else total / size


def _check_values(values, reduction):
    choices = ("mean", *REDUCTIONS)
    if reduction not in choices:
        problem, expected, got = "unknown reduction", ", ".join(map(repr, choices)), repr(reduction)
        fix = "Correct the name."
        raise ValueError(message("npu_allreduce", problem, expected, got, fix))
    missing = [position for position, value in enumerate(values) if value is None]
    if missing:
        problem, got, fix = "some values cannot be reduced", f"None at positions {missing}", "Leave these values out."
        raise ValueError(message("npu_allreduce", problem, "tensors", got, fix))
