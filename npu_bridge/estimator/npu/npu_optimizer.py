"""Defines the documented optimizers that average gradients over the ranks and scale the loss."""

from __future__ import annotations

import abc
import logging

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.arguments import check_switch
from npu_bridge.base.errors import message, say_once, unknown_keyword
from npu_bridge.base.terminal import logger
from npu_bridge.collective import wire as wire_formats
from npu_bridge.collective.fragments import check_first_parameters
from npu_bridge.collective.groups import WORLD
from npu_bridge.estimator.npu.npu_loss_scale_manager import check_manager, instead_of_scale
from npu_bridge.gradients import PipelineOptimizer, ShardedOptimizer
from npu_bridge.gradients.in_place import distribute_in_place
from npu_bridge.gradients.inner import adapt
from npu_bridge.gradients.keras.optimizer import keras_optimizer, keras_optimizer_from_config
from npu_bridge.gradients.keras.settings import KerasSettings
from npu_bridge.gradients.keras.shared import PipelineMixin
from npu_bridge.gradients.over_ranks import mean_or_sum, reduce_all
from npu_bridge.gradients.recipe import build_pipeline
from npu_bridge.hccl.checks import Call
from npu_bridge.options import of_graph

__all__ = [
    "KerasDistributeOptimizer",
    "NPUDistributedOptimizer",
    "NPUOptimizer",
    "allreduce",
    "npu_allreduce",
    "npu_distributed_optimizer_wrapper",
    "reduce",
]

_LOG = logger(__name__)
_WITHOUT_EFFECT = ("clipnorm", "clipvalue", "global_clipnorm", "lr", "decay")


class NPUOptimizer(PipelineOptimizer):
    """Adds loss scaling, distribution and tail optimisation to any optimizer.

    A step scales the loss, differentiates, averages over the ranks and divides by the scale; then, unless the gradients
    overflowed on some rank, it applies. An overflow on one rank skips the step on every rank: variables, slots and
    `global_step` keep every bit, and only the loss scale moves.

    Args:
      opt: a `tf.compat.v1.train.Optimizer`, a Keras legacy optimizer (such as tensorflow-addons' `LAMB`) or a Keras
        optimizer.
      loss_scale_manager: a `LossScaleManager`, or a list of them, one for each loss of `compute_gradients`; required
        with `is_loss_scale`. Without `is_loss_scale` the loss is not scaled, with a warning.
      is_distributed: average gradients over the ranks. With one rank it has no effect.
      is_loss_scale: scale the loss and skip steps whose gradients overflowed.
      is_tailing_optimization: with `is_distributed` and `is_loss_scale`, take the decision about a step before the
        last aggregation fragment is reduced, so that only that fragment's own updates wait for it. The results are
        the same. Without distribution it has no effect. `NPURunConfig` has the same switch: if they differ, the value
        given here counts, with a warning.
      name: name of this optimizer; "NPUOptimizer" and the type name of `opt` by default.
      wire: format in which float gradients are sent between the ranks: "none" for their own; "float16" or "bfloat16"
        rounds them to 16 bits, which halves the bytes, and averages them in float32. A step whose scaled gradients do
        not fit float16 is skipped like any overflow; bfloat16 has the range of float32.
      stages: further stages for gradients, of `npu_bridge.stages`, in any order.
      gradient_split_groups: ascending positions of parameters, from 1, in the order of the forward pass, at which
        another fragment of this optimizer's gradients begins; None for the cut that `hccl.split.api` has set for the
        process when this optimizer is first used, else the usual one.
      combine_grad: with `is_loss_scale`, join the gradients of one dtype into one flat tensor, which is divided by the
        scale and judged at once, and which a fused optimizer of `npu_bridge.optimizers` uses unchanged. The
        results are the same, bit for bit.
      check_combined_tensors: with `combine_grad`, compare the flat tensors in every step with the gradients computed
        singly; the error names the first variable for which they differ.
    Raises:
      TypeError: `opt` is not an optimizer, the manager is not a manager (a number, say), a switch is not True or False,
        or `stages` or `gradient_split_groups` is not a list.
      ValueError: `stages` cannot be ordered, the positions do not ascend from 1, `is_loss_scale` without a manager,
        `opt` itself already averages gradients or scales the loss where this optimizer is to be distributed, or `wire`
        is not a wire format.
    Example:
      >>> manager = ExponentialUpdateLossScaleManager(init_loss_scale=2**16, incr_every_n_steps=1000)
      >>> optimizer = NPUOptimizer(opt, loss_scale_manager=manager, is_distributed=True, is_loss_scale=True)
      >>> grads_and_vars = optimizer.compute_gradients(loss)
      >>> train_op = optimizer.apply_gradients(grads_and_vars, global_step=global_step)
    """

    other_keywords = {"loss_scale": lambda scale: f"{instead_of_scale(scale)[:-1]}, is_loss_scale=True."}

    def __init__(
        self,
        opt,
        loss_scale_manager=None,
        is_distributed=False,
        is_loss_scale=False,
        is_tailing_optimization=False,
        name=None,
        *,
        wire="none",
        stages=(),
        gradient_split_groups=None,
        combine_grad=False,
        check_combined_tensors=False,
    ):
        name = name or "NPUOptimizer" + type(opt).__name__
        manager, wire_dtype = check_arguments(
            "NPUOptimizer", loss_scale_manager, is_distributed, is_loss_scale, is_tailing_optimization, wire
        )
        pipeline = build_pipeline(
            name,
            manager=manager,
            is_distributed=bool(is_distributed),
            is_tailed=bool(is_tailing_optimization),
            wire_dtype=wire_dtype,
            stages=stages,
            first_parameters=check_first_parameters("NPUOptimizer", gradient_split_groups),
            combines=combines_gradients("NPUOptimizer", manager, combine_grad, check_combined_tensors),
            checks_combined=check_combined_tensors,
            inner=adapt(opt, "NPUOptimizer", saved_as=self),
            owner="NPUOptimizer",
        )
        super().__init__(opt, pipeline, name)


