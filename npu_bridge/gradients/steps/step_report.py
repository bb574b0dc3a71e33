"""Reports a training step: its loss, whether it overflowed, and its loss scale."""

from __future__ import annotations

from typing import Any, NamedTuple

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.graph_mode import is_building_graph
from npu_bridge.gradients.step import Step


class StepReport(NamedTuple):
    """A report of one training step: tensors of a TF 1 graph or function, or numbers of the last step that ran.

    Attributes:
      loss: the unscaled loss on this rank; a tuple for several losses.
      overflow: True if the step was skipped because gradients overflowed on some rank.
      loss_scale: the loss scale; a tuple for several losses or groups.
    """

    loss: Any
    overflow: Any
    loss_scale: Any


def report_of(step: Step | None, owner: str) -> StepReport:
    """Returns the report of a step as tensors; adds operators to a TF 1 graph only if the step lacks them.

    Raises:
      ValueError: there is no step, or its loss is unknown because other code computed the gradients.
    """
    if step is None or not step.losses.values:
        problem, expected = "there is no step to report", "a step whose loss was given to the optimizer"
        got = "no step so far" if step is None else "gradients that other code computed"
        raise ValueError(message(owner, problem, expected, got, "Read the report after minimize or apply_gradients."))
    scales = step.losses.scales or (tf.constant(1.0),)
    return StepReport(_single_or_tuple(step.losses.values), step.overflow(), _single_or_tuple(scales))


class LastStepReport:
    """Stores the report of the last step, so that it can be read after `fit`; not saved in checkpoints."""

    def __init__(self):
        self._variables: StepReport | None = None
        self._tensors: StepReport | None = None

    def record(self, step: Step) -> None:
        """Stores the report of a step, if its loss is known."""
        if not step.losses.values or tf.distribute.has_strategy():
            return
        report = report_of(step, "last_step")
        if is_building_graph():
            self._tensors = report
            return
        values = StepReport(*(_to_scalars(part) for part in report))
        if self._variables is None or [len(part) for part in self._variables] != [len(part) for part in values]:
            with tf.init_scope():
                made = [[tf.Variable(tf.zeros([], value.dtype), trainable=False) for value in part] for part in values]
                self._variables = StepReport(*made)
        for variable, value in zip(sum(self._variables, []), sum(values, [])):
            variable.assign(value)

    def read(self, owner: str) -> StepReport:
        """Returns the report as tensors in a TF 1 graph, else as numbers.

        Raises:
          ValueError: no step has been reported.
        """
        if self._tensors is not None:
            return self._tensors
        if self._variables is None:
            return report_of(None, owner)
        return StepReport(
            *(_single_or_tuple([variable.numpy().item() for variable in part]) for part in self._variables)
        )


def _single_or_tuple(values):
    return values[0] if len(values) == 1 else tuple(values)


def _to_scalars(part):
    """Converts values to a list of scalars: booleans stay, numbers become float32, larger tensors their mean."""
    values = [tf.convert_to_tensor(value) for value in (part if isinstance(part, tuple) else (part,))]
    return [value if value.dtype == tf.bool else tf.reduce_mean(tf.cast(value, tf.float32)) for value in values]
