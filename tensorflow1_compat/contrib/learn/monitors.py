"""`tf.contrib.learn.monitors`: monitors, which are predecessors of session hooks."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

CheckpointSaver, StopAtStep = tf.train.CheckpointSaverHook, tf.train.StopAtStepHook
LoggingTrainable = tf.train.LoggingTensorHook


def PrintTensor(tensor_names, every_n=100, first_n=1):
    """Returns a hook that prints tensors every `every_n` steps."""
    return tf.train.LoggingTensorHook(tensor_names, every_n_iter=every_n)


def StepCounter(every_n_steps=100, output_dir=None, summary_writer=None):
    """Returns a hook that reports the number of steps per second."""
    return tf.train.StepCounterHook(every_n_steps, output_dir=output_dir, summary_writer=summary_writer)


def NanLoss(loss_tensor, every_n_steps=100, fail_on_nan_loss=True):
    """Returns a hook that stops the training if the loss is NaN."""
    return tf.train.NanTensorHook(loss_tensor, fail_on_nan_loss)


class ValidationMonitor(tf.train.SessionRunHook):
    """A hook that evaluates an estimator's new checkpoints, every few steps; `set_estimator` sets the estimator."""

    def __init__(
        self, x=None, y=None, input_fn=None, batch_size=None, eval_steps=None, every_n_steps=100, metrics=None,
        hooks=None, early_stopping_rounds=None, early_stopping_metric="loss", early_stopping_metric_minimize=True,
        name=None, check_interval_secs=5,
    ):  # fmt: skip
        if input_fn is None:
            input_fn = tf.estimator.inputs.numpy_input_fn(x, y, batch_size or 128, num_epochs=1, shuffle=False)
        self._input_fn, self._steps, self._every = input_fn, eval_steps, every_n_steps
        self._hooks, self._name = hooks, name
        self._rounds, self._metric = early_stopping_rounds, early_stopping_metric
        self._sign = 1 if early_stopping_metric_minimize else -1
        self.best_value, self.best_step, self._estimator = None, None, None
        self._last_step, self._last_checkpoint = 0, None

    def set_estimator(self, estimator):
        """Sets the estimator to evaluate."""
        self._estimator = estimator

    def after_run(self, run_context, run_values):
        step = int(run_context.session.run(tf.train.get_global_step()))
        if self._estimator is None or step - self._last_step < self._every:
            return
        self._last_step, checkpoint = step, self._estimator.latest_checkpoint()
        if checkpoint in (None, self._last_checkpoint):
            return
        self._last_checkpoint = checkpoint
        found = self._estimator.evaluate(self._input_fn, self._steps, self._hooks, name=self._name)
        if self._rounds is None:
            return
        if self._metric not in found:
            known = ", ".join(sorted(found))
            raise ValueError(f"ValidationMonitor: {self._metric!r} is no metric of the evaluation, which has {known}.")
        value = found[self._metric]
        if self.best_value is None or self._sign * value < self._sign * self.best_value:
            self.best_value, self.best_step = value, step
        elif step - self.best_step >= self._rounds:
            run_context.request_stop()


def replace_monitors_with_hooks(monitors_or_hooks, estimator):
    """Returns monitors and hooks as a list of hooks; calls `set_estimator` of each monitor."""
    for each in monitors_or_hooks or []:
        if hasattr(each, "set_estimator"):
            each.set_estimator(estimator)
    return list(monitors_or_hooks or [])
