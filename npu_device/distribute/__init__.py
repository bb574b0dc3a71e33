"""Exchanges values between ranks under `npu_device`. A process that trains alone keeps its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.errors import message
from npu_bridge.base.tf_internals import keras3
from npu_bridge.collective.groups import WORLD
from npu_bridge.estimator.npu.npu_callbacks import NPUBroadcastGlobalVariablesCallback
from npu_bridge.gradients.graph_mode import is_building_graph
from npu_bridge.gradients.in_place import average_gradients_in_place
from npu_bridge.gradients.over_ranks import reduce_all
from npu_bridge.hccl.checks import CollectiveCall
from npu_device.distribute import hccl, hccl_ops

__all__ = [
    "NPUBroadcastGlobalVariablesCallback",
    "all_reduce",
    "broadcast",
    "grouping_broadcast",
    "grouping_gradients_apply",
    "hccl",
    "hccl_ops",
    "npu_distributed_keras_optimizer_wrapper",
    "shard_and_rebatch_dataset",
]


def all_reduce(values: Any, reduction: str = "mean", fusion: int = 1, fusion_id: int = -1, group: str = WORLD) -> Any:
    """Combines a value, or each value of a list, over the ranks.

    Args:
      values: a number, array, tensor, variable or `tf.IndexedSlices`, or a list or tuple of them. None stays None.
      reduction: "mean", "sum", "max", "min" or "prod". A mean of integers is a float.
      fusion: how a list is all-reduced: 0 one by one, 1 in the fragments set by `hccl.split.api`, 2 all together.
      fusion_id: -1, or an id of at least 0 with `fusion=2`.
      group: name of the group.
    Returns:
      A tensor, or a list of tensors and None; `values` itself in a job of one rank.
    Raises:
      ValueError: an argument has a value that is not allowed.
    Ranks: collective in `group`.
    """
    call = CollectiveCall("npu.distribute.all_reduce", group)
    call.check_fusion(fusion, fusion_id, allowed=(0, 1, 2))
    if call.communicator.size == 1:
        return values
    given = list(values) if isinstance(values, (list, tuple)) else [values]
    places = [place for place, value in enumerate(given) if value is not None]
    tensors = [given[place] for place in places]
    tensors = [each if isinstance(each, tf.IndexedSlices) else tf.convert_to_tensor(each) for each in tensors]
    is_mean = reduction == "mean"
    # The mean of integers is not an integer.
    wide = [is_mean and not isinstance(each, tf.IndexedSlices) and each.dtype.is_integer for each in tensors]
    tensors = [tf.cast(each, tf.float64) if is_wide else each for each, is_wide in zip(tensors, wide)]
    for place, reduced in zip(places, reduce_all(tensors, reduction, fusion, group)):
        given[place] = reduced
    return given if isinstance(values, (list, tuple)) else given[0]


def broadcast(values: Any, root_rank: int = 0, fusion: int = 2, fusion_id: int = 0, group: str = WORLD) -> None:
    """Assigns to variables on all ranks their values on one rank.

    Args:
      values: a variable, or a list or tuple of variables.
      root_rank: the rank whose values are sent.
      fusion, fusion_id, group: as in `hccl_ops.broadcast`.
    Raises:
      TypeError: an element is not a variable.
      ValueError: `root_rank` is not a rank.
      RuntimeError: on several ranks, called in a TF 1 graph.
    Ranks: collective in `group`.
    """
    variables = list(map(keras3.tensorflow_variable_of, values if isinstance(values, (list, tuple)) else [values]))
    for variable in variables:
        if not isinstance(variable, tf.Variable):
            fix = "For tensors, use hccl_ops.broadcast."
            got = type(variable).__name__
            raise TypeError(
                message("npu.distribute.broadcast", "only variables can be assigned", "variables", got, fix)
            )
    if collective.group(group, "npu.distribute.broadcast").size > 1:
        if is_building_graph():
            problem, expected = "no session would run the assignments", "eager execution or a tf.function"
            fix = "Write session.run(hccl_ops.broadcast(variables, root_rank))."
            raise RuntimeError(message("npu.distribute.broadcast", problem, expected, "a TF 1 graph", fix))
        hccl_ops.broadcast(variables, root_rank, fusion, fusion_id, group)


def npu_distributed_keras_optimizer_wrapper(
    optimizer: Any, reduce_reduction: str = "mean", fusion: int = 1, fusion_id: int = -1, group: str = WORLD
) -> Any:
    """Makes a Keras optimizer average its gradients over the ranks, in place.

    Averaging happens inside the update. Changes that a script makes to gradients before `apply_gradients` therefore
    apply to the gradients of one rank.

    Args:
      optimizer: a Keras optimizer of either generation, or an argument of `tf.keras.optimizers.get`.
      reduce_reduction: must be "mean".
      fusion, fusion_id: checked, without effect: `hccl.split.api` sets how gradients are split into all-reduces.
      group: must be the group of all ranks.
    Returns:
      The given optimizer, or the optimizer made from a name or configuration.
    Raises:
      TypeError: `optimizer` is not an optimizer.
      ValueError: no optimizer has the given name, or another argument has an unsupported value.
    """
    where = "npu_distributed_keras_optimizer_wrapper"
    CollectiveCall(where, group).check_fusion(fusion, fusion_id, allowed=(0, 1, 2))
    for name, given, only, fix in (
        ("reduce_reduction", reduce_reduction, "mean", "For a sum, multiply the learning rate by the number of ranks."),
        ("group", group, WORLD, "For another group, use npu.distribute.all_reduce."),
    ):
        if given != only:
            raise ValueError(message(where, f"{name} has an unsupported value", repr(only), repr(given), fix))
    if isinstance(optimizer, (str, dict)):
        optimizer = tf.keras.optimizers.get(optimizer)
    return average_gradients_in_place(optimizer, where)


def shard_and_rebatch_dataset(dataset: tf.data.Dataset, global_bs: int) -> tuple[tf.data.Dataset, int]:
    """Returns this rank's part of a dataset, still unbatched, and this rank's batch size.

    Args:
      dataset: the whole dataset, whose elements are single examples.
      global_bs: number of examples in a batch of all ranks together.
    Returns:
      With n ranks, every n-th example starting at the index of this rank, and `global_bs` / n. With only one rank, both
      arguments unchanged.
    Raises:
      ValueError: `global_bs` is not a multiple of the number of ranks.
    """
    ranks = collective.current()
    if ranks.size == 1:
        return dataset, global_bs
    if global_bs % ranks.size:
        expected, fix = f"a multiple of {ranks.size}", "Change global_bs."
        where = "npu.distribute.shard_and_rebatch_dataset"
        raise ValueError(message(where, "the ranks cannot share a batch equally", expected, str(global_bs), fix))
    return dataset.shard(ranks.size, ranks.rank), int(global_bs // ranks.size)


def grouping_gradients_apply(apply_func: Callable, grads_and_vars: Sequence, *args: Any, **kwargs: Any) -> Any:
    """Averages gradients over the ranks and applies them; every rank updates every variable.

    Args:
      apply_func: the `apply_gradients` of an optimizer, or another function that takes (gradient, variable) pairs.
      grads_and_vars: (gradient, variable) pairs of this rank; a gradient can be None.
      *args, **kwargs: passed to `apply_func` after the pairs.
    Returns:
      The result of `apply_func`.
    Ranks: collective.
    """
    pairs = list(grads_and_vars)
    averaged = all_reduce([grad for grad, _ in pairs])
    return apply_func([(grad, variable) for grad, (_, variable) in zip(averaged, pairs)], *args, **kwargs)


def grouping_broadcast(variables: Sequence) -> None:
    """Assigns to variables on all ranks their values on rank 0.

    Training needs this only at the start, because `grouping_gradients_apply` updates all variables on every rank.
    """
    broadcast(variables, 0)