def check_arguments(owner, manager, is_distributed, is_loss_scale, is_tailing_optimization, wire):
    """Checks the arguments that `NPUOptimizer` and `npu_keras_optimizer` have in common.

    Returns:
      The manager, None if the loss is not scaled; the dtype on the wire, None for that of the gradients.
    """
    is_distributed = check_switch(owner, "is_distributed", is_distributed, takes_numbers=True)
    is_loss_scale = check_switch(owner, "is_loss_scale", is_loss_scale, takes_numbers=True)
    is_tailed = check_switch(owner, "is_tailing_optimization", is_tailing_optimization, takes_numbers=True)
    if is_loss_scale or manager is not None:
        check_manager(owner, manager)
    if manager is not None and not is_loss_scale:
        _LOG.warning(
            "%s: the loss is not scaled: loss_scale_manager has no effect without is_loss_scale=True. Add that, or "
            "leave the manager out.",
            owner,
        )
    wire_dtype = wire_formats.wire_dtype(wire, owner)
    if wire_dtype is not None and not is_distributed:
        _LOG.info("%s: wire=%r has no effect because is_distributed is False.", owner, wire)
    of_graph.record_built_value("is_tailing_optimization", is_tailed)
    return (manager if is_loss_scale else None), wire_dtype


def combines_gradients(owner, manager, combine_grad, check_combined_tensors):
    """Returns whether an optimizer joins gradients into flat tensors; raises an error if arguments contradict."""
    combine_grad = check_switch(owner, "combine_grad", combine_grad)
    check_combined_tensors = check_switch(owner, "check_combined_tensors", check_combined_tensors)
    if check_combined_tensors and not combine_grad:
        problem, got = "check_combined_tensors has nothing to check", "combine_grad=False"
        raise ValueError(message(owner, problem, "combine_grad=True", got, "Set it, or leave the check out."))
    if combine_grad and manager is None:
        text = f"{owner}: combine_grad has no effect, because the loss is not scaled: there is nothing to divide by."
        say_once(logging.INFO, text)
        return False
    return combine_grad


