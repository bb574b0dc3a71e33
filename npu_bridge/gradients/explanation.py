"""Lists the stages of an optimizer in order, with their needs, their guarantees and the bytes that a rank sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from npu_bridge import collective
from npu_bridge.base.arguments import check_instance
from npu_bridge.gradients.keras.shared import PipelineMixin
from npu_bridge.gradients.optimizer import PipelineOptimizer
from npu_bridge.gradients.order import name_of_stage
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.gradients.stage import ExchangingStage

_VALUE_BYTES = 4  # of a float32 gradient


class StageRow(NamedTuple):
    """One stage of an optimizer.

    Attributes:
      place: place of the stage in the pipeline.
      name: name of the stage's class.
      arguments: arguments of the constructor, as text.
      needs, gives: guarantees that the stage needs from other stages; guarantees that the stage gives.
      sends: bytes that a rank sends for each parameter and batch, as a pair: without this stage, and with it. None if
        the stage neither communicates nor changes the number. The second number is None if it depends on the training.
    """

    place: str
    name: str
    arguments: str
    needs: tuple
    gives: tuple
    sends: tuple | None = None

    @property
    def description(self) -> str:
        """Formats a stage's needs, guarantees and sent bytes."""
        facts = [f"needs {need}" for need in self.needs] + [f"gives {gift}" for gift in self.gives]
        return ", ".join(facts + ([] if self.sends is None else [_describe_sent_bytes(*self.sends)]))


def list_stages(optimizer: Any, ranks: int | None = None) -> list[StageRow]:
    """Lists the stages of an optimizer in the order in which gradients pass them.

    Arguments and errors are those of `npu_bridge.stages.explain`.
    """
    pipelines = list_pipelines(optimizer)
    size = collective.current().size if ranks is None else ranks
    is_sent = size > 1 and any(pipeline.communicates for pipeline in pipelines)
    sent: float | None = ring_all_reduce_bytes(size) if is_sent else None
    rows = []
    for stage in (stage for pipeline in pipelines for stage in pipeline.stages):
        before, sends = sent, None
        if before is not None:
            sent = stage.sent_bytes(before, size)
            sends = (before, sent) if isinstance(stage, ExchangingStage) or sent != before else None
        arguments = ", ".join(f"{name}={value!r}" for name, value in stage.get_config().items())
        needs, gives = tuple(stage.needs), tuple(stage.gives)
        rows.append(StageRow(stage.place, name_of_stage(stage), arguments, needs, gives, sends))
    return rows


def ring_all_reduce_bytes(ranks: int) -> float:
    """Returns the bytes that a rank sends for each float32 parameter and batch in a plain ring all-reduce."""
    return 2 * (ranks - 1) / ranks * _VALUE_BYTES


def sum_sent_bytes(rows: Sequence[StageRow], ranks: int) -> float | None:
    """Returns the bytes that a rank sends for each parameter and batch with the stages in `rows`.

    Returns None if the bytes depend on the training, 0 if the stages send nothing.
    """
    sends = [row.sends for row in rows if row.sends is not None]
    return sends[-1][1] if sends else 0.0


def format_stage_rows(rows: Sequence[StageRow]) -> str:
    """Formats a line for each stage, with its number, place, class, arguments and facts."""
    if not rows:
        return "Gradients reach the update unchanged."
    rows = [(row.place, f"{row.name}({row.arguments})", row.description) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [
        f"{number:2} {place:{widths[0]}}  {text:{widths[1]}}  {facts}".rstrip()
        for number, (place, text, facts) in enumerate(rows, 1)
    ]
    return "\n".join(lines)


def list_pipelines(optimizer: Any) -> list:
    """Lists the pipelines of an optimizer, innermost first. For a pipeline, returns a list with this pipeline.

    Raises TypeError for any other object.
    """
    if isinstance(optimizer, Pipeline):
        return [optimizer]
    if isinstance(optimizer, PipelineMixin):
        return [optimizer._pipeline.pipeline]
    what, fix = "an optimizer of npu_bridge or a Pipeline", "Pass what NPUOptimizer(...) returned."
    check_instance("explain", "optimizer", optimizer, PipelineOptimizer, what, fix)
    inner = optimizer._inner.optimizer
    around = isinstance(inner, (PipelineOptimizer, PipelineMixin))
    return [*(list_pipelines(inner) if around else []), optimizer._pipeline]


def _describe_sent_bytes(before, after):
    if after is None:
        return "sends bytes that depend on the training"
    changed = "" if after == before else f" instead of {before:.3g}"
    return f"sends {after:.3g}{changed} bytes per parameter"
