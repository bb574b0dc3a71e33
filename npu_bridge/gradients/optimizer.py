"""A pipeline of gradient transformations around another optimizer, as an optimizer of TensorFlow 1."""

from __future__ import annotations

import logging

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.gradients import collections
from npu_bridge.gradients.graph_mode import initialise_with_keras
from npu_bridge.gradients.inner import adapt, is_distributed, mark_as_distributed
from npu_bridge.gradients.open_steps import OpenSteps
from npu_bridge.gradients.pipeline import Pipeline, variables_of
from npu_bridge.gradients.stage import Step
from npu_bridge.options.errors import message
from npu_bridge.tf_internals.training import track

_LOG = logging.getLogger(__name__)


class PipelineOptimizer(tf.compat.v1.train.Optimizer):
    """Computes gradients with an inner optimizer, takes them through a pipeline and applies them with it.

    Works in TF 1 graphs, in a `tf.function` and eagerly (there with a callable loss). Attributes that this class does
    not have are those of the inner optimizer.

    Args:
      optimizer: a TF 1, Keras legacy or Keras optimizer.
      pipeline: the stages that gradients go through.
      name: name of this optimizer.
    Raises:
      TypeError: `optimizer` is none.
      ValueError: `optimizer` is itself a pipeline whose stages would run in the wrong order or twice.
    """

    def __init__(self, optimizer, pipeline: Pipeline, name: str):
        super().__init__(use_locking=False, name=name)
        _check_nesting(optimizer, pipeline, type(self).__name__)
        self._pipeline = pipeline
        self._inner = adapt(optimizer, type(self).__name__)
        pipeline.optimizer_variables = lambda: self._inner.variables()
        track(self, optimizer, "optimizer")
        for name, state in pipeline.state().items():
            track(self, state, name)
        initialise_with_keras(variables_of(pipeline.state()))
        if pipeline.communicates:
            mark_as_distributed(self)
        self._open_steps = OpenSteps()
        self._has_computed = False

    @tf.autograph.experimental.do_not_convert  # a user's tf.function would have this package translated, for minutes
    def compute_gradients(
        self,
        loss,
        var_list=None,
        gate_gradients=tf.compat.v1.train.Optimizer.GATE_OP,
        aggregation_method=None,
        colocate_gradients_with_ops=False,
        grad_loss=None,
    ):
        """Gradients of the unscaled loss, averaged over the ranks where the pipeline communicates.

        Args:
          loss: scalar tensor, or a callable that returns one (required when executing eagerly).
          var_list: variables to differentiate by; all trainable ones by default.
          gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss: as in
            `tf.compat.v1.train.Optimizer.compute_gradients`.
        Returns:
          List of (gradient, variable); a gradient may be None, a sparse one is `tf.IndexedSlices`.
        Ranks: collective where the pipeline communicates.
        """
        step = self._pipeline.begin()
        scale = self._pipeline.scale
        grads_and_vars = self._inner.compute_gradients(
            (lambda: scale(loss(), step)) if callable(loss) else scale(loss, step),
            var_list=var_list,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            grad_loss=grad_loss,
        )
        # After the inner optimizer, so that of several around one another the outermost has the last word.
        self._inner.tell_losses([loss], step.losses[:1])
        if not callable(loss):
            collections.publish(collections.UNSCALED_LOSS, loss)
        delivered = self._pipeline.combine(step, self._pipeline.computed(step, grads_and_vars))
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
          ValueError: there is no gradient at all.
        """
        grads_and_vars = list(grads_and_vars)
        step = self._open_steps.latest_of([variable for _, variable in grads_and_vars]) or Step()
        if self._pipeline.communicates and not self._has_computed and collective.current().size > 1:
            _LOG.warning(
                "%s: these gradients were not averaged over the ranks, because they did not come from "
                "compute_gradients of this optimizer. Call compute_gradients or minimize.",
                self.get_name(),
            )
        step.grads_and_vars = grads_and_vars
        updated = [variable for grad, variable in grads_and_vars if grad is not None]
        if updated:
            self._inner.prepare(updated)
        step.make_slots = lambda: self._inner.make_slots(updated)
        update = self._pipeline.apply(step, lambda pairs: self._inner.apply_gradients(pairs, global_step, name))
        collections.publish_learning_rate(self._inner.optimizer)
        collections.publish_gradients([grad for grad, _ in grads_and_vars])
        return update

    def decide_together(self):
        """Has the ranks agree on each step, for a reduction that stands around this optimizer instead of inside it."""
        self._pipeline.decide_together()

    def get_slot(self, var, name):
        """The inner optimizer's slot `name` for `var`, or None."""
        return self._inner.get_slot(var, name)

    def get_slot_names(self):
        """Names of the inner optimizer's slots."""
        return self._inner.get_slot_names()

    def variables(self):
        """The inner optimizer's variables."""
        return self._inner.variables()

    def __getattr__(self, name):
        # `_inner` is missing while an object is copied; `_self_...` and dunder names are checkpointing's and Python's
        # own bookkeeping, which must not be shared with the inner optimizer.
        if name == "_inner" or name.startswith(("_self_", "__")):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._inner.optimizer, name)

    def __setattr__(self, name, value):
        # `optimizer.learning_rate = rate` means the optimizer that has one.
        inner = self.__dict__.get("_inner")
        is_own = inner is None or name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if is_own or not hasattr(inner.optimizer, name):
            super().__setattr__(name, value)
        else:
            setattr(inner.optimizer, name, value)

    def __dir__(self):
        # Object-based checkpoints save the slots of everything whose dir() lists get_slot_names. The inner optimizer is
        # a dependency of this one and saves its own; saved twice they are an error.
        return [name for name in super().__dir__() if name != "get_slot_names"]

    def _create_slots(self, var_list):
        self._inner.make_slots(var_list)


def _check_nesting(optimizer, pipeline, owner):
    if pipeline.scales_loss and isinstance(optimizer, PipelineOptimizer) and optimizer._pipeline.needs_true_units:
        names = ", ".join(type(stage).__name__ for stage in optimizer._pipeline.stages)
        problem = "the stages inside would work on gradients that are still multiplied by the loss scale"
        mend = "Write NPUOptimizer(opt, manager, is_distributed=True, is_loss_scale=True, stages=[...])."
        expected = "the order scale, accumulate, reduce, unscale, verdict, clip, update"
        raise ValueError(message(owner, problem, expected, f"{names} inside", mend))
    if not pipeline.communicates:
        return
    if is_distributed(optimizer):
        raise ValueError(
            f"{owner}: the gradients would be averaged over the ranks twice. Expected one distributed optimizer; got "
            f"{type(optimizer).__name__} inside {owner}. Pass the optimizer that it wraps."
        )
    if isinstance(optimizer, PipelineOptimizer) and optimizer._pipeline.scales_loss:
        if pipeline.only_communicates:
            optimizer.decide_together()
            return
        raise ValueError(
            f"{owner}: loss scaling must be outside the reduction. Expected the order loss scale, reduce, unscale, "
            f"check, update; got {type(optimizer).__name__} inside {owner}. Write "
            f"NPULossScaleOptimizer(NPUDistributedOptimizer(opt), manager, is_distributed=True), or one NPUOptimizer."
        )