class NPUDistributedOptimizer(PipelineOptimizer):
    """Averages gradients over the ranks, around any optimizer.

    Args:
      optimizer: as `opt` of `NPUOptimizer`.
      is_weight_update_sharding: let every rank update only a part of the variables, and keep only those slots. After
        the update each rank sends its part to the others. The results are the same, bit for bit: every rank gets
        all averaged gradients, so that clipping by their global norm is right too. Works in TF 1 graphs. See below.
      name: name of this optimizer; "Distributed" and the type name of `optimizer` by default.
      wire: as `wire` of `NPUOptimizer`. With "float16", a step whose gradients do not fit is skipped.
      stages: as `stages` of `NPUOptimizer`. Not allowed inside loss scaling, whose gradients are scaled.
    Raises:
      TypeError: `optimizer` is not an optimizer, `is_weight_update_sharding` is not True or False, or `stages` is not a
        list of stages.
      ValueError: `optimizer` itself averages gradients, or `wire` is not a wire format; with `wire="float16"` or
        `is_weight_update_sharding`, `optimizer` scales the loss (put the scaling outside); with
        `is_weight_update_sharding`, `optimizer` clips by the global norm, or, in `compute_gradients` and
        `apply_gradients`, there are more ranks than gradients.
      RuntimeError: with `is_weight_update_sharding` and several ranks, gradients are applied outside of a TF 1 graph.
    Checkpoints with `is_weight_update_sharding` hold the slots of all ranks under their usual names, so that any number
      of ranks, sharding or not, can resume from them. Rank 0 writes them, and fetches the other ranks' slots while it
      does. Other ranks take part in this after each step if every rank has the hook
      `NPUBroadcastGlobalVariablesHook`: Estimators and `MonitoredTrainingSession` save as usual. Without that hook,
      save with `NPUSaver` on every rank; another saver raises an error, and never writes outdated slots. From the
      start until the first update, and from a save until the next one, rank 0 holds all slots, in host memory.
    """

    def __init__(self, optimizer, is_weight_update_sharding=False, name=None, *, wire="none", stages=()):
        name = name or "Distributed" + type(optimizer).__name__
        wire_dtype = wire_formats.wire_dtype(wire, "NPUDistributedOptimizer")
        self.is_weight_update_sharding = check_switch(
            "NPUDistributedOptimizer", "is_weight_update_sharding", is_weight_update_sharding, takes_numbers=True
        )
        inner = adapt(optimizer, "NPUDistributedOptimizer", saved_as=self)
        pipeline = build_pipeline(
            name,
            is_distributed=True,
            wire_dtype=wire_dtype,
            is_sharded=self.is_weight_update_sharding,
            stages=stages,
            inner=ShardedOptimizer(inner, name) if self.is_weight_update_sharding else inner,
            owner="NPUDistributedOptimizer",
        )
        super().__init__(optimizer, pipeline, name)


