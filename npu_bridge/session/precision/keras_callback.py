"""`AccelerateTrainCallback`: applies `accelerate_train_mode` to `model.fit`.

While the training is in low precision, the train function is called with the rewriter on; after the switch it is called
unchanged (`functions.py`). The function is traced once and compiled twice; variables, optimizer and iterator stay the
same. Evaluation and prediction are not changed. Without eager execution Keras trains in a session, which switches by
itself; the callback then only reports the progress.
"""

from __future__ import annotations

import logging
import math
import time

import tensorflow as tf

from npu_bridge.base.errors import message, say_once
from npu_bridge.base.tf_internals.training import steps_per_execution
from npu_bridge.base.train_functions import TrainedBatches, unwrap_train_function, wrap_train_function
from npu_bridge.gradients.checkpoints.sync import batches_per_update
from npu_bridge.options import parse_accelerate_train_mode, read_session_config, with_optimizer_entry
from npu_bridge.session.precision.functions import call_under_policy
from npu_bridge.session.precision.live_session import precision_of_session
from npu_bridge.session.precision.modes import Policy
from npu_bridge.session.precision.policy import Precision
from npu_bridge.session.precision.switch import ProgressVariables

_TRAINED = frozenset({"the variables of a Keras model"})


class AccelerateTrainCallback(tf.keras.callbacks.Callback):
    """A callback that runs the first part of a `fit` in low precision, and the rest in the model's own precision.

    Steps are updates, and count from the optimizer's `iterations`, so a resumed training continues the count. After the
    switch every later `fit` with the same callback keeps the model's own precision. At the switch, seeded random
    operators, such as `Dropout` after `set_random_seed`, begin their numbers again.

    Args:
      accelerate_train_mode: value of the option of this name, such as "fast|step|0.9" or "fast1|loss|1.1".
      total_step: number of steps of the whole training; by default the steps done before plus the steps of this `fit`.
      final_loss: the target loss; needed by a loss trigger.
      loss: the name in the logs that a loss trigger reads. With eager execution Keras logs the mean of the epoch so
        far.
    Raises:
      ValueError: the mode is not legal, or `final_loss` is missing. Raised when training begins: `total_step` is
        missing and the number of steps of an epoch is unknown, the model runs eagerly, or the Keras session does not
        have the same mode.
    Ranks: collective until the switch; every rank needs the callback.
    Example:
      model.fit(data, epochs=10, callbacks=[AccelerateTrainCallback("fast|step|0.9")])
    """

    def __init__(
        self,
        accelerate_train_mode: str,
        total_step: int | None = None,
        final_loss: float | None = None,
        loss: str = "loss",
    ):
        super().__init__()
        self._supports_tf_logs = True  # logs stay tensors until a number is needed
        key = {"experimental_accelerate_train_mode": accelerate_train_mode}
        self._options = read_session_config(with_optimizer_entry(None, key))
        self._plan = parse_accelerate_train_mode(self._options.accelerate_train_mode)
        if self._plan is not None and self._plan.trigger == "loss" and final_loss is None:
            raise _usage_error("final_loss is missing", "the target loss", "None", "Pass final_loss=....")
        self._total_step, self._final_loss, self._loss = total_step, final_loss, loss
        self._precision: Precision | None = None
        self._policy: Policy | None = None
        self._is_own_step = False
        self._steps_before_fit, self._batches_per_step = 0, 1
        self._batches_done, self._batches = 0, TrainedBatches()
        self._has_begun = False
        self._progress = ProgressVariables()

    @property
    def policy(self) -> Policy | None:
        """The policy that the latest training step followed; None before the first, or if Keras trains in a session."""
        return self._policy if self._precision is None else self._precision.policy_followed_by_steps(self._policy)

    @property
    def _steps_done(self):
        return self._steps_before_fit + self._batches_done // self._batches_per_step

    def on_train_begin(self, logs=None):
        """Replaces the train function of the model; if Keras trains in a session, checks the mode of the session."""
        if self._plan is None:
            return
        self._restore_train_function()
        self._batches_per_step = batches_per_update(self.model.optimizer)
        self._has_begun = False
        if not tf.compat.v1.executing_eagerly_outside_functions():
            _check_session_has_plan(self._plan)
            return
        _check_model(self.model)
        self._batches.begin_fit(self.model)
        if self._precision is None:
            steps_per_run = -(-steps_per_execution(self.model) // self._batches_per_step)
            self._precision = Precision(self._options.replace(iterations_per_loop=steps_per_run))
        if self._precision.switch is not None:
            wrap_train_function(self.model, self._train)

    def on_epoch_begin(self, epoch, logs=None):
        """Writes the goal and the progress into environment variables before the first step."""
        if self._plan is None:
            return
        if self._has_begun:
            self._progress.write({})  # again, as a fit inside this one can have ended
            return
        self._has_begun = True
        # Not in `on_train_begin`: later callbacks, such as Keras' `BackupAndRestore`, restore the model there.
        self._steps_before_fit, self._batches_done = _count_updates(self.model), 0
        if self._plan.trigger == "loss":
            self._progress.write({"TARGET_LOSS": self._final_loss, "LOSS_NOW": "0.0"})
        else:
            self._progress.write({"TOTAL_STEP": self._total_steps(epoch), "STEP_NOW": self._steps_done})

    def on_train_batch_begin(self, batch, logs=None):
        """Records that the next step belongs to this training."""
        self._is_own_step = True

    def on_train_batch_end(self, batch, logs=None):
        """Writes the environment variable of the progress."""
        self._is_own_step = False
        if self._plan is None:
            return
        self._batches_done += self._batches.count_new()
        if self._plan.trigger == "step":
            self._progress.write({"STEP_NOW": self._steps_done})
        elif self._precision is None or not self._precision.switch.has_happened:
            self._progress.write({"LOSS_NOW": float(self._read_loss(logs or {}))})

    def on_train_end(self, logs=None):
        """Restores the train function, and unsets the environment variables."""
        self._progress.remove()
        self._restore_train_function()

    def _train(self, train, iterator):
        """Calls the model's train function, in low precision until the switch."""
        if not self._is_own_step:  # left by a fit that failed; the present fit has no such callback
            return train(iterator)
        self._is_own_step = False
        had_happened = self._precision.switch.has_happened
        self._policy = self._precision.policy_of_run(_TRAINED)
        if self._policy is self._precision.low:
            return call_under_policy(self._precision, self._precision.low, train, iterator)
        start = time.perf_counter()
        logs = train(iterator)
        if not had_happened and not self._precision.has_no_effect:
            self._precision.switch.log_switch(time.perf_counter() - start, "its first step")
        return logs

    def _restore_train_function(self):
        unwrap_train_function(self.model, self._train)
        self._is_own_step = False

    def _total_steps(self, first_epoch):
        if self._total_step is not None:
            return self._total_step
        steps, samples = self.params.get("steps"), self.params.get("samples")
        if steps is None and samples:
            steps = math.ceil(samples / self.params["batch_size"])
        if steps is None:
            expected = "total_step, or data whose length is known"
            raise _usage_error("the steps of an epoch are unknown", expected, "neither", "Pass total_step=....")
        return self._steps_done + (self.params["epochs"] - first_epoch) * steps // self._batches_per_step

    def _read_loss(self, logs):
        if self._loss not in logs:
            expected = f"one of {', '.join(logs)}" if logs else "logs of a training step"
            raise _usage_error("loss is not in the logs", expected, repr(self._loss), "Name a metric of the model.")
        return logs[self._loss]


def _count_updates(model) -> int:
    counter = getattr(model.optimizer, "iterations", None)
    return int(tf.keras.backend.get_value(counter)) if counter is not None else 0


def _check_model(model):
    if model.run_eagerly:
        fix = "Compile the model without run_eagerly."
        raise _usage_error("operators that run eagerly cannot be lowered", "run_eagerly=False", "run_eagerly=True", fix)
    if model.jit_compile:
        text = message(
            "AccelerateTrainCallback",
            "XLA compiles the model, so nothing will run in low precision",
            "jit_compile=False",
            "jit_compile=True",
            "Leave jit_compile out.",
        )
        say_once(logging.WARNING, text)


def _check_session_has_plan(plan):
    precision = precision_of_session(tf.compat.v1.keras.backend.get_session())
    if precision is not None and precision.switch is not None and precision.switch.plan == plan:
        return
    got = "a session without a mode" if precision is None or precision.switch is None else "a session with another mode"
    raise _usage_error(
        "the Keras session lacks this mode",
        "a session with the same experimental_accelerate_train_mode",
        got,
        "Call set_keras_session_npu_config(config) with this mode before the model is built.",
    )


def _usage_error(problem: str, expected: str, got: str, fix: str) -> ValueError:
    return ValueError(message("AccelerateTrainCallback", problem, expected, got, fix))
