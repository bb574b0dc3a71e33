"""Formats the progress line of a training. It only makes text, without TensorFlow, clock or terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from npu_bridge.reporting.history import Evaluation

_SEPARATOR = " | "


class Progress(NamedTuple):
    """The content of a progress line; a part whose value is None is left out.

    Attributes:
      step: updates so far, including those of earlier sessions.
      total_steps: updates of the whole run.
      loss: the unscaled loss of the latest step.
      loss_scale: the loss scale of the latest step; None if the loss is not scaled.
      skipped_steps: number of updates that were skipped because gradients overflowed.
      steps_per_sec: steps tried per second, including skipped steps.
      precision: dtype of the latest step, such as "float16".
      learning_rate: learning rate of the latest step.
      samples_per_sec: samples per second of all ranks together.
      slow: a few words that name the slow ranks.
    """

    step: int
    total_steps: int | None = None
    loss: float | None = None
    loss_scale: float | None = None
    skipped_steps: int = 0
    steps_per_sec: float | None = None
    precision: str | None = None
    learning_rate: float | None = None
    samples_per_sec: float | None = None
    slow: str | None = None


def format_progress(progress: Progress, width: int | None = None) -> str:
    """Formats the line, such as `step 120/300 (40 %) | loss 5.8123 | loss scale 2^16 | skipped 3 steps | ...`.

    Args:
      progress: the values to show.
      width: largest number of characters. Whole parts are left out until the line fits: first the learning rate, then
        the loss scale. The remaining time stays, and is cut if the line is still too long.
    """
    parts = _make_parts(progress)
    for name in _DROPPED_FIRST:
        if width is None or len(_join_parts(parts)) <= width:
            break
        if name == "share":
            parts["position"] = parts["position"].partition(" (")[0]
        elif len(parts) > 1:
            parts.pop(name, None)
    return _join_parts(parts)[:width]


# Parts that a narrow window leaves out, in this order.
_DROPPED_FIRST = (
    "rate",
    "scale",
    "precision",
    "no skips",
    "samples",
    "speed",
    "slow",
    "skipped",
    "share",
    "loss",
    "position",
)


def _make_parts(progress: Progress) -> dict[str, str]:
    """Returns the parts of the line by name, in their order."""
    parts = {"position": _format_position(progress)}
    if progress.precision is not None:
        parts["precision"] = progress.precision
    if progress.loss is not None:
        parts["loss"] = f"loss {format_loss(progress.loss)}"
    if progress.learning_rate is not None:
        parts["rate"] = f"learning rate {progress.learning_rate:.4g}"
    if progress.loss_scale is not None:
        parts["scale"] = f"loss scale {format_scale(progress.loss_scale)}"
    if progress.loss_scale is not None or progress.skipped_steps:
        parts["skipped" if progress.skipped_steps else "no skips"] = f"skipped {format_steps(progress.skipped_steps)}"
    if progress.slow is not None:
        parts["slow"] = progress.slow
    if progress.steps_per_sec:
        parts["speed"] = f"{format_rate(progress.steps_per_sec)} steps/s"
        if progress.samples_per_sec:
            parts["samples"] = f"{format_rate(progress.samples_per_sec)} samples/s"
        if progress.total_steps is not None:
            left = max(progress.total_steps - progress.step, 0)
            parts["left"] = f"ETA {format_duration(left / progress.steps_per_sec)}"
    return parts


def _join_parts(parts: dict[str, str]) -> str:
    return _SEPARATOR.join(parts.values())


def format_start(first_step: int, total_steps: int | None, folder: str) -> str:
    """Formats the first line of a training that finds a checkpoint: where it resumes, or that nothing is left to do."""
    if total_steps is None or first_step < total_steps:
        return f"resuming from step {first_step}, saved in {folder}"
    fix = f"max_steps={2 * total_steps} or another model_dir"
    return f"already at step {first_step} of {total_steps}: nothing to do; to train further, use {fix}"


def format_skip_note(loss_scale: float | None) -> str:
    """Formats the line for the first skipped step. An overflow is normal while a dynamic loss scale finds its level."""
    if loss_scale is None:
        return "step skipped: gradients were not finite"
    return (
        f"step skipped: gradients overflowed at loss scale {format_scale(loss_scale)}; "
        "normal while a dynamic scale settles"
    )


def format_evaluation(evaluation: Evaluation, width: int | None = None) -> str:
    """Formats an evaluation, such as `evaluation at step 200 | loss 5.5200 | accuracy 0.73 | 12 batches in 1.4 s`.

    The loss comes first, then the other metrics in alphabetical order. Text that is longer than `width` gets further
    lines.
    """
    name = f" {evaluation.name!r}" if evaluation.name else ""
    metrics = sorted(evaluation.metrics.items(), key=lambda metric: (metric[0] != "loss", metric[0]))
    parts = [f"evaluation{name} at step {evaluation.step}"]
    parts += [f"{metric} {format_loss(one) if metric == 'loss' else f'{one:.5g}'}" for metric, one in metrics]
    if evaluation.batches is not None and evaluation.secs is not None:
        count = f"{evaluation.batches} batch{'' if evaluation.batches == 1 else 'es'}"
        parts.append(f"{count} in {format_secs(evaluation.secs)}")
    return wrap_parts(parts, width)


def wrap_parts(parts: Sequence[str], width: int | None = None, separator: str = _SEPARATOR) -> str:
    """Joins parts into one line, or into several lines of which all but the first are indented."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]}{separator}{part}"
        if width is None or len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(f"  {part}")
    return "\n".join(lines)


def format_secs(secs: float) -> str:
    """Formats a short time, such as `0.84 ms`, `98 ms` or `1.4 s`; times from 60 s as in `format_duration`."""
    if secs >= 60:
        return format_duration(secs)
    number, unit = (secs, "s") if secs >= 0.9995 else (secs * 1000, "ms")
    return f"{number:.0f} {unit}" if number >= 99.5 else f"{number:.2g} {unit}"


def format_loss(loss: float) -> str:
    """Formats a loss with five significant digits, or as `nan` or `inf`."""
    return f"{loss:#.5g}" if math.isfinite(loss) else str(float(loss))


def format_scale(scale: float) -> str:
    """Formats a power of two from 1024 on as a power (`2^16`), any other loss scale as a plain number."""
    mantissa, exponent = math.frexp(scale) if math.isfinite(scale) else (0.0, 0)
    if mantissa == 0.5 and exponent > 10:
        return f"2^{exponent - 1}"
    return f"{scale:.6g}"


def format_steps(count: int) -> str:
    """Formats a number of steps, such as `1 step` or `2 steps`."""
    return format_count(count, "step")


def format_count(count: int, thing: str) -> str:
    """Formats a number of things, such as `1 rank` or `2 ranks`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def format_rate(rate: float) -> str:
    """Formats a rate with three significant digits, never in exponent form."""
    if rate >= 100:
        return f"{rate:.0f}"
    return f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"


def format_duration(secs: float) -> str:
    """Formats a time in its two largest units, such as `42 s`, `3 min 05 s`, `2 h 04 min` or `1 d 06 h`."""
    whole = int(round(secs))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def _format_position(progress: Progress) -> str:
    if progress.total_steps is None:
        return f"step {progress.step}"
    # Rounded down, so that 100 % means finished.
    share = 100 * progress.step // progress.total_steps if progress.total_steps else 100
    return f"step {progress.step}/{progress.total_steps} ({min(share, 100)} %)"
