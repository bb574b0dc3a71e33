"""Defines `NPUEstimator`, which trains with hooks in their order, and resumes from the newest intact checkpoint."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
import weakref

import tensorflow as tf

from npu_bridge import collective, session
from npu_bridge.base.errors import message, shown
from npu_bridge.base.files import temporary_folder
from npu_bridge.base.terminal import logger
from npu_bridge.collective import wire_names
from npu_bridge.collective.small_values import gather_values
from npu_bridge.estimator.npu.checks import (
    LoopStepsHook,
    accept_tpu_keywords,
    check_model_dir,
    describe_npu_config_fix,
    resolve_model_dir,
)
from npu_bridge.estimator.npu.model_fn import NPUEstimatorSpec, wrap_model_fn
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_hook import (
    NPUBroadcastGlobalVariablesHook,
    NPUCheckpointSaverHook,
    SetIterationsVarHook,
)
from npu_bridge.gradients.checkpoints.resuming import remove_missing_state
from npu_bridge.gradients.checkpoints.sync import SyncBeforeSavingHook
from npu_bridge.options import announce_ineffective_options, read_job_start, read_run_config
from npu_bridge.reporting import (
    HistoryHook,
    LossScaleCollapseHook,
    MetricsHook,
    NanLossHook,
    ProgressHook,
    ReportHook,
    StragglerHook,
    TensorBoardHook,
)
from npu_bridge.reporting.evaluation import BatchesHook, report_evaluation
from npu_bridge.reporting.event_files import BeginEventsHook
from npu_bridge.reporting.failure_hook import FailureHook
from npu_bridge.reporting.output import choose_output
from npu_bridge.reporting.progress_line import format_start
from npu_bridge.reporting.report_hook import places_of_ranks
from npu_bridge.session.devices import provide_cpu_devices
from npu_bridge.session.precision import Precision, PrecisionHook, PrecisionSummaryHook
from npu_bridge.session.stop_together import stop_ranks_together

__all__ = ["NPUEstimator", "NPUEstimatorSpec"]

_LOG = logger(__name__)
# Estimators made from a Keras model have object-based checkpoints, with the step under the second name.
_STEP_NAMES = (tf.compat.v1.GraphKeys.GLOBAL_STEP, "estimator_global_step/.ATTRIBUTES/VARIABLE_VALUE")


class NPUEstimator(tf.estimator.Estimator):
    """An `Estimator` that takes an `NPURunConfig` and starts all ranks with the same variables.

    With several ranks, each training begins with a broadcast of rank 0's variables, unless
    `NPURunConfig(horovod_mode=True)` leaves the broadcast to the script. All ranks take the step reached so far from
    rank 0's checkpoint, so that they stop together.

    If `log_step_count_steps` of the `NPURunConfig` is set, every rank logs its loss at this interval, and a
    `StragglerHook` on all ranks names slow ranks. Rank 0 shows progress on standard error (`ProgressHook`), writes
    curves (`TensorBoardHook`, at least every `save_summary_steps`, if set), writes the page `report.html` and a summary
    (`ReportHook`), and reports each evaluation in a line. Also without this option, a `LossScaleCollapseHook` ends a
    training that only skips steps. Hooks of these classes that you pass replace the default ones.

    Rank 0 saves with an `NPUCheckpointSaverHook`, after a `SyncBeforeSavingHook` on all ranks, unless the hooks contain
    a saver. If checkpoints are saved and the job is asked to stop, the training ends after a whole step (`StopHook`),
    and the process exits with code 75. With an `EndTogether` (of `npu_bridge.session`) among the hooks of `train`,
    ranks with unequal numbers of batches end together.

    Session options (dumps, a profile, determinism, the GPU to use) apply to training, evaluation and prediction. Only
    rank 0 exports to the given folder. On other ranks the export methods return a temporary folder, which lasts as long
    as the estimator.

    Args:
      model_fn: function of `features` and, optionally, `labels`, `mode`, `params`, `config`.
      model_dir: folder of checkpoints and summaries; by default `config.model_dir`. Without both, a new folder in the
        working directory, named `model_dir_` and ten random characters.
      config: an `NPURunConfig`.
      params: dict passed to `model_fn`.
      job_start_file: JSON file of the job. Only its `local_checkpoint_dir` is read; the launcher defines the ranks.
      warm_start_from: as in `tf.estimator.Estimator`. By default the checkpoint that `job_start_file` names; without
        such a file, the checkpoint in the environment variable `LOCAL_CHECKPOINT_DIR`, else in `RESTORE_FROM`.
      **tpu_arguments: arguments of a `TPUEstimator`, such as `use_tpu` and `train_batch_size`; they have no effect and
        cause a warning.
    Raises:
      ValueError: `config` is not an `NPURunConfig`, `model_fn` is None or takes other arguments, the two model
        folders differ, `job_start_file` is malformed, or the checkpoint for the warm start does not exist.
      TypeError: a number in `job_start_file` is not an int.
      RuntimeError: `job_start_file` is for another number of ranks.
    Ranks: local; make all Estimators and optimizers on every rank, in the same order.
    """

    def __init__(
        self,
        model_fn=None,
        model_dir=None,
        config=None,
        params=None,
        job_start_file="",
        warm_start_from=None,
        **tpu_arguments,
    ):
        accept_tpu_keywords(tpu_arguments)
        if not isinstance(config, NPURunConfig):
            problem, got = "config is not an NPURunConfig", shown(config)
            raise ValueError(message("NPUEstimator", problem, "an NPURunConfig", got, describe_npu_config_fix(config)))
        if model_fn is None:
            expected = "a function that returns an EstimatorSpec"
            raise ValueError(message("NPUEstimator", "model_fn is missing", expected, "None", "Pass model_fn."))
        options = read_run_config(config)
        precision = Precision(options)
        warm_start_from = session.choose_start(warm_start_from, read_job_start(job_start_file))
        super().__init__(
            model_fn=wrap_model_fn(model_fn, options, has_params=params is not None),
            model_dir=resolve_model_dir(model_dir, config),
            config=config,
            params=params or {},
            warm_start_from=warm_start_from,
        )
        self._options = options
        self._transfers = wire_names.CollectivesOwner()
        self._as_given = config.replace(model_dir=self.model_dir)  # without the session settings of the base class
        self._precision = precision
        self._has_trained = self._has_ended = False
        self._history = None  # history of the latest training
        self._timed, self._training_thread = [], None  # hooks and thread of a training in progress
        self._places = None
        self._end_together = None
        self._stragglers = StragglerHook()
        self._session_config = session.prepare_session_config(options, self._session_config)
        for strategy in (config.train_distribute, config.eval_distribute):
            provide_cpu_devices(strategy, self._session_config)
        precision.prepare(self._session_config)

    def train(self, input_fn, hooks=None, steps=None, max_steps=None, saving_listeners=None):
        """Trains like `tf.estimator.Estimator.train`; with several ranks, the step reached so far is rank 0's.

        Raises:
          DamagedCheckpointError: (a RuntimeError) the checkpoint to resume from is damaged; under `npu-run --restarts`,
            only if no other checkpoint is intact.
          ModelDirInUseError: (a RuntimeError) another job trains in `model_dir`.
          OSError: checkpoints are saved, but `model_dir` is not a writable folder.
        Ranks: collective.
        """
        saves = collective.current().rank == 0 and self.config.is_chief
        if saves and (self.config.save_checkpoints_secs or self.config.save_checkpoints_steps):
            check_model_dir(self.model_dir)
        self._stop_hook = session.StopHook(leaves=False)
        with session.hold_model_dir(self.model_dir if saves else None), wire_names.use_label(self._transfers.label):
            trained = self._train_alone(input_fn, hooks, steps, max_steps, saving_listeners)
        if self._stop_hook.was_stopped:
            if self._logs_progress:
                text = f"saved step {self._stop_hook.step} in {self.model_dir}, as the job was asked to end"
                choose_output(sys.stderr).note(f"NPUEstimator: {text}")
            self._stop_hook.end_process()
        return trained

    def _train_alone(self, input_fn, hooks, steps, max_steps, saving_listeners):
        ranks = collective.current()
        if ranks.rank == 0:
            self._check_start_checkpoints()
        reached = self._reached_step_of_rank_0()
        if ranks.rank == 0:
            self._log_start(reached, max_steps)
        if ranks.rank > 0:
            self._check_start_checkpoints()  # after rank 0, which may have repaired the folder
        if max_steps is not None and max_steps > 0 and steps is None and ranks.size > 1:
            if reached >= max_steps:
                return self
            # Counted from rank 0's step on every rank, even if a rank finds another checkpoint in its own folder.
            steps, max_steps = max_steps - reached, None
        self._places = places_of_ranks()
        self._end_together = self._find_end_together_hook(hooks)
        first_hooks = [PrecisionHook(self._precision, steps, max_steps, is_training=True)]
        if self._options.iterations_per_loop > 1:
            loop = self._options.iterations_per_loop
            # After the precision hook, which then decides about a whole loop.
            first_hooks += [
                SetIterationsVarHook(loop),
                LoopStepsHook(steps or (max_steps and max_steps - reached), loop),
            ]
        if self._precision.switch is not None and ranks.rank == 0 and self.config.save_summary_steps:
            first_hooks.append(PrecisionSummaryHook(self.model_dir, self.config.save_summary_steps))
        if ranks.size > 1 and not self.config.horovod_mode:
            # Before the hooks that read the global step.
            first_hooks.insert(0, NPUBroadcastGlobalVariablesHook(root_rank=0, index=ranks.rank))
        with self._hooks_with_options(hooks, "train", first_hooks) as all_hooks:
            return super().train(input_fn, all_hooks, steps, max_steps, saving_listeners)

    def evaluate(self, input_fn, steps=None, hooks=None, checkpoint_path=None, name=None):
        """Evaluates like `tf.estimator.Estimator.evaluate`; only rank 0 writes the result as a summary, and logs it."""
        session.check_checkpoint(checkpoint_path or self.model_dir)
        counted, began = BatchesHook(), time.monotonic()
        hooks = [*(hooks or ()), counted]
        with wire_names.use_label(wire_names.UNTRAINED), self._hooks_with_options(hooks, "eval") as all_hooks:
            metrics = super().evaluate(input_fn, steps, all_hooks, checkpoint_path, name)
        # A training in another thread continues meanwhile, and writes its history itself.
        is_beside = self._training_thread not in (None, threading.get_ident())
        if self._logs_progress:
            history, is_over = None if is_beside else self._history, self._training_thread is None
            report_evaluation(self.model_dir, metrics, history, name, counted, sys.stderr, is_over)
        for hook in () if is_beside else self._timed:  # hooks of a training that this evaluation interrupts
            hook.exclude_secs(time.monotonic() - began)
        return metrics

    def predict(self, input_fn, predict_keys=None, hooks=None, checkpoint_path=None, yield_single_examples=True):
        """Predicts like `tf.estimator.Estimator.predict`."""
        session.check_checkpoint(checkpoint_path or self.model_dir)
        with self._hooks_with_options(hooks, "infer") as all_hooks:
            yield from super().predict(input_fn, predict_keys, all_hooks, checkpoint_path, yield_single_examples)

    def export_savedmodel(
        self,
        export_dir_base,
        serving_input_receiver_fn,
        assets_extra=None,
        as_text=False,
        checkpoint_path=None,
        strip_default_attrs=False,
    ):
        """Exports for serving like TensorFlow 1.15's Estimator; `tf.estimator.Estimator` lacks this method now."""
        given = (serving_input_receiver_fn, assets_extra, as_text, checkpoint_path, strip_default_attrs)
        return tf.compat.v1.estimator.Estimator.export_savedmodel(self, export_dir_base, *given)

    def _export_all_saved_models(self, export_dir_base, *args, **kwargs):
        if collective.current().rank > 0:
            folder = temporary_folder()  # ranks cannot wait for rank 0, which can export alone
            weakref.finalize(self, folder.cleanup)
            export_dir_base = folder.name
        return super()._export_all_saved_models(export_dir_base, *args, **kwargs)

    @property
    def _logs_progress(self):
        return self.config.log_step_count_steps is not None and collective.current().rank == 0

    @contextlib.contextmanager
    def _hooks_with_options(self, hooks, graph_name, first_hooks=None):
        """Yields the given hooks with the hooks that the options need; closes the hooks of the options afterwards."""
        announce_ineffective_options(self._options)
        own_hooks = session.hooks_for(self._options, graph_name, self.model_dir)
        try:
            with session.mismatches_explained(self.model_dir):
                yield [*(first_hooks or [PrecisionHook(self._precision)]), *(hooks or ()), *own_hooks]
        finally:
            session.close_hooks(own_hooks)

    def _convert_train_steps_to_hooks(self, steps, max_steps):
        hooks = super()._convert_train_steps_to_hooks(steps, max_steps)
        if self._logs_progress:
            total, more = (None if count is None else math.ceil(count) for count in (max_steps, steps))
            hooks.append(_DefaultProgressHook(total_steps=total, more_steps=more, stream=sys.stderr))
        hooks.append(_DefaultCollapseHook())
        return hooks

    def _train_with_estimator_spec(self, estimator_spec, worker_hooks, hooks, global_step_tensor, saving_listeners):
        of_spec = [*estimator_spec.training_hooks, *estimator_spec.training_chief_hooks]
        given = [*worker_hooks, *hooks, *of_spec]
        for kind, own in ((ProgressHook, _DefaultProgressHook), (LossScaleCollapseHook, _DefaultCollapseHook)):
            if sum(isinstance(hook, kind) for hook in given) > 1:
                hooks = [hook for hook in hooks if not isinstance(hook, own)]
        recorder = next((hook for hook in given if isinstance(hook, HistoryHook)), None)
        self._history = recorder and recorder.history
        curve_steps = self.config.save_summary_steps or self.config.log_step_count_steps
        if collective.current().rank == 0 and curve_steps and not _has_hook(given, TensorBoardHook):
            hooks = [*hooks, TensorBoardHook(self.model_dir, most_steps=curve_steps)]
        if self._logs_progress and not _has_hook(given, ReportHook):
            # In later rounds the summary is one line.
            settings = {"curves": False, "is_brief": self._has_ended, "config": self._as_given}
            report = ReportHook(self.model_dir, self._history, self._places, sys.stderr, **settings)
            self._history = report.history
            hooks = [*hooks, report]
        self._timed = [hook for hook in dict.fromkeys((*given, *hooks)) if hasattr(hook, "exclude_secs")]
        self._training_thread = threading.get_ident()
        every_n_steps = self.config.log_step_count_steps
        if collective.current().rank > 0 and every_n_steps:
            # The base class, which logs only on rank 0, adds its hook at this place.
            tensors = {"loss": estimator_spec.loss, "step": global_step_tensor}
            worker_hooks.append(tf.compat.v1.train.LoggingTensorHook(tensors, every_n_iter=every_n_steps))
            worker_hooks.append(FailureHook(self.model_dir))  # rank 0 has a ReportHook
        secs, save_steps = self.config.save_checkpoints_secs, self.config.save_checkpoints_steps
        # Rank 0 saves and shows, perhaps with a hook or an interval that a script gives to rank 0 alone.
        of_rank = [bool(secs or save_steps), _has_hook(given, tf.estimator.CheckpointSaverHook)]
        of_rank.append(bool(every_n_steps) and not _has_hook(given, StragglerHook))
        has_interval, has_saver, has_stragglers = gather_values(of_rank, "npu_estimator_hooks")[0]
        worker_hooks = _WithNanLossHook(worker_hooks)
        if not self.config.cluster_spec:
            # The base class adds its saver at this place. Every rank is the chief of its own session.
            is_saving = has_interval and not has_saver
            sync = SyncBeforeSavingHook(save_steps or None, is_saving)
            scaffold, chief_hooks = estimator_spec.scaffold, [sync]
            if collective.current().size > 1 and has_stragglers:
                chief_hooks.insert(0, self._stragglers)
            if is_saving and collective.current().rank == 0:
                options = {"scaffold": scaffold, "save_graph_def": self.config.checkpoint_save_graph_def}
                chief_hooks.append(NPUCheckpointSaverHook(self.model_dir, secs, save_steps, **options))
            chief_hooks += [session.MemoryCheckpointHook(self.model_dir, sync, scaffold)] if is_saving else []
            chief_hooks += estimator_spec.training_chief_hooks
            estimator_spec = estimator_spec._replace(training_chief_hooks=chief_hooks)
        if _has_hook((*given, *hooks), TensorBoardHook):
            chief_hooks = [BeginEventsHook(self.model_dir), *estimator_spec.training_chief_hooks]
            estimator_spec = estimator_spec._replace(training_chief_hooks=chief_hooks)
        hooks, estimator_spec, stop = stop_ranks_together(hooks, estimator_spec, saving_listeners)
        if has_interval or has_saver:  # otherwise stopping would lose all training
            hooks, saving_listeners = [*hooks, self._stop_hook], self._stop_hook.skip_evaluations(saving_listeners)
        given_start = self._warm_start_settings
        if given_start and self.latest_checkpoint() is None:  # variables of this graph
            self._warm_start_settings = remove_missing_state(given_start)
        try:
            return super()._train_with_estimator_spec(
                estimator_spec, worker_hooks, hooks, global_step_tensor, saving_listeners
            )
        finally:
            self._warm_start_settings = given_start
            self._stop_hook.close()
            self._timed, self._training_thread, self._has_ended = [], None, True
            if stop.was_asked and self._logs_progress:
                text = f"stopped early, at step {stop.step}: a hook asked for it"
                choose_output(sys.stderr).note(f"NPUEstimator: {text}")
            for hook in (*given, *hooks, *estimator_spec.training_chief_hooks):
                if isinstance(hook, NPUCheckpointSaverHook):
                    hook.release_folder()
                if isinstance(hook, MetricsHook):
                    hook.close()  # after an error, nothing else closes it

    def _find_end_together_hook(self, hooks):
        """Returns the `EndTogether` among the hooks, or None; raises ValueError if the options exclude such a hook."""
        found = next((hook for hook in hooks or () if isinstance(hook, session.EndTogether)), None)
        loop, strategy = self._options.iterations_per_loop, self.config.train_distribute
        for is_set, got in ((loop > 1, f"iterations_per_loop={loop}"), (strategy, "train_distribute")):
            if found is not None and is_set:
                problem = "EndTogether must see each single batch of a rank"
                expected = "iterations_per_loop=1 and no train_distribute"
                raise ValueError(message("NPUEstimator", problem, expected, got, "Leave it out of the NPURunConfig."))
        return found

    def _call_input_fn(self, input_fn, mode, input_context=None):
        result = super()._call_input_fn(input_fn, mode, input_context)
        if mode != tf.estimator.ModeKeys.TRAIN or self._end_together is None:
            return result
        return self._end_together.next_of(result)

    def _check_start_checkpoints(self):
        session.take_memory_checkpoint(self.model_dir)
        session.check_newest_checkpoint(self.model_dir, may_use_older=True)
        if self._warm_start_settings and self.latest_checkpoint() is None:
            session.check_checkpoint(self._warm_start_settings.ckpt_to_initialize_from)

    def _log_start(self, reached_step, max_steps):
        is_over = max_steps is not None and reached_step >= max_steps
        if reached_step and self._logs_progress and (is_over or not self._has_trained):
            choose_output(sys.stderr).note(f"NPUEstimator: {format_start(reached_step, max_steps, self.model_dir)}")
        self._has_trained = True

    def _reached_step_of_rank_0(self):
        reached = 0
        checkpoint = tf.train.latest_checkpoint(self.model_dir) if collective.current().rank == 0 else None
        if checkpoint is not None:
            reader = tf.train.load_checkpoint(checkpoint)
            reached = next((int(reader.get_tensor(name)) for name in _STEP_NAMES if reader.has_tensor(name)), 0)
        return gather_values(reached, "npu_estimator_reached_step")[0]

    def _evaluate_run(self, checkpoint_path, scaffold, update_op, eval_dict, all_hooks, output_dir):
        with contextlib.ExitStack() as stack:
            folder = output_dir if collective.current().rank == 0 else stack.enter_context(temporary_folder())
            return super()._evaluate_run(checkpoint_path, scaffold, update_op, eval_dict, all_hooks, folder)

    def _assert_members_are_not_overridden(self):
        """Allows this class to override methods, which the base class would refuse."""


class _WithNanLossHook(list):
    """A list of hooks that replaces a `NanTensorHook` of the base class by a hook that ignores skipped steps."""

    def append(self, hook):
        super().append(NanLossHook(hook) if type(hook) is tf.estimator.NanTensorHook else hook)


def _has_hook(hooks, kind):
    return any(isinstance(hook, kind) for hook in hooks)


class _DefaultProgressHook(ProgressHook):
    """The progress hook that an `NPUEstimator` adds by default."""


class _DefaultCollapseHook(LossScaleCollapseHook):
    """The collapse hook that an `NPUEstimator` adds by default."""
