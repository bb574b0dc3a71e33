"""Wraps another optimizer in a pipeline of gradient transformations, as an optimizer of TensorFlow 1."""

from __future__ import annotations

import functools

from npu_bridge import collective
from npu_bridge.base.errors import KnownKeywords, message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.plain_config import plain_value
from npu_bridge.base.tensorflow_start import hide_global_step_warning
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals.savers import track
from npu_bridge.gradients import collections
from npu_bridge.gradients.arithmetic import sum_in_order
from npu_bridge.gradients.backward_passes import BackwardPasses, check_loss_id, manager_positions
from npu_bridge.gradients.graph_mode import initialise_with_keras
from npu_bridge.gradients.inner import adapt, is_distributed, mark_as_distributed
from npu_bridge.gradients.open_steps import OpenSteps
from npu_bridge.gradients.pipeline import Pipeline, variables_of
from npu_bridge.gradients.stage import Stage, Step
from npu_bridge.gradients.stages.overflow import NarrowVariableGuard
from npu_bridge.gradients.step_report import StepReport, report_of

_LOG = logger(__name__)


class PipelineOptimizer(KnownKeywords, tf.compat.v1.train.Optimizer):
    """Computes gradients with an inner optimizer, passes them through a pipeline and applies them with that optimizer.

    Works in TF 1 graphs, in a `tf.function` and eagerly (there with a callable loss). Attributes that this class lacks
    are those of the inner optimizer.

    Args:
      optimizer: a TF 1, Keras legacy or Keras optimizer.
      pipeline: the stages that gradients go through, and the adapter of the optimizer.
      name: name of this optimizer.
    Raises:
      TypeError: `optimizer` is not an optimizer.
      ValueError: `optimizer` is itself a pipeline whose stages would run in the wrong order or twice.
    """

    has_stand_ins = True

    def __init__(self, optimizer, pipeline: Pipeline, name: str):
        super().__init__(use_locking=False, name=name)
        _check_nesting(optimizer, pipeline, type(self).__name__)
        self._pipeline = pipeline
        self._inner = adapt(optimizer, type(self).__name__) if pipeline.inner is None else pipeline.inner
        track(self, optimizer, "optimizer")
        for name, state in pipeline.state().items():
            track(self, state, name)
        initialise_with_keras(variables_of(pipeline.state()))
        if pipeline.communicates:
            mark_as_distributed(self)
        self._open_steps = OpenSteps()
        self._has_computed = False
        self._last_step = None
        self._backward_passes = BackwardPasses(pipeline, self._open_steps, self._combined, type(self).__name__)

    @tf.autograph.experimental.do_not_convert  # else a user's tf.function translates this package, for minutes
    def compute_gradients(
        self,
        loss,
        var_list=None,
        gate_gradients=tf.compat.v1.train.Optimizer.GATE_OP,
        aggregation_method=None,
        colocate_gradients_with_ops=False,
        grad_loss=None,
        *,
        loss_id=None,
    ):
        """Computes gradients of the unscaled loss, averaged over the ranks where the pipeline communicates.

        Each of several losses is multiplied by its own scale and differentiated by itself, and that scale grows or
        shrinks by the gradients of that loss; the gradients are added up before the all-reduce. If those of one loss
        overflow, the step is skipped.

        Args:
          loss: scalar tensor, or a callable that returns one (required when executing eagerly); or a list of them, to
            get the sum of their gradients.
          var_list: variables to differentiate by; all trainable ones by default.
          gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss: as in
            `tf.compat.v1.train.Optimizer.compute_gradients`.
          loss_id: position of the loss's manager; for a list of losses, a list. By default the first manager, and for a
            list the managers in their order.
        Returns:
          List of (gradient, variable); a gradient can be None, a sparse one is `tf.IndexedSlices`.
        Raises:
          TypeError: `loss_id` is not a position.
          RuntimeError: the loss is a tensor, and TensorFlow executes eagerly.
          ValueError: the numbers of managers and losses differ, or there is no manager at that position.
        Ranks: collective where the pipeline communicates.
        """
        owner = f"{type(self).__name__}.compute_gradients"
        has_several = isinstance(loss, (list, tuple))
        losses = list(loss) if has_several else [loss]
        if has_several:
            numbers = manager_positions(owner, len(losses), loss_id, self._pipeline)
        else:
            numbers = [check_loss_id(owner, loss_id or 0, self._pipeline)]
        if tf.executing_eagerly() and not all(map(callable, losses)):
            problem, expected = (
                "a tensor has no gradients in eager execution",
                "the loss of a graph, or a function",
            )
            fix = "Call tf.disable_eager_execution() first, start the script with npu-run, or pass lambda: loss."
            raise RuntimeError(message(owner, problem, expected, "a tensor in eager mode", fix))
        step = self._pipeline.begin()
        for one, number in zip(losses, numbers):
            scale = functools.partial(self._pipeline.scale, step=step, loss_id=number)
            grads_and_vars = self._inner.compute_gradients(
                functools.partial(_scaled_result, scale, one) if callable(one) else scale(one),
                var_list=var_list,
                gate_gradients=gate_gradients,
                aggregation_method=aggregation_method,
                colocate_gradients_with_ops=colocate_gradients_with_ops,
                grad_loss=grad_loss,
            )
            if has_several:
                step.add_gradients(grads_and_vars, number)
        # After the inner optimizer, so that the outermost of nested optimizers sets the losses last.
        self._inner.pass_losses(losses, step.losses.values)
        if not any(map(callable, losses)):
            collections.publish(collections.UNSCALED_LOSS, sum_in_order(losses) if has_several else loss)
        if has_several:
            return self._combined(step, step.grads_and_vars)
        return self._combined(step, self._pipeline.own_gradients(step, grads_and_vars))

    @property
    def last_step(self) -> StepReport:
        """The loss, overflow and loss scale of the step that was built or executed last, as tensors.

        Raises:
          ValueError: there was no step, or its gradients did not come from this optimizer.
        """
        return report_of(self._last_step, f"{type(self).__name__}.last_step")

    @property
    def backward_passes(self) -> BackwardPasses:
        """The backward passes since the last update, for custom loops."""
        return self._backward_passes

    def _combined(self, step, grads_and_vars):
        delivered = self._pipeline.combine(step, grads_and_vars)
        self._open_steps.keep(step, [variable for _, variable in delivered])
        self._has_computed = True
        return delivered

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """Applies gradients with the inner optimizer, if the pipeline's stages agree.

        Args:
          grads_and_vars: pairs as `compute_gradients` returns them, clipped or otherwise changed if you like.
          global_step: variable to increase by 1 when the update happens.
          name: name of the update op.
        Returns:
          The op that runs the step; None when executed eagerly.
        Raises:
          ValueError: all gradients are None.
        """
        grads_and_vars = list(grads_and_vars)
        step = self._open_steps.latest_of([variable for _, variable in grads_and_vars]) or Step()
        if self._pipeline.communicates and not self._has_computed and collective.current().size > 1:
            _LOG.warning(
                "%s: these gradients were not averaged over the ranks, because they did not come from "
                "compute_gradients of this optimizer. Call compute_gradients or minimize.",
                self.get_name(),
            )
        if global_step is not None:
            hide_global_step_warning()
        self._last_step = step
        step.grads_and_vars = grads_and_vars
        given = step.gradients
        if step.updated:
            self._inner.prepare(step.updated)
        update = self._pipeline.apply(step, lambda pairs: self._inner.apply_gradients(pairs, global_step, name))
        collections.publish_learning_rate(self._inner.optimizer)
        collections.publish(collections.GRADIENTS, given)
        return update

    def decide_together(self):
        """Makes the ranks agree on each step, for a reduction that stands around this optimizer, not inside it."""
        self._pipeline.decide_together()

    def get_slot(self, var, name):
        """Returns the inner optimizer's slot `name` for `var`, or None."""
        return self._inner.get_slot(var, name)

    def get_slot_names(self):
        """Returns the names of the inner optimizer's slots."""
        return self._inner.get_slot_names()

    def variables(self):
        """Returns the inner optimizer's variables."""
        return self._inner.variables()

    def __repr__(self) -> str:
        inner = self.__dict__.get("_inner")
        if inner is None:  # while an object is copied
            return super().__repr__()
        is_wrapper = isinstance(inner.optimizer, PipelineOptimizer)
        wrapped = repr(inner.optimizer) if is_wrapper else type(inner.optimizer).__name__
        return f"{type(self).__name__}({wrapped}, stages={list(self._pipeline.stages)!r})"

    def __getattr__(self, name):
        # `_inner` is missing while an object is copied; `_self_...` and dunder names are bookkeeping of checkpoints and
        # of Python, which must not be shared with the inner optimizer.
        if name == "_inner" or name.startswith(("_self_", "__")):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        found = getattr(self._inner.optimizer, name)
        # Keras writes it as JSON, but configs of its older optimizers hold numpy numbers.
        return (lambda: plain_value(found())) if name == "get_config" else found

    def __setattr__(self, name, value):
        # `optimizer.learning_rate = rate` sets the attribute of the optimizer that has it.
        inner = self.__dict__.get("_inner")
        is_own = inner is None or name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if is_own or not hasattr(inner.optimizer, name):
            super().__setattr__(name, value)
        else:
            setattr(inner.optimizer, name, value)

    def __dir__(self):
        # Object-based checkpoints save the slots of every object whose dir() lists get_slot_names. The inner optimizer
        # is a dependency of this one and saves its own slots; saving them twice is an error.
        return [name for name in super().__dir__() if name != "get_slot_names"]

    def _create_slots(self, var_list):
        self._inner.make_slots(var_list)


