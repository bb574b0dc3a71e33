"""Reports on a training run: progress line, history file, page, picture, curves, timeline and summary.

Names are imported on first use, as pictures and files can also be made without TensorFlow.
"""

from npu_bridge.base.lazy import lazy_getattr

_PLACES = {
    "collapse_hook": ("LossScaleCollapseError", "LossScaleCollapseHook", "NanLossHook"),
    "history": ("Comparison", "Evaluation", "History", "SessionFacts", "SessionStart", "StepRow"),
    "history_hook": ("HistoryHook",),
    "evaluation": ("BatchesHook", "report_evaluation"),
    "errors": ("MissingExtraError",),
    "metric_writers": ("CsvWriter", "MlflowWriter", "WandbWriter"),
    "metrics": ("MetricsCallback", "MetricsHook"),
    "page.curves": ("smooth",),
    "picture": ("draw_training",),
    "progress_hook": ("ProgressHook",),
    "progress_line": ("Progress", "format_progress"),
    "report_hook": ("ReportCallback", "ReportHook", "places_of_ranks"),
    "step_hook": ("Observation", "StepHook"),
    "straggler_callback": ("StragglerCallback",),
    "straggler_hook": ("StragglerHook",),
    "tensorboard": ("TensorBoardCallback", "TensorBoardHook"),
    "summary": ("Summary", "format_summary", "summarize"),
}

__all__ = sorted(name for names in _PLACES.values() for name in names)
__getattr__ = lazy_getattr(
    __name__, {name: f"{__name__}.{module}:{name}" for module, names in _PLACES.items() for name in names}
)
