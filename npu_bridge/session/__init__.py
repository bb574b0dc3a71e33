"""Gives sessions of stock TensorFlow what options ask for: one file for each option or group of options.

Everything here takes `TrainingOptions` and nothing else: never a config object, never an environment variable
of its own. `effects.py` is where others come in: settings for a session, hooks for its runs, settings of a graph. A
hook from here serves an Estimator, a `MonitoredTrainingSession` and a plain `Session` alike.
"""

from npu_bridge.session.checkpoints import (
    CarefulSaver,
    CheckpointNotSavedError,
    ModelDirInUseError,
    hold_model_dir,
    remove_leftovers,
    space_for,
)
from npu_bridge.session.damaged_checkpoints import DamagedCheckpointError, check_checkpoint, check_newest_checkpoint
from npu_bridge.session.effects import (
    close_hooks,
    has_entry,
    hooks_for,
    placed_softly,
    prepare_graph,
    prepare_session_config,
    settle_session,
)
from npu_bridge.session.end_together import EndTogether
from npu_bridge.session.end_together_keras import EndTogetherCallback
from npu_bridge.session.hooked_session import run_with_hooks
from npu_bridge.session.host_call import HostCallHook, call_on_host, check_host_call
from npu_bridge.session.iterations import name_step, steps_per_run, train_in_loops
from npu_bridge.session.job_start import choose_start
from npu_bridge.session.loop_variables import create_loop_variables, load_loop_variables, loop_variable

__all__ = [
    "CarefulSaver",
    "CheckpointNotSavedError",
    "DamagedCheckpointError",
    "EndTogether",
    "EndTogetherCallback",
    "HostCallHook",
    "ModelDirInUseError",
    "call_on_host",
    "check_checkpoint",
    "check_host_call",
    "check_newest_checkpoint",
    "choose_start",
    "close_hooks",
    "create_loop_variables",
    "has_entry",
    "hold_model_dir",
    "hooks_for",
    "load_loop_variables",
    "loop_variable",
    "name_step",
    "placed_softly",
    "prepare_graph",
    "prepare_session_config",
    "remove_leftovers",
    "run_with_hooks",
    "settle_session",
    "space_for",
    "steps_per_run",
    "train_in_loops",
]