def _scaled_result(scale, loss):
    return scale(loss())


def _skips_steps(pipeline):
    """Returns True when a stage can skip whole updates."""
    guards = (Stage.gate, NarrowVariableGuard.gate)
    return any(type(stage).gate not in guards for stage in pipeline.stages)


def _check_nesting(optimizer, pipeline, owner):
    if pipeline.scales_gradients and isinstance(optimizer, PipelineOptimizer) and optimizer._pipeline.needs_true_units:
        names = ", ".join(type(stage).__name__ for stage in optimizer._pipeline.stages)
        problem = "the stages inside would work on gradients that are still multiplied by the loss scale"
        fix = "Write NPUOptimizer(opt, manager, is_distributed=True, is_loss_scale=True, stages=[...])."
        expected = "the order scale, accumulate, reduce, unscale, verdict, clip, update"
        raise ValueError(message(owner, problem, expected, f"{names} inside", fix))
    updating = optimizer
    while isinstance(updating, PipelineOptimizer):
        updating = updating._inner.optimizer
    if isinstance(updating, tf.compat.v1.train.SyncReplicasOptimizer) and _skips_steps(pipeline):
        problem = "SyncReplicasOptimizer updates in a thread of its own, for which no step can be skipped"
        expected = "the optimizer inside it, whose gradients are averaged over the ranks here"
        fix = "Write NPUOptimizer(opt, manager, is_distributed=True, is_loss_scale=True) without SyncReplicasOptimizer."
        raise ValueError(message(owner, problem, expected, "SyncReplicasOptimizer", fix))
    if not pipeline.communicates:
        return
    if is_distributed(optimizer):
        raise ValueError(
            f"{owner}: the gradients would be averaged over the ranks twice. Expected one distributed optimizer; got "
            f"{type(optimizer).__name__} inside {owner}. Pass the optimizer that it wraps."
        )
    if isinstance(optimizer, PipelineOptimizer) and optimizer._pipeline.scales_gradients:
        if pipeline.only_communicates:
            optimizer.decide_together()
            return
        raise ValueError(
            f"{owner}: loss scaling must be outside the reduction. Expected the order loss scale, reduce, unscale, "
            f"check, update; got {type(optimizer).__name__} inside {owner}. Write "
            f"NPULossScaleOptimizer(NPUDistributedOptimizer(opt), manager, is_distributed=True), or one NPUOptimizer."
        )
