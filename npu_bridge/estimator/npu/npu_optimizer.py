"""Defines the documented optimizers that average gradients over the ranks and scale the loss."""

from __future__ import annotations

import logging

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.arguments import check_switch
from npu_bridge.base.errors import message, say_once, unknown_keyword
from npu_bridge.base.terminal import logger
from npu_bridge.collective import wire as wire_formats
from npu_bridge.collective.fragments import check_first_parameters
from npu_bridge.collective.groups import WORLD
from npu_bridge.estimator.npu.npu_loss_scale_manager import advice_for_scale, check_manager
from npu_bridge.gradients import PipelineOptimizer, ShardedOptimizer
from npu_bridge.gradients.in_place import average_gradients_in_place
from npu_bridge.gradients.inner.families import adapt_optimizer
from npu_bridge.gradients.keras.optimizer import keras_optimizer_from_config, wrap_keras_optimizer
from npu_bridge.gradients.keras.settings import KerasSettings
from npu_bridge.gradients.keras.shared import OptimizerMaker, PipelineMixin
from npu_bridge.gradients.over_ranks import mean_or_sum, reduce_all
from npu_bridge.gradients.recipe import PipelineSettings, build_pipeline
from npu_bridge.hccl.checks import CollectiveCall
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
_IGNORED_KEYWORDS = ("clipnorm", "clipvalue", "global_clipnorm", "lr", "decay")


class NPUOptimizer(PipelineOptimizer):
    """Adds loss scaling, distribution and tail optimisation to any optimizer.

    A step scales the loss, computes gradients, averages them over the ranks and divides them by the scale. If no
    gradient overflowed on any rank, `opt` then applies the gradients. An overflow on one rank skips the step on every
    rank: variables, slots and `global_step` keep every bit, and only the loss scale changes.

    Args:
      opt: a `tf.compat.v1.train.Optimizer`, a Keras legacy optimizer (such as tensorflow-addons' `LAMB`) or a Keras
        optimizer.
      loss_scale_manager: a `LossScaleManager`, or a list of managers, one for each loss of `compute_gradients`;
        required with `is_loss_scale`. Without `is_loss_scale` the manager is not used, with a warning.
      is_distributed: average gradients over the ranks. No effect with one rank.
      is_loss_scale: scale the loss and skip steps whose gradients overflowed.
      is_tailing_optimization: with `is_distributed` and `is_loss_scale`, decide early whether to skip the step,
        while the last aggregation fragment is not yet reduced: other updates then need not wait for it. The results do
        not change. No effect without `is_distributed`. If `NPURunConfig` has another value, the value given here
        counts, with a warning.
      name: name of this optimizer; "NPUOptimizer" and the type name of `opt` by default.
      wire: format in which float gradients are sent between the ranks. "none" keeps their dtype. "float16" or
        "bfloat16" rounds gradients to 16 bits, which halves the bytes, and averages them in float32. A step whose
        scaled gradients do not fit float16 is skipped as an overflow; bfloat16 has the range of float32. Gradients
        that already have 16 bits keep their dtype.
      stages: further stages for gradients, of `npu_bridge.stages`, in any order.
      gradient_split_groups: positions at which a new fragment of gradients begins: ascending, from 1, counted over the
        parameters in the order of the forward pass. None for the split that `hccl.split.api` has set before this
        optimizer is first used, or else the default split.
      combine_grad: with `is_loss_scale`, join the gradients of each dtype into one flat tensor, which is divided by the
        scale and checked for overflow as a whole. A fused optimizer of `npu_bridge.optimizers` uses the flat tensor
        directly. The results are equal, bit for bit.
      check_combined_tensors: with `combine_grad`, compare the flat tensors in every step with the separate gradients;
        the error names the first variable whose gradients differ.
    Raises:
      TypeError: `opt` is not an optimizer, `loss_scale_manager` is not a manager (but a number, for example), a switch
        is not True or False, or `stages` or `gradient_split_groups` is not a list.
      ValueError: `stages` cannot be ordered, the positions do not ascend from 1, `is_loss_scale` has no manager, `wire`
        is not a wire format, or `is_distributed` is set and `opt` itself averages gradients or scales the loss.
    Example:
      >>> manager = ExponentialUpdateLossScaleManager(init_loss_scale=2**16, incr_every_n_steps=1000)
      >>> optimizer = NPUOptimizer(opt, loss_scale_manager=manager, is_distributed=True, is_loss_scale=True)
      >>> grads_and_vars = optimizer.compute_gradients(loss)
      >>> train_op = optimizer.apply_gradients(grads_and_vars, global_step=global_step)
    """

    other_keywords = {"loss_scale": lambda scale: f"{advice_for_scale(scale)[:-1]}, is_loss_scale=True."}

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
        manager = check_optimizer_arguments(
            "NPUOptimizer", loss_scale_manager, is_distributed, is_loss_scale, is_tailing_optimization, wire
        )
        settings = PipelineSettings(
            name,
            manager=manager,
            is_distributed=bool(is_distributed),
            is_tailing_optimization=bool(is_tailing_optimization),
            wire=wire,
            stages=stages,
            first_parameters=check_first_parameters("NPUOptimizer", gradient_split_groups),
            combines=check_combine_grad("NPUOptimizer", manager, combine_grad, check_combined_tensors),
            checks_combined=check_combined_tensors,
            inner=adapt_optimizer(opt, "NPUOptimizer", saved_as=self),
            owner="NPUOptimizer",
        )
        super().__init__(opt, build_pipeline(settings), name)


