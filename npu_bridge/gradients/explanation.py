"""Lists the stages of an optimizer, in their order, as text."""

from __future__ import annotations

from typing import Any

from npu_bridge.gradients.keras.shared import PipelineMixin
from npu_bridge.gradients.optimizer import PipelineOptimizer
from npu_bridge.gradients.order import name_of
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.options.errors import message, shown


def explain(optimizer: Any) -> str:
    """The stages that gradients go through, in their order.

    Args:
      optimizer: an optimizer with stages, or a pipeline. Of optimizers around one another the outermost comes last,
        because it gets the gradients of the inner ones.
    Returns:
      Text: for each stage a line with its number, place, class and arguments, what it needs and what it gives.
    Raises:
      TypeError: it has no pipeline.
    """
    rows = [_row(stage) for pipeline in pipelines_of(optimizer) for stage in pipeline.stages]
    if not rows:
        return "Gradients go from the backward pass to the update as they are."
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [
        f"{number:2} {place:{widths[0]}}  {text:{widths[1]}}  {facts}".rstrip()
        for number, (place, text, facts) in enumerate(rows, 1)
    ]
    return "\n".join(lines)


def pipelines_of(optimizer: Any) -> list:
    """The pipelines of an optimizer, the innermost first, or a list of the one given; errors as `explain`."""
    if isinstance(optimizer, Pipeline):
        return [optimizer]
    if isinstance(optimizer, PipelineMixin):
        return [optimizer._pipeline.pipeline]
    if not isinstance(optimizer, PipelineOptimizer):
        expected, mend = "an optimizer of npu_bridge, or a Pipeline", "Pass what NPUOptimizer(...) returned."
        raise TypeError(message("explain", "that has no stages", expected, shown(optimizer), mend))
    inner = optimizer._inner.optimizer
    around = isinstance(inner, (PipelineOptimizer, PipelineMixin))
    return [*(pipelines_of(inner) if around else []), optimizer._pipeline]


def _row(stage):
    arguments = ", ".join(f"{name}={value!r}" for name, value in stage.get_config().items())
    facts = [f"needs {need}" for need in stage.needs] + [f"gives {gift}" for gift in stage.gives]
    return stage.place, f"{name_of(stage)}({arguments})", ", ".join(facts)
