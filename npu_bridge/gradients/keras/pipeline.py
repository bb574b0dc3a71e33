"""Passes each gradient of a Keras optimizer through a pipeline once, whichever method of the optimizer gets it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Callable

from npu_bridge import collective
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.callers import model_in_training
from npu_bridge.base.tf_internals.graphs import is_compiled_by_xla
from npu_bridge.base.tf_internals.training import steps_per_execution
from npu_bridge.gradients import collections
from npu_bridge.gradients.arithmetic import as_gradient, gradient_values
from npu_bridge.gradients.graph_mode import is_building_graph
from npu_bridge.gradients.order import name_of_stage
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.gradients.stage import SUMMING_PLACES
from npu_bridge.gradients.step import Step
from npu_bridge.gradients.steps.backward_passes import BackwardPasses, ScaledSteps
from npu_bridge.gradients.steps.open_steps import OpenSteps


class KerasPipeline:
    """A pipeline for a Keras optimizer, which passes each gradient through the stages exactly once.

    Gradients come from `minimize` or `compute_gradients`; from a `tf.GradientTape` directly to `apply_gradients`; or
    from a tape whose loss and gradients went through `scale_loss` and `unscale`.

    Args:
      pipeline: the stages and the optimizer that updates; also an attribute.
      owner: name of the optimizer, for messages.
    Attributes:
      backward_passes: the backward passes since the last update, for custom loops.
      moments: a variable with two times of the latest step, in seconds since the epoch: when the gradients were
        computed, and when they were averaged over the ranks. None if not needed.
    """

    def __init__(self, pipeline: Pipeline, owner: str):
        self.pipeline = pipeline
        self.inner = pipeline.inner
        self._owner = owner
        self.moments: tf.Variable | None = None
        # The mean of equal gradients changes the last bits at most. Other stages must not run twice.
        self._open_steps = OpenSteps(trusts_variables=not pipeline.only_communicates)
        self._scaled_steps = ScaledSteps()
        self.backward_passes = BackwardPasses(pipeline, self._scaled_steps, self._combine_gradients, owner)

    def compute_gradients(self, loss: Any, tape: Any, differentiate: Callable[[Any, Any], Sequence]) -> list:
        """Computes gradients of the unscaled loss, averaged over the ranks.

        Args:
          loss: tensor, or a callable that returns a tensor.
          tape: the `tf.GradientTape` that recorded a tensor `loss`; None in a TF 1 graph or with a callable.
          differentiate: function of a loss and a tape that returns (gradient, variable) pairs.
        Returns:
          (gradient, variable) pairs in the order of `differentiate`.
        Ranks: collective where the pipeline communicates.
        """
        step = self.pipeline.begin()
        if callable(loss):

            def scaled():
                return self.pipeline.scale(loss(), step)
        else:
            collections.publish_in_graph(collections.UNSCALED_LOSS, loss)
            with contextlib.nullcontext() if tape is None or not self.pipeline.scales_loss else tape:
                scaled = self.pipeline.scale(loss, step)
        return self._combine_gradients(step, self.pipeline.prepare_gradients(step, differentiate(scaled, tape)))

    def average(self, grads_and_vars: Sequence) -> list:
        """Averages gradients of this rank over all ranks."""
        return self._combine_gradients(self._begin_unscaled_step(), list(grads_and_vars), may_be_abandoned=True)

    def average_unless_averaged(self, grads_and_vars: Sequence) -> list:
        """Averages gradients of this rank over all ranks, unless they are already averaged."""
        pairs = list(grads_and_vars)
        return pairs if self._open_steps.has_returned(pairs) else self.average(pairs)

    def average_scaled(self, grads_and_vars: Sequence) -> list:
        """Averages gradients of the loss that `scale_loss` returned in this function.

        Without such a loss, works as `average_unless_averaged`.

        Raises:
          ValueError: `scale_loss` was called in another function, where the loss scale can differ.
        """
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        step = self._scaled_steps.remove(is_nested=True, variables=variables)
        if step is None and self._open_steps.has_returned(pairs):
            return pairs
        step = step or self._scaled_steps.reuse(variables)
        if step is None:
            if self.pipeline.scales_loss and self._scaled_steps.has_open:
                problem = "scale_loss and apply run in different functions, so the loss scale can change in between"
                expected, got = "both calls in one tf.function, or both outside", "one call inside and one outside"
                fix = "Call scale_loss and apply in the same function."
                raise ValueError(message(self._owner, problem, expected, got, fix))
            step = self._begin_unscaled_step()
        return self._combine_gradients(step, pairs, may_be_abandoned=True)

    def close_step(self, grads_and_vars: Sequence) -> bool:
        """Closes the step of these gradients; returns whether the gradients went through the pipeline before."""
        pairs = list(grads_and_vars)
        return self._open_steps.has_returned(pairs) and self._open_steps.remove_step(pairs, self._owner) is not None

    def apply(self, grads_and_vars: Sequence, update: Callable[[list], Any]) -> Any:
        """Calls `update` with the pairs, unless a stage skips the step; returns the result of `Pipeline.apply`."""
        pairs = list(grads_and_vars)
        step = self._open_steps.remove_step(pairs, self._owner)
        if step is None:
            step = self._begin_unscaled_step()
            self.pipeline.warn_of_missing_changes(self._owner)
        self.inner.create_state([variable for _, variable in pairs])
        return self.pipeline.apply(step, pairs, lambda trained: self.inner.stand_ins.update(trained, update))

    def scale_loss(self, loss: Any) -> Any:
        """Multiplies a loss for a custom tape by the loss scale; for a callable, returns a callable."""
        if callable(loss):
            return lambda: self.scale_loss(loss())
        step = self.pipeline.begin()
        self._scaled_steps.keep(step)
        return self.pipeline.scale(loss, step)

    def unscale(self, gradients: Sequence) -> list:
        """Divides gradients of a scaled loss by the loss scale and averages them over the ranks; None stays None.

        Ranks: collective where the pipeline communicates.
        """
        needing = [name_of_stage(stage) for stage in self.pipeline.stages if stage.needs_variables]
        if needing:
            problem = f"{needing[0]} needs the variable of each gradient"
            expected, got = "pairs of gradients and variables", "only the gradients of get_unscaled_gradients"
            fix = "Call minimize or compute_gradients, or give the tape's gradients to apply_gradients."
            raise ValueError(message(self._owner, problem, expected, got, fix))
        step = self._scaled_steps.remove()
        if step is None:  # the caller has multiplied the loss by the scale
            step = self.pipeline.begin()
            self.pipeline.scale(tf.ones([]), step)
            step.losses.values.clear()
        given = [as_gradient(grad, None) for grad in gradients]
        pairs = [(grad, _UnknownVariable(position, grad)) for position, grad in enumerate(given)]
        return [grad for grad, _ in self._combine_gradients(step, pairs, has_variables=False)]

    def _combine_gradients(self, step, grads_and_vars, has_variables=True, may_be_abandoned=False):
        self._check_compilation()
        self._check_execution()
        pairs = list(grads_and_vars)
        if has_variables:  # the variables that `build` would make, so a saved optimizer has the same ones either way
            self.pipeline.create_variables([variable for _, variable in pairs])
        ready = self._timestamp_after_gradients(pairs)
        combined = self.pipeline.combine(step, pairs)
        if self.moments is not None:
            self.moments.assign([ready, self._timestamp_after_gradients(combined)])
        self._open_steps.keep_step(
            step, [variable for _, variable in pairs] if has_variables else None, may_be_abandoned
        )
        return combined

    def _timestamp_after_gradients(self, grads_and_vars):
        if self.moments is None:
            return None
        known = [gradient_values(grad) for grad, _ in grads_and_vars if grad is not None]
        with tf.control_dependencies(known), tf.device("/cpu:0"):
            return tf.timestamp()

    def _begin_unscaled_step(self):
        """Returns a new `Step` for gradients of an unscaled loss that have not gone through the pipeline yet."""
        if self._scaled_steps.remove() is not None:
            problem = "these gradients are still multiplied by the loss scale"
            expected, got = "get_unscaled_gradients after get_scaled_loss", "get_scaled_loss alone"
            fix = "Write gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled_loss, variables))."
            raise ValueError(message(self._owner, problem, expected, got, fix))
        fix = "Call minimize, or get_scaled_loss and get_unscaled_gradients around your tape."
        self.pipeline.warn_of_unscaled_loss(self._owner, fix)
        return Step()

    def _check_compilation(self):
        if not self.pipeline.communicates or tf.executing_eagerly() or collective.current().size == 1:
            return
        if is_compiled_by_xla(tf.compat.v1.get_default_graph()):
            problem = "a step that XLA compiles as a whole cannot exchange gradients"
            expected, got = "jit_compile=False with several ranks", "jit_compile=True"
            fix = "Leave jit_compile out of model.compile, or compile only the layers of the model with tf.function."
            raise ValueError(message(self._owner, problem, expected, got, fix))

    def _check_execution(self):
        spanning = [name_of_stage(stage) for stage in self.pipeline.stages if stage.place in SUMMING_PLACES]
        communicates = self.pipeline.communicates and collective.current().size > 1
        model = model_in_training() if (spanning or communicates) and not is_building_graph() else None
        if model is None:
            return
        with tf.init_scope():
            is_tuned = getattr(model, "autotune_steps_per_execution", False)  # missing in Keras 3
            got = "'auto'" if is_tuned else steps_per_execution(model)
        if spanning and got != 1:
            problem = f"{spanning[0]} and Keras would both put several batches into one step"
            expected, fix = "steps_per_execution=1", "Leave steps_per_execution out of model.compile."
            # AutoGraph, which traces Keras' loop, would hide a ValueError behind an error of its own.
            raise RuntimeError(message(self._owner, problem, expected, f"steps_per_execution={got}", fix))
        if communicates and is_tuned:
            problem, expected = "each rank would choose its own number of steps between two callbacks", "a number"
            fix = "Pass the same number to model.compile on every rank."
            raise RuntimeError(message(self._owner, problem, expected, f"steps_per_execution={got}", fix))


class _UnknownVariable:
    """A placeholder for the variable of a gradient that was passed without its variable."""

    def __init__(self, position, grad):
        self.name = f"gradient {position}"
        self.shape = tf.TensorShape(None) if grad is None else grad.shape
