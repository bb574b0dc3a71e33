"""Makes an existing optimizer average its gradients over the ranks, without a wrapper around it."""

from __future__ import annotations

import functools
from typing import Any

from npu_bridge import collective
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.names import LEGACY_AGGREGATE, LEGACY_COMPUTE
from npu_bridge.collective import wire_names
from npu_bridge.gradients.explanation import list_pipelines
from npu_bridge.gradients.inner.families import adapt_optimizer
from npu_bridge.gradients.inner.interface import is_distributed, mark_as_distributed
from npu_bridge.gradients.inner.nesting import check_can_average_results
from npu_bridge.gradients.keras.pipeline import KerasPipeline
from npu_bridge.gradients.keras.shared import PipelineMixin
from npu_bridge.gradients.optimizer import PipelineOptimizer
from npu_bridge.gradients.recipe import PipelineSettings, build_pipeline

_LOG = logger(__name__)
_NAME = "Npu_Distributed_optimizer"


def average_gradients_in_place(optimizer: Any, owner: str) -> Any:
    """Replaces methods of an optimizer that return or take gradients, so that gradients are averaged over the ranks.

    An optimizer that already averages gradients is left unchanged.

    Args:
      optimizer: a `tf.compat.v1.train.Optimizer`, or a Keras optimizer of either generation. Of Keras'
        `LossScaleOptimizer`, methods of the inner optimizer are replaced.
      owner: name of the caller, for messages.
    Returns:
      The optimizer passed in. If the job has one rank at the time of the call, the methods are not replaced.
    Raises:
      TypeError: `optimizer` is not such an optimizer.
      ValueError: `optimizer` has a stage that would change gradients before they are averaged.
    """
    families = (tf.compat.v1.train.Optimizer, tf.keras.optimizers.legacy.Optimizer, tf.keras.optimizers.Optimizer)
    if not isinstance(optimizer, families):
        fix = "Pass the optimizer object itself."
        if keras3.is_optimizer(optimizer):
            fix = "For optimizers of Keras 3, use KerasDistributeOptimizer(...)."
        raise TypeError(
            f"{owner}: the argument is not an optimizer. Expected a tf.compat.v1.train.Optimizer, a Keras optimizer or "
            f"its name; got {optimizer!r} of type {type(optimizer).__name__}. {fix}"
        )
    if is_distributed(optimizer):
        _LOG.warning("%s: %s already averages its gradients and is left unchanged.", owner, type(optimizer).__name__)
        return optimizer
    updating = optimizer
    if isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer) and not isinstance(optimizer, PipelineMixin):
        updating = optimizer.inner_optimizer  # Keras' loss scaling passes all gradients to methods of this one
    for pipeline in list_pipelines(updating) if isinstance(updating, (PipelineOptimizer, PipelineMixin)) else ():
        check_can_average_results(pipeline, owner)
        pipeline.skip_steps_together()
    mark_as_distributed(updating)
    if collective.current().size > 1:
        _replace_methods(updating, owner)
    return optimizer


def _replace_methods(optimizer, owner):
    once = _AveragingMethods(owner)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        once.average_returned_pairs(optimizer, "compute_gradients", _NAME)
    elif isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer):
        once.average_returned_gradients(optimizer, "get_gradients", f"{_NAME}_get_grads")
        once.average_returned_pairs(optimizer, LEGACY_COMPUTE, f"{_NAME}_compute_grads")
        once.average_before_update(optimizer, LEGACY_AGGREGATE, f"{_NAME}_apply_grads")
    else:
        once.average_returned_pairs(optimizer, "compute_gradients", f"{_NAME}_compute_grads")
        once.average_before_update(optimizer, "aggregate_gradients", f"{_NAME}_apply_grads")


class _AveragingMethods:
    """Makes methods of an optimizer average gradients, but each gradient only once if one method calls another."""

    def __init__(self, owner):
        self._owner = owner
        self._pipelines = []
        self._is_inside = False

    def average_returned_pairs(self, optimizer, method_name, name):
        """Makes a method that returns (gradient, variable) pairs average the gradients."""

        def method(original, pipeline, *arguments, **keywords):
            pairs = self._call_original(original, arguments, keywords)
            return pairs if self._is_inside else self._average_pairs(pipeline, pairs)

        self._replace_method(optimizer, method_name, name, method)

    def average_returned_gradients(self, optimizer, method_name, name):
        """Makes a method that returns gradients for `(loss, params)` return their averages over the ranks."""

        def method(original, pipeline, loss, params):
            gradients = self._call_original(original, (loss, params), {})
            if self._is_inside:
                return gradients
            pairs = self._average_pairs(pipeline, list(zip(gradients, tf.nest.flatten(params))))
            return [grad for grad, _ in pairs]

        self._replace_method(optimizer, method_name, name, method)

    def average_before_update(self, optimizer, method_name, name):
        """Wraps a method that gets the pairs of every update, so that gradients not averaged yet are averaged first."""

        def method(original, pipeline, grads_and_vars):
            pairs = list(grads_and_vars)
            went_before = [earlier.close_step(pairs) for earlier in self._pipelines]
            if not any(went_before):
                pairs = self._average_pairs(pipeline, pairs)
                pipeline.close_step(pairs)
            return original(pairs)

        self._replace_method(optimizer, method_name, name, method)

    def _replace_method(self, optimizer, method_name, pipeline_name, new_method):
        """Replaces a method of the optimizer by `new_method`, which gets the original method and a pipeline first."""
        original = getattr(optimizer, method_name)
        inner = adapt_optimizer(optimizer, self._owner, applies_updates=False)
        pipeline = build_pipeline(PipelineSettings(pipeline_name, is_distributed=True, inner=inner, owner=self._owner))
        wire_names.set_owner(optimizer, pipeline.transfers)
        averaging = KerasPipeline(pipeline, self._owner)
        self._pipelines.append(averaging)

        @functools.wraps(original)
        def replacement(*arguments, **keywords):
            return new_method(original, averaging, *arguments, **keywords)

        replacement.__module__ = __name__  # AutoGraph leaves functions of this package alone
        object.__setattr__(optimizer, method_name, replacement)

    def _average_pairs(self, pipeline, pairs):
        pairs = pipeline.average(pairs)
        updated = [variable for grad, variable in pairs if grad is not None]
        pipeline.pipeline.comparison.compare_start_values(pairs, lambda: pipeline.inner.make_slots(updated))
        return pairs

    def _call_original(self, original, arguments, keywords):
        was_inside, self._is_inside = self._is_inside, True
        try:
            return original(*arguments, **keywords)
        finally:
            self._is_inside = was_inside