def check_optimizer_arguments(owner, manager, is_distributed, is_loss_scale, is_tailing_optimization, wire):
    """Checks the arguments of `NPUOptimizer` and `npu_keras_optimizer`; returns the manager if the loss is scaled."""
    is_distributed = check_switch(owner, "is_distributed", is_distributed, takes_numbers=True)
    is_loss_scale = check_switch(owner, "is_loss_scale", is_loss_scale, takes_numbers=True)
    is_tailed = check_switch(owner, "is_tailing_optimization", is_tailing_optimization, takes_numbers=True)
    if is_loss_scale or manager is not None:
        check_manager(owner, manager)
    if manager is not None and not is_loss_scale:
        _LOG.warning(
            "%s: the loss is not scaled: loss_scale_manager has no effect without is_loss_scale=True. Set "
            "is_loss_scale=True, or leave the manager out.",
            owner,
        )
    if wire_formats.wire_dtype(wire, owner) is not None and not is_distributed:
        _LOG.info("%s: wire=%r has no effect because is_distributed is False.", owner, wire)
    of_graph.record_built_value("is_tailing_optimization", is_tailed)
    return manager if is_loss_scale else None


def check_combine_grad(owner, manager, combine_grad, check_combined_tensors):
    """Returns whether to join gradients into flat tensors; raises ValueError if the arguments contradict each other."""
    combine_grad = check_switch(owner, "combine_grad", combine_grad)
    check_combined_tensors = check_switch(owner, "check_combined_tensors", check_combined_tensors)
    if check_combined_tensors and not combine_grad:
        problem, got = "check_combined_tensors has nothing to check", "combine_grad=False"
        fix = "Set combine_grad=True, or leave check_combined_tensors out."
        raise ValueError(message(owner, problem, "combine_grad=True", got, fix))
    if combine_grad and manager is None:
        text = f"{owner}: combine_grad has no effect, because the loss is not scaled: there is nothing to divide by."
        say_once(logging.INFO, text)
        return False
    return combine_grad


class NPUDistributedOptimizer(PipelineOptimizer):
    """Averages gradients over the ranks, around any optimizer.

    Args:
      optimizer: as `opt` of `NPUOptimizer`.
      is_weight_update_sharding: let every rank update only a part of the variables, and keep only the slots of that
        part. After the update each rank sends its part to the other ranks. The results are equal, bit for bit: every
        rank gets all averaged gradients, so clipping by their global norm stays correct. Needs a TF 1 graph. The
        paragraph on checkpoints below applies.
      name: name of this optimizer; "Distributed" and the type name of `optimizer` by default.
      wire: as `wire` of `NPUOptimizer`. With "float16", a step whose gradients do not fit is skipped.
      stages: as `stages` of `NPUOptimizer`. Not allowed inside an optimizer that scales the loss: the stages would get
        scaled gradients.
    Raises:
      TypeError: `optimizer` is not an optimizer, `is_weight_update_sharding` is not True or False, or `stages` is not a
        list of stages.
      ValueError: `optimizer` averages gradients, or `wire` is not a wire format.
      ValueError: with `wire="float16"` or `is_weight_update_sharding`, `optimizer` scales the loss: do that outside.
      ValueError: with `is_weight_update_sharding`, `optimizer` clips by the global norm, or (in `compute_gradients` and
        `apply_gradients`) there are more ranks than gradients.
      RuntimeError: with `is_weight_update_sharding` and several ranks: gradients are applied outside of a TF 1 graph.
    Checkpoints with `is_weight_update_sharding` hold the slots of all ranks under their usual names, so that any number
      of ranks, sharding or not, can resume from them. Rank 0 writes the checkpoint and fetches the slots of the other
      ranks meanwhile. If every rank has the hook `NPUBroadcastGlobalVariablesHook`, the other ranks answer after each
      step, and Estimators and `MonitoredTrainingSession` save as usual. Without this hook, save with `NPUSaver` on
      every rank; any other saver raises an error and never writes outdated slots. Rank 0 holds all slots in host
      memory from the start to the first update, and from each save to the next update.
    """

    def __init__(self, optimizer, is_weight_update_sharding=False, name=None, *, wire="none", stages=()):
        name = name or "Distributed" + type(optimizer).__name__
        self.is_weight_update_sharding = check_switch(
            "NPUDistributedOptimizer", "is_weight_update_sharding", is_weight_update_sharding, takes_numbers=True
        )
        inner = adapt_optimizer(optimizer, "NPUDistributedOptimizer", saved_as=self)
        settings = PipelineSettings(
            name,
            is_distributed=True,
            wire=wire,
            is_sharded=self.is_weight_update_sharding,
            stages=stages,
            inner=ShardedOptimizer(inner, name) if self.is_weight_update_sharding else inner,
            owner="NPUDistributedOptimizer",
        )
        super().__init__(optimizer, build_pipeline(settings), name)


