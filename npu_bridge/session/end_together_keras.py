"""`EndTogetherCallback`: ends each epoch of `model.fit` after the last step of the rank with fewest batches."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.errors import message
from npu_bridge.base.tf_internals.training import steps_per_execution
from npu_bridge.session.end_together import check_dataset, with_has_next_flag

_OWNER = "EndTogetherCallback"


class _EpochEnd:
    """The value of `model.stop_training` that ends only an epoch; True, set by any callback, ends the training."""


class EndTogetherCallback(tf.keras.callbacks.Callback):
    """A callback that ends each epoch on all ranks after the last step of the rank that has fewest batches.

    Pass `fit` the dataset that `look_ahead` returns. With `steps_per_epoch` the data continue from epoch to epoch, so
    the end of a rank's data ends the whole training. All ranks make the same number of steps, so other callbacks save
    the same step at the end of an epoch. With one rank nothing changes. A rank that has no batch at all fails.

    Cost: the memory of one more batch and, after each step, an all-reduce of one number, which waits until the step is
    complete.

    Raises:
      ValueError: at the start in a TF 1 graph or with several steps in one execution; after the first batch if the
        dataset is not from `look_ahead`.
    Ranks: collective; every rank needs the callback.
    Example:
      >>> end = EndTogetherCallback()
      >>> model.fit(end.look_ahead(dataset), epochs=3, callbacks=[end])
    """

    def __init__(self):
        super().__init__()
        self._supports_tf_logs = True  # logs stay tensors: nothing here needs a number
        self._latest_pass = 0  # through a data set
        self._follows: dict[tuple[int, int], bool] = {}
        self._batch_key = (0, 0)

    def look_ahead(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset with the same elements, which reads one element ahead.

        Raises:
          ValueError: `dataset` is not a `tf.data.Dataset`.
        """
        check_dataset(dataset, _OWNER)

        def make_pass(number):
            return (
                with_has_next_flag(dataset)
                .enumerate()
                .map(lambda index, pair: self._record_and_pass_on(number, index, *pair))
            )

        # The number tells a new iterator from one that was left early, whose elements can still arrive.
        number = tf.data.Dataset.from_tensors(0).map(lambda _: tf.numpy_function(self._begin_pass, [], tf.int64))
        return number.flat_map(make_pass)

    def on_train_begin(self, logs=None):
        """Raises ValueError unless Keras runs eagerly (no TF 1 graph) and with `steps_per_execution=1`."""
        if not tf.compat.v1.executing_eagerly_outside_functions():
            fix = "Train with an NPUEstimator and EndTogether, or with eager execution."
            raise _value_error("Keras reads its data in a TF 1 graph", "eager execution", "a graph", fix)
        if steps_per_execution(self.model) > 1:
            got = f"steps_per_execution={steps_per_execution(self.model)}"
            fix = "Remove steps_per_execution from model.compile."
            raise _value_error("an execution of several steps cannot end early", "steps_per_execution=1", got, fix)

    def on_train_batch_end(self, batch, logs=None):
        """Ends the epoch, or the training, after the last step for which all ranks have a batch."""
        key = (self._latest_pass, self._batch_key[1] + 1 if self._batch_key[0] == self._latest_pass else 0)
        if key not in self._follows:
            expected, fix = "fit(callback.look_ahead(dataset), ...)", "Give fit the data set that look_ahead returns."
            raise _value_error("fit does not train on the dataset of look_ahead", expected, "other data", fix)
        follows = self._follows.pop(key)
        self._batch_key = key
        if not bool(collective.current().all_true(tf.constant(follows), "end_together_callback")):
            self._end_epoch_or_training()

    def on_epoch_end(self, epoch, logs=None):
        """Continues with the next epoch, unless another callback ends the training."""
        if isinstance(self.model.stop_training, _EpochEnd):
            self.model.stop_training = False

    def _end_epoch_or_training(self):
        self._follows.clear()
        if self.params.get("steps") is not None:
            self.model.stop_training = True
        elif not self.model.stop_training:
            self.model.stop_training = _EpochEnd()

    def _begin_pass(self):
        self._latest_pass += 1
        return self._latest_pass

    def _record_and_pass_on(self, number, index, element, is_followed):
        """Returns the tensors of an element, and records in Python whether another element follows."""
        recorded = tf.numpy_function(self._record_is_followed, [number, index, is_followed], [])
        with tf.control_dependencies([recorded]):
            return tf.nest.map_structure(tf.identity, element, expand_composites=True)

    def _record_is_followed(self, number, index, is_followed):
        self._follows[int(number), int(index)] = bool(is_followed)


def _value_error(problem: str, expected: str, got: str, fix: str) -> ValueError:
    return ValueError(message(_OWNER, problem, expected, got, fix))
