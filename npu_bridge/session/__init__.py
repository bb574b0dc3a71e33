"""Applies options to sessions of stock TensorFlow, with one file for each option or group of options.

Every module takes `TrainingOptions`, and reads no config object or environment variable of its own. Other packages use
`effects.py`, which gives settings for a session, hooks for its runs and settings of a graph. The hooks work in an
Estimator, a `MonitoredTrainingSession` and a plain `Session`.
"""

from npu_bridge.base.lazy import lazy_getattr

_PLACES = {
    "average_metrics": ("AverageMetricsCallback",),
    "best_checkpoint": ("BestCheckpoint",),
    "checkpoints": (
        "CarefulSaver",
        "CheckpointNotSavedError",
        "ModelDirInUseError",
        "WaitForSaves",
        "hold_for_saver_hooks",
        "hold_model_dir",
        "remove_leftovers",
        "failing_if_disk_full",
        "watch_savers",
    ),
    "damaged_checkpoints": (
        "DamagedCheckpointError",
        "check_checkpoint",
        "check_newest_checkpoint",
        "mismatches_explained",
    ),
    "effects": (
        "close_hooks",
        "has_optimizer_entry",
        "hooks_for",
        "placed_softly",
        "prepare_graph",
        "prepare_session_config",
        "apply_determinism",
    ),
    "elastic.background_saves": ("BackgroundSaver",),
    "elastic.global_batches": ("GlobalBatches", "updates_dealt"),
    "elastic.memory_checkpoints": ("memory_checkpoints", "take_memory_checkpoint"),
    "elastic.memory_hook": ("MemoryCheckpointHook",),
    "elastic.resumable_loop": ("ResumableLoop",),
    "elastic.resume_callback": ("ResumeCallback",),
    "elastic.stop_hook": ("StopHook",),
    "end_together": ("EndTogether",),
    "end_together_keras": ("EndTogetherCallback",),
    "hooked_session": ("run_with_hooks",),
    "host_call": ("HostCallHook", "call_on_host", "check_host_call"),
    "iterations": ("name_step", "steps_per_run", "train_in_loops"),
    "job_start": ("choose_start",),
    "loop_variables": ("create_loop_variables", "load_loop_variables", "loop_variable"),
    "stop_together": ("StopTogether",),
}

__all__ = sorted(name for names in _PLACES.values() for name in names)
__getattr__ = lazy_getattr(
    __name__, {name: f"{__name__}.{module}:{name}" for module, names in _PLACES.items() for name in names}
)
