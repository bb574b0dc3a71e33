"""Wraps an optimizer in a pipeline of gradient transformations; the result is an optimizer of TensorFlow 1."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from npu_bridge import collective
from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import KeywordChecksMixin, listed, message, shown
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.plain_config import to_python_numbers
from npu_bridge.base.tensorflow_start import hide_global_step_warning
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals.callers import is_called_by_keras
from npu_bridge.base.tf_internals.savers import track_part
from npu_bridge.gradients import collections
from npu_bridge.gradients.arithmetic import sum_in_order
from npu_bridge.gradients.graph_mode import initialise_with_keras
from npu_bridge.gradients.inner.interface import mark_as_distributed
from npu_bridge.gradients.inner.nesting import check_nesting
from npu_bridge.gradients.keras.in_graphs import reject_in_eager_fit
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.gradients.stage import changes_gradients
from npu_bridge.gradients.step import Step
from npu_bridge.gradients.steps.backward_passes import BackwardPasses, ScaledSteps
from npu_bridge.gradients.steps.open_steps import OpenSteps
from npu_bridge.gradients.steps.step_report import StepReport, report_of

_LOG = logger(__name__)


class PipelineOptimizer(KeywordChecksMixin, tf.compat.v1.train.Optimizer):
    """An optimizer that passes the gradients of an inner optimizer through a pipeline before the update.

    Works in TF 1 graphs, in a `tf.function` and eagerly (there with a callable loss). Attributes that this class lacks
    are looked up in the inner optimizer.

    Args:
      optimizer: a TF 1, Keras legacy or Keras optimizer.
      pipeline: the pipeline, with its stages and the adapter of `optimizer`.
      name: name of this optimizer.
    Raises:
      TypeError: `optimizer` is not an optimizer.
      ValueError: `optimizer` itself has a pipeline whose stages would run in the wrong order or twice.
    """

    has_stand_ins = True

    def __init__(self, optimizer, pipeline: Pipeline, name: str):
        super().__init__(use_locking=False, name=name)
        within = optimizer._pipeline if isinstance(optimizer, PipelineOptimizer) else None
        check_nesting(type(self).__name__, pipeline, optimizer, within)
        self._pipeline, self._inner = pipeline, pipeline.inner
        track_part(self, optimizer, "optimizer")
        for name, state in pipeline.state().items():
            track_part(self, state, name)
        initialise_with_keras(pipeline.variables)
        if pipeline.communicates:
            mark_as_distributed(self)
        self._open_steps = OpenSteps()
        self._last_step = None

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
        """Computes gradients of the unscaled loss, averaged over the ranks if a stage reduces gradients.

        Several losses have a loss scale each. Every loss is multiplied by its scale, and its gradients are computed
        separately; overflows in these gradients change only this scale. The gradients of all losses are added up before
        the all-reduce. If the gradients of one loss overflow, the step is skipped.

        Args:
          loss: scalar tensor, or a callable that returns a scalar (required in eager execution). With a list of losses,
            the gradients of all losses are summed.
          var_list: variables to differentiate by; all trainable variables by default.
          gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss: as in
            `tf.compat.v1.train.Optimizer.compute_gradients`.
          loss_id: position of the loss-scale manager of the loss, by default the first. For a list of losses, a list of
            positions, by default all managers in their order.
        Returns:
          List of (gradient, variable). A gradient can be None; a sparse gradient is a `tf.IndexedSlices`.
        Raises:
          TypeError: `loss_id` is not a position.
          RuntimeError: the loss is a tensor in eager execution.
          ValueError: the numbers of managers and losses differ, or there is no manager at the position `loss_id`.
        Ranks: collective where the pipeline communicates.
        """
        owner = f"{type(self).__name__}.compute_gradients"
        has_several = isinstance(loss, (list, tuple))
        losses = list(loss) if has_several else [loss]
        managers = self._pipeline.loss_scale_managers
        if has_several:
            numbers = _manager_positions(owner, len(losses), loss_id, managers)
        else:
            numbers = [check_loss_id(owner, 0 if loss_id is None else loss_id, managers)]
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
                functools.partial(_scale_loss_of_function, scale, one) if callable(one) else scale(one),
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
            collections.publish_in_graph(collections.UNSCALED_LOSS, sum_in_order(losses) if has_several else loss)
        if has_several:
            return self._combine(step, step.grads_and_vars)
        return self._combine(step, self._pipeline.prepare_gradients(step, grads_and_vars))

    @property
    def last_step(self) -> StepReport:
        """The loss, overflow and loss scale of the last step that was built or executed, as tensors.

        Raises:
          ValueError: there was no step, or `compute_gradients` of another optimizer computed its gradients.
        """
        return report_of(self._last_step, f"{type(self).__name__}.last_step")

    @functools.cached_property
    def backward_passes(self) -> BackwardPasses:
        """The backward passes since the last update, for custom loops."""
        return BackwardPasses(self._pipeline, ScaledSteps(), self._combine, type(self).__name__)

    def _combine(self, step, grads_and_vars):
        delivered = self._pipeline.combine(step, grads_and_vars)
        self._open_steps.keep_step(step, [variable for _, variable in delivered])
        return delivered

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """Applies gradients with the inner optimizer, unless a stage skips the step.

        Args:
          grads_and_vars: pairs from `compute_gradients`; the caller can clip or change the gradients.
          global_step: variable to increase by 1 if the update is applied.
          name: name of the update op.
        Returns:
          The op that runs the step; None in eager execution.
        Raises:
          ValueError: all gradients are None.
        """
        grads_and_vars = list(grads_and_vars)
        step = self._open_steps.copy_step(grads_and_vars, type(self).__name__) or Step()
        foreign = self._open_steps.foreign_variables(grads_and_vars)
        if foreign:
            self._warn_of_foreign_gradients([variable.name for variable in foreign], is_called_by_keras())
        if global_step is not None:
            hide_global_step_warning()
        self._last_step = step
        if trained := [variable for grad, variable in grads_and_vars if grad is not None]:
            self._inner.create_state(trained)
        update = self._pipeline.apply(
            step, grads_and_vars, lambda pairs: self._inner.apply_gradients(pairs, global_step, name)
        )
        self._open_steps.note_applied(grads_and_vars)
        collections.publish_learning_rate(self._inner.optimizer)
        collections.publish_in_graph(collections.GRADIENTS, step.gradients)
        return update

    def skip_steps_together(self):
        """Makes all ranks skip the same steps; needed if an outer optimizer averages the gradients."""
        self._pipeline.skip_steps_together()

    def get_slot(self, var, name):
        """Returns the slot `name` of `var` in the inner optimizer, or None."""
        return self._inner.get_slot(var, name)

    def get_slot_names(self):
        """Returns the names of the inner optimizer's slots."""
        return self._inner.get_slot_names()

    def variables(self):
        """Returns the variables of the inner optimizer."""
        return self._inner.variables()

    def __repr__(self) -> str:
        inner = self.__dict__.get("_inner")
        if inner is None:  # while an object is copied
            return super().__repr__()
        is_wrapper = isinstance(inner.optimizer, PipelineOptimizer)
        wrapped = repr(inner.optimizer) if is_wrapper else type(inner.optimizer).__name__
        return f"{type(self).__name__}({wrapped}, stages={list(self._pipeline.stages)!r})"

    def _warn_of_foreign_gradients(self, names, is_in_fit):
        """Warns of the gradients of these variables, which other code has computed; rejects those of an eager `fit`."""
        averages = self._pipeline.reduces_gradients and collective.current().size > 1
        is_passed_by = averages or self._pipeline.scales_loss or any(map(changes_gradients, self._pipeline.stages))
        if is_passed_by and is_in_fit:
            reject_in_eager_fit(type(self).__name__)
        self._pipeline.warn_of_unscaled_loss(self.get_name(), "Call minimize or compute_gradients.")
        self._pipeline.warn_of_missing_changes(self.get_name())
        if averages:
            _LOG.warning(
                "%s: the gradients of %s were not averaged over the ranks, because they did not come from "
                "compute_gradients of this optimizer. Call compute_gradients or minimize.",
                self.get_name(),
                listed(names),
            )

    def __getattr__(self, name):
        # `_inner` is missing while an object is copied; `_self_...` and dunder names are bookkeeping of checkpoints and
        # of Python, which must not be shared with the inner optimizer.
        if name == "_inner" or name.startswith(("_self_", "__")):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        found = getattr(self._inner.optimizer, name)
        # Keras writes the config as JSON, but configs of its older optimizers contain numpy numbers.
        return (lambda: to_python_numbers(found())) if name == "get_config" else found

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
        # is a dependency of this object and saves its slots; saving them twice is an error.
        return [name for name in super().__dir__() if name != "get_slot_names"]

    def _create_slots(self, var_list):
        self._inner.make_slots(var_list)


