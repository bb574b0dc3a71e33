"""What people see of a training run: a progress line, a history, a picture and a short summary."""

from npu_bridge.reporting.collapse_hook import LossScaleCollapseError, LossScaleCollapseHook, NanLossHook
from npu_bridge.reporting.history import History, SessionStart, StepRow
from npu_bridge.reporting.history_hook import HistoryHook
from npu_bridge.reporting.picture import MissingExtraError, draw_training, smooth
from npu_bridge.reporting.progress_hook import ProgressHook
from npu_bridge.reporting.progress_line import Progress, format_progress
from npu_bridge.reporting.run_description import describe_run
from npu_bridge.reporting.step_hook import Observation, StepHook
from npu_bridge.reporting.summary import Summary, format_summary, summarize, write_summary

__all__ = [
    "History",
    "HistoryHook",
    "LossScaleCollapseError",
    "LossScaleCollapseHook",
    "MissingExtraError",
    "NanLossHook",
    "Observation",
    "Progress",
    "ProgressHook",
    "SessionStart",
    "StepHook",
    "StepRow",
    "Summary",
    "describe_run",
    "draw_training",
    "format_progress",
    "format_summary",
    "smooth",
    "summarize",
    "write_summary",
]