class KerasDistributeOptimizer(abc.ABC):  # noqa: B024 - the classes that it makes are registered below
    """Averages gradients over the ranks, around a Keras optimizer of any generation.

    It makes an optimizer of the generation of `optimizer`, for `model.compile` and for loops with a
    `tf.GradientTape`. Hyper-parameters, `iterations`, slots and the contents of a checkpoint are those of `optimizer`.
    Gradients are averaged in `compute_gradients`, or in `apply_gradients` if they come from elsewhere; never
    twice. Clipping inside `optimizer` acts on averages.

    Args:
      optimizer: a `tf.keras.optimizers.Optimizer`, a `tf.keras.optimizers.legacy.Optimizer`, or a
        `keras.optimizers.Optimizer` of Keras 3 on TensorFlow.
      name: name of this optimizer, and prefix of the names of its collectives.
      **kwargs: `clipnorm`, `clipvalue`, `global_clipnorm`, `lr` and `decay` are accepted and have no effect; they
        belong to `optimizer`.
    Raises:
      TypeError: `optimizer` is not a Keras optimizer, or another keyword is given.
      ValueError: `optimizer` averages gradients or scales the loss itself.
    """

    def __new__(cls, optimizer, name="NpuKerasOptimizer", **kwargs):
        _check_without_effect(kwargs)
        return keras_optimizer(optimizer, KerasSettings(name), cls.__name__)

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Makes the optimizer that `get_config` described."""
        return keras_optimizer_from_config(config, custom_objects)


KerasDistributeOptimizer.register(PipelineMixin)


def npu_distributed_optimizer_wrapper(optimizer):
    """Makes an optimizer average its gradients over the ranks, in place.

    Args:
      optimizer: a `tf.compat.v1.train.Optimizer`, a Keras optimizer of either generation, or the name of one for
        `tf.keras.optimizers.get`. One that already averages gradients is left unchanged.
    Returns:
      The same object; for a name, the new optimizer.
    Raises:
      TypeError: it is not an optimizer.
      ValueError: there is no optimizer of that name.
    Graph: scopes named `Npu_Distributed_optimizer_..._Allreduce`; the collectives themselves are in `transfers`.
    """
    if isinstance(optimizer, str):
        optimizer = tf.keras.optimizers.get(optimizer)
    return distribute_in_place(optimizer, "npu_distributed_optimizer_wrapper")


def _check_without_effect(keywords):
    for name in sorted(set(keywords) - set(_WITHOUT_EFFECT)):
        raise unknown_keyword("KerasDistributeOptimizer", name, ("optimizer", "name", *_WITHOUT_EFFECT))
    if keywords:
        _LOG.warning(
            "KerasDistributeOptimizer: %s has no effect here. Give it to the optimizer inside.", ", ".join(keywords)
        )


def allreduce(tensor, average=True):
    """Returns the mean or the sum of one tensor over the ranks.

    Args:
      tensor: dense tensor, or `tf.IndexedSlices`, whose rows are gathered from all ranks without merging.
      average: divide by the number of ranks; integers round down.
    Returns:
      A tensor of the kind of `tensor`, dense or sparse, equal on all ranks.
    Ranks: collective.
    """
    return mean_or_sum(tensor, average, collective.current(), "npu_allreduce_single")


def reduce(tensor, root_rank, average=True, fusion=0, fusion_id=-1):
    """Returns the mean or the sum of one tensor over the ranks, on every rank.

    Args:
      tensor, average: as in `allreduce`.
      root_rank: the rank that needs the result.
      fusion, fusion_id: 0 and -1, or 2 and an id of at least 0; no result depends on them.
    Raises:
      ValueError: `root_rank` is not a rank, or the fusion arguments do not fit each other.
    Returns, Ranks: as `allreduce`.
    """
    call = Call("npu_optimizer.reduce", WORLD)
    call.check_group_rank(root_rank, "root_rank")
    call.check_fusion(fusion, fusion_id)
    return mean_or_sum(tensor, average, call.communicator, f"npu_reduce_to_{root_rank}")


def npu_allreduce(values, reduction="mean", fusion=1, fusion_id=-1, group=WORLD):
    """Reduces one gradient or a list of gradients over the ranks of a group.

    Args:
      values: a dense tensor or `tf.IndexedSlices`, or a list or tuple of them. Rows of sparse ones are gathered.
      reduction: "mean", "sum", "max", "min" or "prod". A mean divides by the size of the group.
      fusion: how a list is sent: 0 one by one, 1 in the fragments set through `hccl.split.api`, 2 all together.
      fusion_id: -1; with `fusion=2` an id of at least 0.
      group: name of the group.
    Returns:
      The reduced value, or a list of them.
    Raises:
      ValueError: an argument is not one of the above, or an element is None.
      LookupError: when the result of "max", "min" or "prod" is differentiated.
    Ranks: collective in `group`.
    """
    Call("npu_allreduce", group).check_fusion(fusion, fusion_id, allowed=(0, 1, 2))
    if isinstance(values, (list, tuple)):
        return reduce_all(values, reduction, fusion, group)
    return reduce_all([values], reduction, fusion, group)[0]
