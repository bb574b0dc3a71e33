"""`accelerate_train_mode`: computes at which step the low-precision part of a training ends, without TensorFlow.

All arithmetic is float32, rounded after each operation, as on the NPU stack: in double precision some thresholds
would be one step off.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from npu_bridge.base.errors import message
from npu_bridge.options.grammar import AccelerateTrainMode

# The variables a trigger reads: its goal, and the value reached so far. Checked in this order.
VARIABLES = {"step": ("TOTAL_STEP", "STEP_NOW"), "loss": ("TARGET_LOSS", "LOSS_NOW")}
_WHOLE = re.compile(r"\s*([0-9]+)\s*")
_LARGEST_STEP = 2**32 - 1


class Progress(NamedTuple):
    """The progress of a training, in the terms of its trigger.

    Attributes:
      goal: total steps, or the target loss.
      now: steps done, or the loss; a loss of 0.0 is not reported yet.
    """

    goal: float
    now: float


class Verdict(NamedTuple):
    """The decision of a plan before a run.

    Attributes:
      runs_left: runs that surely stay in low precision, this one included; 0 means switch now.
      is_expected: whether the switch comes exactly at the threshold; always True for loss triggers.
    """

    runs_left: int
    is_expected: bool = True


def read_progress(trigger: str, goal_text: str | None, now_text: str | None) -> Progress:
    """Reads the texts of the two variables of a trigger, "step" or "loss"; None for one that is unset.

    Raises:
      ValueError: one is unset or is not a number of the right kind; the goal is checked first.
    """
    goal_name, now_name = VARIABLES[trigger]
    read = _whole_number if trigger == "step" else _number
    return Progress(read(goal_name, goal_text), read(now_name, now_text))


def step_threshold(total_steps: int, ratio: float) -> int:
    """Returns the step at which the original precision begins: total_steps * ratio in float32, truncated."""
    return int(np.float32(total_steps) * np.float32(ratio))


def loss_threshold(target_loss: float, ratio: float) -> np.float32:
    """Returns the loss at or below which the original precision begins: target_loss * ratio in float32."""
    with np.errstate(over="ignore"):
        return np.float32(target_loss) * np.float32(ratio)


def judge(plan: AccelerateTrainMode, progress: Progress, steps_per_run: int = 1) -> Verdict:
    """Decides whether the switch is due before a run that starts at `progress`.

    By step: when the threshold is reached, or when this run is the last one, which must run in the original
    precision. By loss: when a reported loss is at most the threshold; never for NaN.
    """
    if plan.trigger == "loss":
        return Verdict(0 if _loss_is_reached(plan, progress) else 1)
    step, total = int(progress.now), int(progress.goal)
    threshold = step_threshold(total, plan.ratio)
    if step >= threshold or step + steps_per_run >= total:
        return Verdict(0, is_expected=step == threshold)
    to_threshold = -(-(threshold - step) // steps_per_run)
    to_last_run = -(-(total - steps_per_run - step) // steps_per_run)
    return Verdict(min(to_threshold, to_last_run))


def describe(
    plan: AccelerateTrainMode, progress: Progress, steps_per_run: int, original: str, low: str | None = None
) -> str:
    """Says in one line which part of a training that starts at `progress` runs in which precision.

    Args:
      original: the precision after the switch, such as "float32".
      low: the low precision, such as "bfloat16, imitated"; the plan's dtype by default.
    """
    low = low or plan.low_dtype
    if plan.trigger == "loss":
        threshold = loss_threshold(progress.goal, plan.ratio)
        return f"{low} until the loss is at most {threshold:g}, then {original}"
    start, total = int(progress.now), int(progress.goal)
    first = start + steps_per_run  # the first run is never judged
    switch = first + steps_per_run * judge(plan, Progress(total, first), steps_per_run).runs_left
    if switch >= total:
        return f"steps {start}-{max(total, switch) - 1} in {low}: there is no run after the first to switch at"
    return f"steps {start}-{switch - 1} in {low}, {switch}-{total - 1} in {original}"


def _loss_is_reached(plan: AccelerateTrainMode, progress: Progress) -> bool:
    with np.errstate(over="ignore"):
        loss = np.float32(progress.now)
    return bool(loss != 0 and loss <= loss_threshold(progress.goal, plan.ratio))


def _whole_number(name: str, text: str | None) -> int:
    found = _WHOLE.fullmatch(text or "")
    if not found or int(found.group(1)) > _LARGEST_STEP:
        raise _error(name, f"a whole number from 0 to {_LARGEST_STEP}", text, "total_step and step")
    return int(found.group(1))


def _number(name: str, text: str | None) -> float:
    try:
        if "_" in (text or ""):
            raise ValueError
        return float(text or "")
    except ValueError:
        raise _error(name, "a number", text, "final_loss and loss") from None


def _error(name: str, expected: str, text: str | None, arguments: str) -> ValueError:
    problem = f"accelerate_train_mode needs {name}" if text is None else f"{name} is not usable"
    got = "nothing" if text is None else repr(text)
    fix = f"Give {arguments} to TellMeStepOrLossHook, or set the variable before the first step."
    return ValueError(message("environment", problem, expected, got, fix))