class KerasDistributeOptimizer(OptimizerMaker):
    """Averages gradients over the ranks, around a Keras optimizer of any generation.

    Returns an optimizer of the same generation as `optimizer`, for `model.compile` and for loops with a
    `tf.GradientTape`. The result has the hyper-parameters, `iterations`, slots and checkpoint contents of `optimizer`.
    Gradients are averaged once: in `compute_gradients`, or in `apply_gradients` if the caller computed them otherwise.
    Clipping inside `optimizer` acts on averaged gradients.

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
        _check_ignored_keywords(kwargs)
        return wrap_keras_optimizer(optimizer, KerasSettings(name), cls.__name__)

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Makes an optimizer from the result of `get_config`."""
        return keras_optimizer_from_config(config, custom_objects)


KerasDistributeOptimizer.register(PipelineMixin)


def npu_distributed_optimizer_wrapper(optimizer):
    """Makes an optimizer average its gradients over the ranks, in place.

    Args:
      optimizer: a `tf.compat.v1.train.Optimizer`, a Keras optimizer of either generation, or a name for
        `tf.keras.optimizers.get`. An optimizer that already averages gradients is left unchanged.
    Returns:
      The optimizer passed in; for a name, the new optimizer.
    Raises:
      TypeError: `optimizer` is not an optimizer.
      ValueError: Keras has no optimizer of that name.
    Graph: scopes named `Npu_Distributed_optimizer_..._Allreduce`; their collectives are in a scope `transfers`.
    """
    if isinstance(optimizer, str):
        optimizer = tf.keras.optimizers.get(optimizer)
    return average_gradients_in_place(optimizer, "npu_distributed_optimizer_wrapper")


def _check_ignored_keywords(keywords):
    for name in sorted(set(keywords) - set(_IGNORED_KEYWORDS)):
        raise unknown_keyword("KerasDistributeOptimizer", name, ("optimizer", "name", *_IGNORED_KEYWORDS))
    if keywords:
        _LOG.warning(
            "KerasDistributeOptimizer: %s has no effect here. Give it to the wrapped optimizer.", ", ".join(keywords)
        )


def allreduce(tensor, average=True):
    """Returns the mean or the sum of one tensor over the ranks.

    Args:
      tensor: dense tensor, or `tf.IndexedSlices`, whose rows are gathered from all ranks without merging.
      average: divide by the number of ranks; integers round down.
    Returns:
      A dense tensor or `tf.IndexedSlices`, as `tensor`; equal on all ranks.
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
      ValueError: `root_rank` is not a rank, or `fusion` and `fusion_id` do not fit each other.
    Returns, Ranks: as in `allreduce`.
    """
    call = CollectiveCall("npu_optimizer.reduce", WORLD)
    call.check_group_rank(root_rank, "root_rank")
    call.check_fusion(fusion, fusion_id)
    return mean_or_sum(tensor, average, call.communicator, f"npu_reduce_to_{root_rank}")


def npu_allreduce(values, reduction="mean", fusion=1, fusion_id=-1, group=WORLD):
    """Reduces one gradient or a list of gradients over the ranks of a group.

    Args:
      values: a dense tensor or `tf.IndexedSlices`, or a list or tuple of them. Rows of `tf.IndexedSlices` are gathered.
      reduction: "mean", "sum", "max", "min" or "prod". A mean divides by the size of the group.
      fusion: how a list is sent: 0 one by one, 1 in the fragments set through `hccl.split.api`, 2 all together.
      fusion_id: -1; with `fusion=2` an id of at least 0.
      group: name of the group.
    Returns:
      The reduced value, or a list of them.
    Raises:
      ValueError: an argument has a value not listed here, or an element of `values` is None.
      LookupError: when the result of "max", "min" or "prod" is differentiated.
    Ranks: collective in `group`.
    """
    CollectiveCall("npu_allreduce", group).check_fusion(fusion, fusion_id, allowed=(0, 1, 2))
    if isinstance(values, (list, tuple)):
        return reduce_all(values, reduction, fusion, group)
    return reduce_all([values], reduction, fusion, group)[0]
