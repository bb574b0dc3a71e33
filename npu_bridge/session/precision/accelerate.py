"""`accelerate_train_mode`: computes when the low-precision part of a training ends. Does not import TensorFlow.

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


class TrainingProgress(NamedTuple):
    """The progress of a training, in steps or as a loss, depending on the trigger.

    Attributes:
      goal: total number of steps, or the target loss.
      now: number of steps done, or the latest loss; 0.0 if no loss has been reported yet.
    """

    goal: float
    now: float


class SwitchDecision(NamedTuple):
    """The decision, made before a run, whether to switch to the original precision.

    Attributes:
      runs_left: number of runs, including this one, that surely stay in low precision; 0 means switch now.
      is_expected: whether a switch now comes exactly at the threshold; always True for loss triggers.
    """

    runs_left: int
    is_expected: bool = True


def parse_progress(trigger: str, goal_text: str | None, present_text: str | None) -> TrainingProgress:
    """Parses the two environment variables of a trigger: its goal, and the present step or loss.

    A text is None if its variable is unset.

    Raises:
      ValueError: a variable is unset or not a number of the right kind; the goal is checked first.
    """
    goal_name, now_name = VARIABLES[trigger]
    read = _parse_step if trigger == "step" else _parse_loss
    return TrainingProgress(read(goal_name, goal_text), read(now_name, present_text))


def step_threshold(total_steps: int, ratio: float) -> int:
    """Returns the step at which the original precision begins: total_steps * ratio in float32, truncated."""
    return int(np.float32(total_steps) * np.float32(ratio))


def loss_threshold(target_loss: float, ratio: float) -> np.float32:
    """Returns the loss at or below which the original precision begins: target_loss * ratio in float32."""
    with np.errstate(over="ignore"):
        return np.float32(target_loss) * np.float32(ratio)


def decide_switch(plan: AccelerateTrainMode, progress: TrainingProgress, steps_per_run: int = 1) -> SwitchDecision:
    """Decides whether the switch to the original precision is due before a run that starts at `progress`.

    With a step trigger the switch is due when the threshold is reached, or before the last run, which must use the
    original precision. With a loss trigger the switch is due when a reported loss is at most the threshold, so never
    for NaN.
    """
    if plan.trigger == "loss":
        return SwitchDecision(0 if _is_loss_reached(plan, progress) else 1)
    step, total = int(progress.now), int(progress.goal)
    threshold = step_threshold(total, plan.ratio)
    if step >= threshold or step + steps_per_run >= total:
        return SwitchDecision(0, is_expected=step == threshold)
    to_threshold = -(-(threshold - step) // steps_per_run)
    to_last_run = -(-(total - steps_per_run - step) // steps_per_run)
    return SwitchDecision(min(to_threshold, to_last_run))


def describe_plan(
    plan: AccelerateTrainMode, progress: TrainingProgress, steps_per_run: int, original: str, low: str | None = None
) -> str:
    """Returns a line of text: which steps of a training that starts at `progress` run in which precision.

    Args:
      original: the precision after the switch, such as "float32".
      low: the low precision, such as "bfloat16, imitated"; the plan's dtype by default.
    """
    low = (low or plan.low_dtype).replace(", imitated", " (imitated)")
    if plan.trigger == "loss":
        threshold = loss_threshold(progress.goal, plan.ratio)
        return f"{low} until the loss is at most {threshold:g}, then {original}"
    start, total = int(progress.now), int(progress.goal)
    first = start + steps_per_run  # the first run is never judged
    switch = first + steps_per_run * decide_switch(plan, TrainingProgress(total, first), steps_per_run).runs_left
    if switch >= total:
        return f"steps {start}-{max(total, switch) - 1} in {low}: there is no run after the first to switch at"
    return f"steps {start}-{switch - 1} in {low}, {switch}-{total - 1} in {original}"


def _is_loss_reached(plan: AccelerateTrainMode, progress: TrainingProgress) -> bool:
    with np.errstate(over="ignore"):
        loss = np.float32(progress.now)
    return bool(loss != 0 and loss <= loss_threshold(progress.goal, plan.ratio))


def _parse_step(name: str, text: str | None) -> int:
    found = _WHOLE.fullmatch(text or "")
    if not found or int(found.group(1)) > _LARGEST_STEP:
        raise _usage_error(name, f"a whole number from 0 to {_LARGEST_STEP}", text, "total_step and step")
    return int(found.group(1))


def _parse_loss(name: str, text: str | None) -> float:
    try:
        if "_" in (text or ""):
            raise ValueError
        return float(text or "")
    except ValueError:
        raise _usage_error(name, "a number", text, "final_loss and loss") from None


def _usage_error(name: str, expected: str, text: str | None, arguments: str) -> ValueError:
    problem = f"accelerate_train_mode needs {name}" if text is None else f"{name} is not usable"
    got = "nothing" if text is None else repr(text)
    fix = f"Give {arguments} to TellMeStepOrLossHook, or set the variable before the first step."
    return ValueError(message("environment", problem, expected, got, fix))
