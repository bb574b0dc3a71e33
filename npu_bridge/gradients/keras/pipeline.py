"""Passes the gradients of a Keras optimizer through a pipeline once, whichever method they come by."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Callable

from npu_bridge import collective
from npu_bridge.base.errors import message, say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.callers import model_in_training
from npu_bridge.base.tf_internals.graphs import is_compiled_by_xla
from npu_bridge.base.tf_internals.training import steps_per_execution
from npu_bridge.gradients import collections
from npu_bridge.gradients.arithmetic import as_gradient
from npu_bridge.gradients.backward_passes import BackwardPasses
from npu_bridge.gradients.graph_mode import building_graph
from npu_bridge.gradients.open_steps import OpenSteps
from npu_bridge.gradients.order import name_of
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.gradients.stage import Step


class KerasPipeline:
    """A pipeline that gradients go through once, whichever method of Keras they come by.

    They come from `minimize` or `compute_gradients`, from a `tf.GradientTape` straight to `apply_gradients`, or
    from a tape whose loss and gradients went through `scale_loss` and `unscale`.

    Args:
      pipeline: the stages and the optimizer that updates, also an attribute.
      owner: name for messages.
    Attributes:
      backward_passes: the backward passes since the last update, for custom loops.
      moments: a variable for when the gradients of the latest step were ready, and when they were those of the job, in
        seconds since the epoch; None if not needed.
    """

    def __init__(self, pipeline: Pipeline, owner: str):
        self.pipeline = pipeline
        self.inner = pipeline.inner
        self._owner = owner
        self.moments: tf.Variable | None = None
        self._open_steps = OpenSteps()
        self.backward_passes = BackwardPasses(pipeline, self._open_steps, self._combine, owner)

    def compute_gradients(self, loss: Any, tape: Any, differentiate: Callable[[Any, Any], Sequence]) -> list:
        """Computes gradients of the unscaled loss, averaged over the ranks.

        Args:
          loss: tensor, or a callable that returns one.
          tape: the `tf.GradientTape` that recorded a tensor `loss`; None in a TF 1 graph or with a callable.
          differentiate: called with a loss and a tape; returns the pairs of (gradient, variable).
        Returns:
          Pairs in the same order.
        Ranks: collective where the pipeline communicates.
        """
        step = self.pipeline.begin()
        if callable(loss):

            def scaled():
                return self.pipeline.scale(loss(), step)
        else:
            collections.publish(collections.UNSCALED_LOSS, loss)
            with contextlib.nullcontext() if tape is None or not self.pipeline.scales_loss else tape:
                scaled = self.pipeline.scale(loss, step)
        return self._combine(step, self.pipeline.own_gradients(step, differentiate(scaled, tape)))

    def combine_once(self, grads_and_vars: Sequence) -> list:
        """Averages this rank's gradients over the job, unless they are averaged already."""
        pairs = list(grads_and_vars)
        if self._open_steps.find(pairs) is not None:
            return pairs
        return self._combine(self._step_of_unscaled_loss(), pairs, may_be_left=True)

    def combine_scaled(self, grads_and_vars: Sequence) -> list:
        """Averages as `combine_once`, for gradients of the loss that `scale_loss` returned in this function, if called.

        Raises:
          ValueError: `scale_loss` was called in another function, where the scale can differ.
        """
        pairs = list(grads_and_vars)
        step = self._open_steps.take_scaled(is_nested=True)
        if step is None:
            if self._open_steps.find(pairs) is not None:
                return pairs
            if self.pipeline.scales_loss and self._open_steps.has_scaled:
                problem = "scale_loss and apply run in different functions, so the loss scale can change in between"
                expected, got = "both in one tf.function, or neither", "one outside"
                raise ValueError(message(self._owner, problem, expected, got, "Call them side by side."))
            step = self._step_of_unscaled_loss()
        return self._combine(step, pairs, may_be_left=True)

    def forget(self, grads_and_vars: Sequence) -> bool:
        """Returns True when these gradients went through the pipeline, and forgets them."""
        return self._open_steps.take(list(grads_and_vars)) is not None

    def start_alike(self, grads_and_vars: Sequence, make_slots: Callable[[], Any]) -> None:
        """Compares variables as `Pipeline.start_alike`, for an update that does not go through `apply`."""
        self.pipeline.start_alike(grads_and_vars, make_slots)

    def apply(self, grads_and_vars: Sequence, update: Callable[[list], Any]) -> Any:
        """Calls `update` with pairs, if the pipeline's stages agree; returns as `Pipeline.apply`."""
        pairs = list(grads_and_vars)
        step = self._open_steps.take(pairs) or self._step_of_unscaled_loss()
        step.grads_and_vars = pairs
        self.inner.prepare([variable for _, variable in pairs])
        return self.pipeline.apply(step, lambda trained: self.inner.stand_ins.update(trained, update))

    def scale_loss(self, loss: Any) -> Any:
        """Scales the loss to differentiate with a custom tape; a callable gives a callable."""
        if callable(loss):
            return lambda: self.scale_loss(loss())
        step = self.pipeline.begin()
        self._open_steps.keep_scaled(step)
        return self.pipeline.scale(loss, step)

    def unscale(self, gradients: Sequence) -> list:
        """Converts gradients of a scaled loss to gradients of the job in true units; a None stays None.

        Ranks: collective where the pipeline communicates.
        """
        needing = [name_of(stage) for stage in self.pipeline.stages if stage.needs_variables]
        if needing:
            problem = f"{needing[0]} must know the variable of each gradient"
            expected, got = "pairs of gradients and variables", "get_unscaled_gradients"
            fix = "Call minimize or compute_gradients, or give the tape's gradients to apply_gradients."
            raise ValueError(message(self._owner, problem, expected, got, fix))
        step = self._open_steps.take_scaled()
        if step is None:  # the caller has multiplied the loss by the scale
            step = self.pipeline.begin()
            self.pipeline.scale(tf.ones([]), step)
            step.losses.values.clear()
        given = [as_gradient(grad, None) for grad in gradients]
        pairs = [(grad, _UnknownVariable(position, grad)) for position, grad in enumerate(given)]
        return [grad for grad, _ in self._combine(step, pairs, has_variables=False)]

    def _combine(self, step, grads_and_vars, has_variables=True, may_be_left=False):
        self._check_compilation()
        self._check_execution()
        pairs = list(grads_and_vars)
        if has_variables:  # the variables that `build` would make, so a saved optimizer has the same ones either way
            self.pipeline.create_variables([variable for _, variable in pairs])
        ready = self._moment_after(pairs)
        combined = self.pipeline.combine(step, pairs)
        if self.moments is not None:
            self.moments.assign([ready, self._moment_after(combined)])
        self._open_steps.keep(step, [variable for _, variable in pairs] if has_variables else None, may_be_left)
        return combined

    def _moment_after(self, pairs):
        if self.moments is None:
            return None
        known = [grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad, _ in pairs if grad is not None]
        with tf.control_dependencies(known), tf.device("/cpu:0"):
            return tf.timestamp()

    def _step_of_unscaled_loss(self):
        """Makes a step for gradients that did not go through the pipeline yet."""
        if self._open_steps.take_scaled() is not None:
            problem = "these gradients are still multiplied by the loss scale"
            expected, got = "get_unscaled_gradients after get_scaled_loss", "get_scaled_loss alone"
            fix = "Write gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled_loss, variables))."
            raise ValueError(message(self._owner, problem, expected, got, fix))
        if self.pipeline.scales_loss:
            say_once(
                logging.WARNING,
                f"{self._owner}: the loss was not scaled, because gradients came from elsewhere. Call minimize, or "
                f"get_scaled_loss and get_unscaled_gradients around your tape.",
            )
        return Step()

    def _check_compilation(self):
        if not self.pipeline.communicates or tf.executing_eagerly() or collective.current().size == 1:
            return
        if is_compiled_by_xla(tf.compat.v1.get_default_graph()):
            problem = "a step that is compiled as a whole cannot exchange gradients"
            expected, got = "jit_compile=False with several ranks", "jit_compile=True"
            fix = "Leave it out of model.compile, or compile only the model's own layers with tf.function."
            raise ValueError(message(self._owner, problem, expected, got, fix))

    def _check_execution(self):
        spanning = [name_of(stage) for stage in self.pipeline.stages if stage.spans_batches]
        model = model_in_training() if spanning and not building_graph() else None
        if model is None:
            return
        with tf.init_scope():
            is_tuned = getattr(model, "autotune_steps_per_execution", False)  # missing in Keras 3
            got = "'auto'" if is_tuned else steps_per_execution(model)
        if got != 1:
            problem = f"{spanning[0]} and Keras would both put several batches into one step"
            expected, fix = "steps_per_execution=1", "Leave it out of model.compile."
            # AutoGraph, which traces Keras' loop, would hide a ValueError behind an error of its own.
            raise RuntimeError(message(self._owner, problem, expected, f"steps_per_execution={got}", fix))


class _UnknownVariable:
    """Stands for a variable while only its gradient is known."""

    def __init__(self, position, grad):
        self.name = f"gradient {position}"
        self.shape = tf.TensorShape(None) if grad is None else grad.shape
