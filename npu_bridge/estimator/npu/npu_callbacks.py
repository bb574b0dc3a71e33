"""Defines Keras callbacks of the documented interface."""

from __future__ import annotations

import zlib
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.collective.small_values import gather_values, share_label
from npu_bridge.estimator.npu.checks import check_root_rank
from npu_bridge.gradients.first_step.adapted_layers import renew_adapted_layers
from npu_bridge.gradients.first_step.same_batches import FirstBatchOfFit
from npu_bridge.gradients.first_step.start_values import broadcast_variables, variables_in_training
from npu_bridge.reporting.fit_warnings import FitWarnings

__all__ = ["NPUBroadcastGlobalVariablesCallback", "broadcast_global_variables"]


class NPUBroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):
    """Broadcasts the start values of `root_rank` to all ranks, before the first epoch of training.

    Broadcasts the whole training state: weights, batch statistics, the optimizer with its slots and learning rate, the
    loss scale and its counters, and the state of layers after `adapt`. So if only `root_rank` has loaded a model, every
    rank resumes from this model. Each rank keeps its sums of `Accumulate` and its unsent values of `TopK` and
    `Threshold`. Each callback object broadcasts once; evaluation does not trigger the broadcast. For a second `fit`
    with `PartialSync` or `Adasum(on="weights")`, pass the same object again, so that each rank keeps its own weights
    and slots. A model without an input shape has no weights before its first batch, so the broadcast follows that
    batch. With a single rank nothing is sent.

    Rank 0 also warns if all steps are skipped, if the loss or weights are NaN or infinite, and if accumulated gradients
    are left over at the end of `fit`.

    Args:
      root_rank: the rank whose values are sent.
    Raises:
      ValueError: `root_rank` is not a rank. At the first batch: the ranks do not have the same variables.
    Ranks: collective; every rank needs this callback, with the same `root_rank`.
    """

    def __init__(self, root_rank):
        super().__init__()
        self._supports_tf_logs = True  # logs stay tensors until a number is needed
        self._root_rank = root_rank
        self._is_done = self._has_begun = False
        self._first_batch = None
        self._warnings = FitWarnings()
        check_root_rank("NPUBroadcastGlobalVariablesCallback", root_rank)

    def on_train_begin(self, logs=None):
        if not self._is_done and tf.executing_eagerly():
            share_label(self.model.optimizer)

    def on_train_batch_begin(self, batch, logs=None):
        if self._has_begun:
            return
        self._has_begun = True
        if not self._is_done and (self.model.built or not tf.executing_eagerly()):
            self._broadcast()
        elif not self._is_done:  # until the first batch has made the variables
            for part in [self.model.optimizer, *tf.train.TrackableView(self.model).descendants()]:
                if hasattr(part, "silence_start_warning"):
                    part.silence_start_warning()
        if tf.executing_eagerly() and collective.current().size > 1:
            self._first_batch = FirstBatchOfFit(self.model)

    def on_train_batch_end(self, batch, logs=None):
        if not self._is_done:
            self._broadcast()
        if self._first_batch is not None:
            self._first_batch.compare_recorded_batch()
            self._first_batch = None
        self._warnings.end_batch(self.model, batch, logs)

    def on_epoch_begin(self, epoch, logs=None):
        # Not in the first batch: Keras 2 warns of callbacks that are slow there ("Check your callbacks").
        if not self._is_done and tf.executing_eagerly() and self.model.built:
            self._broadcast()
        self._warnings.begin_epoch(self.model)

    def on_epoch_end(self, epoch, logs=None):
        self._warnings.end_epoch(self.model, logs)

    def on_train_end(self, logs=None):
        self._warnings.end_fit(self.model)

    def _broadcast(self):
        self._is_done = True
        if collective.current().size == 1:
            return
        if tf.executing_eagerly():
            variables = variables_in_training(self.model)
            # Parts of a sum and unsent values differ between ranks by design. The first step sends restored ones.
            kept = set(map(id, getattr(self.model.optimizer, "variables_of_this_rank", ())))
            variables = [variable for variable in variables if id(variable) not in kept]
            _check_equal_on_all_ranks(variables)
            broadcast_variables(variables, self._root_rank)
            renew_adapted_layers(self.model, self._root_rank)
            return
        session = tf.compat.v1.keras.backend.get_session()
        session.run(broadcast_global_variables(self._root_rank))


def broadcast_global_variables(root_rank: int) -> Any:
    """Assigns to every initialised variable of the Keras graph its value on `root_rank`.

    Args:
      root_rank: the rank whose values are sent.
    Returns:
      The op to run in the Keras session.
    Raises:
      RuntimeError: called when executing eagerly, where no list of all variables exists.
      ValueError: the ranks do not have the same variables.
    Ranks: collective; both this call and the op.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "npu_callbacks.broadcast_global_variables: there is no list of all variables when executing eagerly. "
            "Expected a TF 1 graph; got eager execution. Pass NPUBroadcastGlobalVariablesCallback to fit."
        )
    session = tf.compat.v1.keras.backend.get_session()  # initialises the variables that Keras knows
    with session.graph.as_default():
        variables = tf.compat.v1.global_variables()
        are_ready = session.run([tf.compat.v1.is_variable_initialized(variable) for variable in variables])
        ready = [variable for variable, is_ready in zip(variables, are_ready) if is_ready]
        _check_equal_on_all_ranks(ready)
        ranks, assigned = collective.current(), []
        for position, variable in enumerate(ready):
            # Named by position: Keras numbers names in the order of building, which can differ between ranks.
            name = f"keras_variable_{position}"
            assigned.append(variable.assign(ranks.broadcast(tf.convert_to_tensor(variable), root_rank, name)))
        return tf.group(*assigned)


def _check_equal_on_all_ranks(variables):
    """Raises ValueError if ranks have different variables: a broadcast would wait forever, or mix variables up."""
    text = ";".join(f"{variable.dtype.base_dtype.name}{variable.shape}" for variable in variables)
    answers = gather_values([len(variables), zlib.crc32(text.encode())], "keras_variables_alike")
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise ValueError(
                f"NPUBroadcastGlobalVariablesCallback: rank {rank} trains other variables. Expected the "
                f"{answers[0][0]} variables of rank 0, with their shapes and dtypes; got {answer[0]} others. Build "
                f"the same model on every rank, and compile it with the same optimizer."
            )