def check_loss_id(owner: str, loss_id: Any, managers: Sequence) -> int:
    """Checks that `loss_id` is the position of a loss-scale manager; accepts every integer without loss scaling.

    Raises:
      TypeError: `loss_id` is not an integer.
      ValueError: there is no manager at this position.
    """
    fix = "Leave loss_id out for the first manager."
    loss_id = check_count(owner, "loss_id", loss_id, fix, at_least=None, value_text="a manager's position")
    if not 0 <= loss_id < len(managers) and managers:
        problem, expected = "there is no loss-scale manager at this position", f"0 <= loss_id < {len(managers)}"
        fix = "Give the optimizer a list of managers, one for each loss."
        raise ValueError(message(owner, problem, expected, shown(loss_id), fix))
    return loss_id


def _manager_positions(owner: str, count: int, loss_id: Any, managers: Sequence) -> list[int]:
    """Returns for each of several losses the position of its loss-scale manager.

    Args:
      owner: name of the caller, for messages.
      count: number of losses.
      loss_id: list with the position for each loss. None: every loss has its own manager, or all share a single one.
      managers: the loss-scale managers of the optimizer.
    Raises:
      TypeError: `loss_id` is not a list of integers.
      ValueError: there are no losses, or not as many positions or managers as losses.
    """
    if not count:
        raise ValueError(message(owner, "there is no loss", "one loss or more", "an empty list", "Pass a loss."))
    if loss_id is None:
        if len(managers) > 1 and count != len(managers):
            problem = "there are not as many losses as loss-scale managers"
            expected = f"{len(managers)} losses, or loss_id"
            fix = "Pass loss_id=[...] with the manager of each loss."
            raise ValueError(message(owner, problem, expected, f"{count} losses", fix))
        return list(range(count)) if len(managers) > 1 else [0] * count
    if not isinstance(loss_id, (list, tuple)) or len(loss_id) != count:
        kind = ValueError if isinstance(loss_id, (list, tuple)) else TypeError
        problem, expected = "loss_id does not fit the losses", f"a list of {count} positions"
        raise kind(
            message(
                owner, problem, expected, shown(loss_id), "Give the position of a loss-scale manager for each loss."
            )
        )
    return [check_loss_id(owner, number, managers) for number in loss_id]


def _scale_loss_of_function(scale, loss):
    return scale(loss())
