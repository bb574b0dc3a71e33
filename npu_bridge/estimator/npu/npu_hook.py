"""Defines session hooks of the documented interface."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any, TextIO

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.errors import say_once
from npu_bridge.base.held_folders import FolderHeldError
from npu_bridge.base.session_wrapper import add_engine
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals.savers import listeners_of, set_steps_per_run
from npu_bridge.estimator.npu.checks import (
    check_nonnegative_integer,
    check_output_of_tensors,
    check_positive_integer,
    check_root_rank,
)
from npu_bridge.gradients.checkpoints import remote_slots
from npu_bridge.gradients.checkpoints.rank_values import broadcastable_variables
from npu_bridge.session import (
    BackgroundSaver,
    CheckpointNotSavedError,
    HostCallHook,
    WaitForSaves,
    create_loop_variables,
    failing_if_disk_full,
    hold_model_dir,
    load_loop_variables,
    memory_checkpoints,
    remove_leftovers,
    steps_per_run,
)
from npu_bridge.session.precision.switch import ProgressVariablesHook

__all__ = [
    "NPUBroadcastGlobalVariablesHook",
    "NPUCheckpointSaverHook",
    "NPUInfeedOutfeedSessionHook",
    "NPULogOutfeedSessionHook",
    "NPUOutputTensorHook",
    "NPUShutDownHook",
    "NpuEmptyHook",
    "SetIterationsVarHook",
    "TellMeStepOrLossHook",
    "broadcast_global_variables",
]

_LOG = logger(__name__)
_RUNS_TO_WATCH = 10  # runs before the hook relies on the largest increase of the global step (our choice)


class NPUBroadcastGlobalVariablesHook(tf.estimator.SessionRunHook):
    """Broadcasts the start values of `root_rank` to all ranks.

    All global variables are sent: weights, slots, loss scale and its counters, batch statistics and `global_step`. So
    a job resumes from the checkpoint of `root_rank` on every rank, even if other ranks restored another checkpoint.
    The broadcast follows the initialisation or restore of variables, also when a session is recovered. With one rank
    the hook does nothing.

    If an `NPUDistributedOptimizer` shards the weight update, each slot goes only to the rank that owns it, and between
    steps all ranks take part in the saves of rank 0. When training ends, all ranks wait until rank 0 has saved.

    Args:
      root_rank: the rank whose values are sent; required when there are several ranks.
      index: accepted for compatibility.
    Raises:
      ValueError: there are several ranks and `root_rank` is None or not one of them.
    Ranks: collective; every rank needs this hook, with the same `root_rank`.
    """

    def __init__(self, root_rank=None, index=None):
        self._root_rank = root_rank
        self._broadcast = None
        self._remote_slots = None
        self._saves = None
        self._is_round_open = False
        check_root_rank("NPUBroadcastGlobalVariablesHook", root_rank)

    def begin(self):
        self._broadcast = broadcast_global_variables(self._root_rank) if collective.current().size > 1 else None
        self._remote_slots = remote_slots.find_remote_slots(tf.compat.v1.get_default_graph())

    def after_create_session(self, session, coord):
        if self._broadcast is not None:
            session.run(self._broadcast)
            self._saves = WaitForSaves()
            add_engine(session, self._saves)
        if self._remote_slots is not None:
            self._remote_slots.enable_request_rounds(session)

    def before_run(self, run_context):
        self._finish_open_round(run_context.session)

    def after_run(self, run_context, run_values):
        if self._remote_slots is not None:
            self._is_round_open = self._remote_slots.end_request_round(run_context.session, is_last=False)

    def end(self, session):
        self._finish_open_round(session)
        if self._saves is not None:
            self._saves.is_over = True

    def _finish_open_round(self, session):
        if self._is_round_open:
            self._is_round_open = False
            self._remote_slots.end_request_round(session, is_last=True)


class SetIterationsVarHook(tf.estimator.SessionRunHook):
    """Makes every session run that fetches `IterationOp` train several steps.

    Group the training step under this name: `tf.group(train_op, name="IterationOp")`. Input must come from `tf.data`,
    so that every step gets its own batch. Hooks run once per loop of steps: they see the last step of the loop, and a
    global step that has grown by `iterations_per_loop`. A session recovered after a failure trains in loops, too.

    Args:
      iterations_per_loop: training steps in a run, at least 1.
    Raises:
      TypeError: `iterations_per_loop` is not an int; None raises this error only when a session is created.
      ValueError: `iterations_per_loop` is below 1.
    Graph: four local variables under `npu_runconfig`.
    Ranks: local; every rank needs the same number.
    """

    def __init__(self, iterations_per_loop=None):
        if iterations_per_loop is not None:
            check_positive_integer(iterations_per_loop, "SetIterationsVarHook: iterations_per_loop")
        self._iterations_per_loop = iterations_per_loop
        self._variables = {}

    def begin(self):
        self._variables = create_loop_variables()

    def after_create_session(self, session, coord):
        check_positive_integer(self._iterations_per_loop, "SetIterationsVarHook: iterations_per_loop")
        load_loop_variables(session, self._variables, self._iterations_per_loop)


class TellMeStepOrLossHook(ProgressVariablesHook):
    """Reports the step or the loss after every run, as input to the option `accelerate_train_mode`.

    Writes the environment variables `STEP_NOW` and `TOTAL_STEP`, or `LOSS_NOW` and `TARGET_LOSS`. The option reads them
    before the next run; `end` unsets them. A training has the goal of its own hook, even if other hooks were made after
    it. A variable, such as the global step, is read after the run; any other tensor is fetched in the run. Tensors are
    looked up in `begin`, so one hook can serve several graphs in turn.

    Args:
      step: the tensor or variable that counts steps, or its name, such as "global_step:0".
      total_step: the number of steps of the whole training, an int; required for a step trigger.
      loss: the tensor of the loss, or its name.
      final_loss: the target loss of the training; required for a loss trigger.
    Raises:
      ValueError: `step` and `loss` are both None; in `begin`: the graph has no tensor of the given name.
    Ranks: local.
    """


class NPUCheckpointSaverHook(tf.estimator.CheckpointSaverHook):
    """Saves checkpoints like `tf.estimator.CheckpointSaverHook`, but training continues when the disk is full.

    If a save in the middle of training runs out of space, an error is logged, the half-written files are deleted, the
    previous checkpoint stays the latest, and the next save is tried when it is due. At the end, and when a session
    starts, the error is raised. From `begin` to `end` the folder is locked: another job cannot train there. The hook
    takes over the folder of a killed job, and deletes the files which that job left half-written. With
    `iterations_per_loop` above 1, a checkpoint that is due inside a loop is saved after the loop.

    Variables are copied to memory. A background thread writes the copy to the disk during training, and reads it back
    before an older checkpoint is removed. With `listeners`, or if memory is short, training waits for the disk. When
    `end` returns, everything is on the disk.

    Args:
      checkpoint_dir: folder of the checkpoints.
      save_secs, save_steps: seconds or global steps between checkpoints; give one of them.
      saver: the saver to use; by default the saver of `scaffold`, or else of the graph.
      checkpoint_basename: prefix of the files' names.
      scaffold: the `Scaffold` whose saver is used; not together with `saver`.
      listeners: list of `CheckpointSaverListener`, called before and after every save.
      save_graph_def: False to write neither `graph.pbtxt` nor `.meta` files.
    Raises:
      ValueError: both or neither of `save_secs` and `save_steps` are given, or both `saver` and `scaffold` are given.
      OSError: at the start or the end: the disk is full.
      ModelDirInUseError: (a RuntimeError) at the start: another job trains in the folder.
    Ranks: local; give this hook to rank 0 only. `NPUEstimator` does so with the intervals of its `NPURunConfig`.
    """

    holds_its_folder = True  # for `hold_for_saver_hooks`

    def __init__(
        self,
        checkpoint_dir,
        save_secs=None,
        save_steps=None,
        saver=None,
        checkpoint_basename="model.ckpt",
        scaffold=None,
        listeners=None,
        save_graph_def=True,
    ):
        folder = checkpoint_dir and os.fspath(checkpoint_dir)
        super().__init__(folder, save_secs, save_steps, saver, checkpoint_basename, scaffold, listeners, save_graph_def)
        self._checkpoint_basename, self._has_failed_save = checkpoint_basename, False
        # Requests the stop that a listener wants; `stop_ranks_together` replaces it.
        self.pass_on_request = tf.estimator.SessionRunContext.request_stop
        self._hold = self._release = self._background = None

    def begin(self):
        self.release_folder()
        self._runs, self._last_global_step = 0, None
        self._largest_increase = 0  # of the global step in a run
        copies, self._hold = memory_checkpoints(self._checkpoint_dir), hold_model_dir(self._checkpoint_dir)
        self._background = BackgroundSaver(copies, self._hold)
        # `end` is not called after an error. A thread that still writes keeps its saver, and so the folder.
        self._release = weakref.finalize(self._background, self._hold.release)
        if self._hold.has_taken_over:
            remove_leftovers(self._checkpoint_dir, self._checkpoint_basename)
        super().begin()

    def after_create_session(self, session, coord):
        with failing_if_disk_full(os.path.join(self._checkpoint_dir, "graph.pbtxt")):
            super().after_create_session(session, coord)
        self._background.waits = bool(listeners_of(self))

    def after_run(self, run_context, run_values):
        self._set_expected_steps_per_run(run_values.results, run_context.session)
        self._tolerate_failed_save(self._background.raise_write_error)
        own = tf.estimator.SessionRunContext(run_context.original_args, run_context.session)
        self._tolerate_failed_save(super().after_run, own, run_values)
        if own.stop_requested:
            self.pass_on_request(run_context)

    def _tolerate_failed_save(self, action, *arguments):
        try:
            action(*arguments)
        except CheckpointNotSavedError as error:
            self._has_failed_save = True
            _LOG.error("%s Training continues.", error)

    def _set_expected_steps_per_run(self, step, session):
        """Makes the base class read the global step, which takes a separate run, only when a checkpoint can be due.

        By default the base class expects up to a million steps in a run, and so reads after every run. A value fetched
        with a run can be older or newer than the run's update, so this method allows for twice the largest increase.
        """
        self._runs += 1
        if self._last_global_step is not None:
            self._largest_increase = max(self._largest_increase, int(step) - self._last_global_step)
        self._last_global_step = int(step)
        if self._runs > _RUNS_TO_WATCH:
            set_steps_per_run(self, 2 * max(self._largest_increase, steps_per_run(session)))

    def end(self, session):
        self._background.waits = True
        self._tolerate_failed_save(self._background.wait)
        if self._has_failed_save:
            self._timer.reset()  # otherwise a checkpoint of this step would count as saved
        super().end(session)
        self.release_folder()

    def release_folder(self):
        """Waits for the last save and releases the folder, for callers that stop at an error without calling `end`."""
        if self._release is not None:
            try:
                self._background.wait()
            except (CheckpointNotSavedError, FolderHeldError) as error:
                _LOG.error("%s", error)
            self._release()

    def _save(self, session, step):
        should_stop = super()._save(session, step)
        self._has_failed_save = False
        return should_stop

    def _get_saver(self):
        saver = super()._get_saver()
        return saver and self._background.use_saver(saver)


class NPUOutputTensorHook(tf.estimator.LoggingTensorHook):
    """Collects tensors of every run and passes them to a function, several runs at a time.

    The function gets a list with one dict, of values by tag, for each run since the previous call. The list is emptied
    when the function returns, so copy the values to keep.

    Args:
      tensors: dict from tag to tensor or tensor name, or a list of tensors or names, which serve as tags, too. None
        collects nothing.
      dependencies: an operator or tensor, or a list of them, that runs before the tensors are read. With it,
        `tensors` must be a dict of tensors.
      output_fn: function of the list; required with `tensors`.
      output_every_n_steps: session runs between two calls; 0 for one call at the end. The remaining runs are passed on
        at the end. Of a run of several steps (`iterations_per_loop`), only the last step is seen.
    Raises:
      ValueError: `output_fn` is missing, or `output_every_n_steps` is below 0.
      TypeError: `output_every_n_steps` is not an int, or `dependencies` is given and `tensors` is not a dict of
        tensors.
    Graph: with `dependencies`, an identity of each tensor.
    Ranks: local.
    """

    def __init__(self, tensors, dependencies=None, output_fn=None, output_every_n_steps=0):
        check_nonnegative_integer(output_every_n_steps, "NPUOutputTensorHook: output_every_n_steps")
        check_output_of_tensors(tensors, dependencies, output_fn)
        if tensors is not None and dependencies is not None:
            with tf.control_dependencies(dependencies if isinstance(dependencies, (list, tuple)) else [dependencies]):
                tensors = {tag: tf.identity(tensor) for tag, tensor in tensors.items()}
        super().__init__({} if tensors is None else tensors, every_n_iter=1)
        self._output_fn = output_fn
        self._output_every_n_steps = output_every_n_steps
        self._outputs = []

    def begin(self):
        super().begin()
        self._outputs.clear()

    def before_run(self, run_context):
        return tf.estimator.SessionRunArgs(self._current_tensors) if self._current_tensors else None

    def after_run(self, run_context, run_values):
        if not self._current_tensors:
            return
        self._iter_count += 1
        self._outputs.append(run_values.results)
        if self._output_every_n_steps and self._iter_count % self._output_every_n_steps == 0:
            self._call_output_fn()

    def end(self, session):
        if self._outputs:
            self._call_output_fn()

    def _call_output_fn(self):
        self._output_fn(self._outputs)
        self._outputs.clear()


class NpuEmptyHook(tf.estimator.SessionRunHook):
    """A hook that does nothing, for code that needs a hook in either branch of a condition."""


class NPUInfeedOutfeedSessionHook(HostCallHook):
    """Runs operators in every session run, and opens and flushes the summary writers of the graph.

    `NPUEstimator` makes one such hook for the `host_call` of an `NPUEstimatorSpec`. On the NPU stack a thread fetches
    the output of the device; here the operators run in the training step.

    Args:
      dequeue_ops: operator or tensor, or a list of them.
      channel_name: accepted for compatibility.
    Ranks: local.
    """

    def __init__(self, dequeue_ops: Any, channel_name: str):
        super().__init__()
        self._dequeue_ops = dequeue_ops

    def before_run(self, run_context):
        return tf.estimator.SessionRunArgs(self._dequeue_ops)


class NPULogOutfeedSessionHook(tf.estimator.SessionRunHook):
    """Has no effect here, because `tf.print` writes to standard error; on the NPU stack it prints output of the device.

    Args:
      output_stream: accepted for compatibility.
    Ranks: local.
    """

    def __init__(self, output_stream: str | TextIO):
        say_once(logging.INFO, "NPULogOutfeedSessionHook has no effect: tf.print writes to standard error by itself.")


class NPUShutDownHook(tf.estimator.SessionRunHook):
    """Has no effect here; on the NPU stack the hook shuts the device down when the session ends.

    Args:
      scaffold: accepted for compatibility.
    Ranks: local.
    """

    def __init__(self, scaffold: tf.compat.v1.train.Scaffold | None = None):
        self._scaffold = scaffold


def broadcast_global_variables(root_rank):
    """Broadcasts the values of all global variables of the default graph from `root_rank` to all ranks.

    Args:
      root_rank: the rank whose values are sent; must be 0 if weight updates are sharded.
    Returns:
      The op to run after the variables are initialised; None in eager execution.
    Ranks: collective.
    """
    variables = broadcastable_variables(tf.compat.v1.global_variables())
    return remote_slots.broadcast_with_slots(variables, collective.current(), root_rank)
