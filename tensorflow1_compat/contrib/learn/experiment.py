"""Defines `Experiment`, which trains and evaluates an estimator, and `RunConfig`, its session settings."""

from __future__ import annotations

import os

import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.learn.monitors import replace_monitors_with_hooks


class RunConfig(tf.estimator.RunConfig):
    """A `tf.estimator.RunConfig` with additional arguments for session settings.

    Args:
      num_cores: number of threads within and between operators; 0 for the number of processors.
      log_device_placement, gpu_memory_fraction: as in a ConfigProto.
      session_config: a ConfigProto that replaces the previous three arguments.
      master, evaluation_master, session_creation_timeout_secs: no effect; `TF_CONFIG` describes clusters.
      Others: as in `tf.estimator.RunConfig`. The default is a checkpoint every 600 seconds.
    """

    def __init__(
        self, master=None, num_cores=0, log_device_placement=False, gpu_memory_fraction=1, tf_random_seed=None,
        save_summary_steps=100, save_checkpoints_secs=0, save_checkpoints_steps=None, keep_checkpoint_max=5,
        keep_checkpoint_every_n_hours=10000, log_step_count_steps=100, protocol=None, evaluation_master="",
        model_dir=None, session_config=None, session_creation_timeout_secs=7200,
    ):  # fmt: skip
        del master, evaluation_master
        if save_checkpoints_secs == 0:
            save_checkpoints_secs = 600 if save_checkpoints_steps is None else None
        self.tf_config = tf.ConfigProto(
            log_device_placement=log_device_placement,
            inter_op_parallelism_threads=num_cores,
            intra_op_parallelism_threads=num_cores,
            gpu_options=tf.GPUOptions(per_process_gpu_memory_fraction=gpu_memory_fraction),
        )
        super().__init__(
            model_dir=model_dir,
            tf_random_seed=tf_random_seed,
            save_summary_steps=save_summary_steps,
            save_checkpoints_steps=save_checkpoints_steps,
            save_checkpoints_secs=save_checkpoints_secs,
            session_config=session_config or self.tf_config,
            keep_checkpoint_max=keep_checkpoint_max,
            keep_checkpoint_every_n_hours=keep_checkpoint_every_n_hours,
            log_step_count_steps=log_step_count_steps,
            protocol=protocol,
            session_creation_timeout_secs=session_creation_timeout_secs,
        )


class Experiment:
    """An estimator with input functions and settings for training and evaluation.

    Args:
      estimator: a `tf.estimator.Estimator`.
      train_input_fn, eval_input_fn: functions without arguments.
      train_steps, eval_steps: number of steps; None runs to the end of the input.
      train_monitors, eval_hooks: session hooks for training and for evaluation.
      min_eval_frequency: 0 evaluates only the last checkpoint; other values evaluate each checkpoint.
      export_strategies: exporters that run after evaluations.
      saving_listeners: listeners of the training's checkpoints.
      Others: no effect.
    """

    def __init__(
        self, estimator, train_input_fn, eval_input_fn, eval_metrics=None, train_steps=None, eval_steps=100,
        train_monitors=None, eval_hooks=None, local_eval_frequency=None, eval_delay_secs=120,
        continuous_eval_throttle_secs=60, min_eval_frequency=None, delay_workers_by_global_step=False,
        export_strategies=None, train_steps_per_iteration=None, checkpoint_and_export=False, saving_listeners=None,
        check_interval_secs=5,
    ):  # fmt: skip
        self._estimator, self._train_input_fn, self._eval_input_fn = estimator, train_input_fn, eval_input_fn
        if eval_metrics:
            self._estimator = tf.estimator.add_metrics(estimator, _make_metric_fn(eval_metrics))
        self._train_steps, self._eval_steps = train_steps, eval_steps
        self._train_hooks, self._eval_hooks = list(train_monitors or []), list(eval_hooks or [])
        self._evaluates_checkpoints = min_eval_frequency != 0
        self._exporters = export_strategies
        if export_strategies is not None and not isinstance(export_strategies, (list, tuple)):
            self._exporters = [export_strategies]
        self._listeners = saving_listeners

    @property
    def estimator(self):
        """The estimator."""
        return self._estimator

    @property
    def train_steps(self):
        """Number of training steps; None trains to the end of the input."""
        return self._train_steps

    @property
    def eval_steps(self):
        """Number of evaluation steps; None evaluates to the end of the input."""
        return self._eval_steps

    def extend_train_hooks(self, additional_hooks):
        """Adds hooks to the training."""
        self._train_hooks.extend(additional_hooks)

    def train(self, delay_secs=None):
        """Trains until the global step reaches `train_steps`."""
        hooks = replace_monitors_with_hooks(self._train_hooks, self._estimator)
        return self._estimator.train(
            self._train_input_fn, hooks=hooks, max_steps=self._train_steps, saving_listeners=self._listeners
        )

    def evaluate(self, delay_secs=None, name=None):
        """Evaluates the last checkpoint."""
        return self._estimator.evaluate(self._eval_input_fn, self._eval_steps, self._eval_hooks, name=name)

    def train_and_evaluate(self):
        """Trains; evaluates each checkpoint, or only the last; returns (metrics, results of exporters)."""
        if not self._evaluates_checkpoints:
            self.train()
            metrics, folder = self.evaluate(), os.path.join(self._estimator.model_dir, "export")
            last = self._estimator.latest_checkpoint()
            return metrics, [
                each.export(self._estimator, os.path.join(folder, each.name), last, metrics, True)
                for each in self._exporters or ()
            ]
        hooks = replace_monitors_with_hooks(self._train_hooks, self._estimator)
        train = tf.estimator.TrainSpec(self._train_input_fn, self._train_steps, hooks, self._listeners)
        evaluation = tf.estimator.EvalSpec(
            self._eval_input_fn, self._eval_steps, hooks=self._eval_hooks, exporters=self._exporters,
            start_delay_secs=0, throttle_secs=0,
        )  # fmt: skip
        return tf.estimator.train_and_evaluate(self._estimator, train, evaluation)

    def continuous_train_and_eval(self, continuous_eval_predicate_fn=None):
        """Calls `train_and_evaluate`."""
        return self.train_and_evaluate()

    def test(self):
        """Runs one training step and one evaluation step."""
        hooks = replace_monitors_with_hooks(self._train_hooks, self._estimator)
        self._estimator.train(self._train_input_fn, steps=1, hooks=hooks)
        return self._estimator.evaluate(self._eval_input_fn, 1, self._eval_hooks, name="one_pass")


def _make_metric_fn(specs):
    def metric_fn(labels, predictions, features):
        return {
            name: spec.create_metric_ops(features, labels, predictions)
            if hasattr(spec, "create_metric_ops") else spec(predictions, labels)
            for name, spec in specs.items()
        }  # fmt: skip

    return metric_fn
