"""Warns after the first step of a job with several ranks if all ranks have read the same batch.

Ranks that read the same data compute the same gradients, and all of them together learn no more than one rank. Users
do not notice, because every loss falls. The check reads no extra batch: it inspects the values that the first training
run of a session gets from iterators and feeds, or the first batch of `fit`. Later steps cost nothing.

Tensors whose elements are all equal are ignored, such as the labels of a discriminator or the zeros of a benchmark.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from npu_bridge import collective
from npu_bridge.base.errors import say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.training import steps_per_execution
from npu_bridge.base.train_functions import unwrap_train_function, wrap_train_function
from npu_bridge.collective.small_values import gather_values
from npu_bridge.graph.run import SessionRun

_READERS = re.compile(r"IteratorGetNext(Sync)?|\w*Dequeue(Many|UpTo)?(V2)?")
_MAX_HASHED_BYTES = 16 * 2**20  # of each tensor
_NOTHING_SEEN = 0


def list_batch_tensors(run: SessionRun) -> list[tf.Tensor]:
    """Lists the tensors that a run reads from iterators and queues and that the run can fetch."""
    read = [tensor for op in run.ops if _READERS.fullmatch(op.type) for tensor in op.outputs]
    readable = run.values if read else ()
    return [tensor for tensor in read if tensor.name in readable and tensor.name not in run.fed_names]


def compare_first_batches(values: Iterable[Any]) -> None:
    """Compares the first batches of all ranks; rank 0 warns once if all batches are equal, bit for bit.

    Args:
      values: arrays of this rank's batch, and other inputs of the step; empty if this rank has seen no batch.
    Ranks: collective.
    """
    of_ranks = gather_values(_hash_batch(values), "same_batches")
    if collective.current().rank == 0 and of_ranks[0] != _NOTHING_SEEN and len(set(of_ranks)) == 1:
        say_once(
            logging.WARNING,
            f"npu_bridge: all {len(of_ranks)} ranks have read the same first batch, so together they learn no more "
            f"than one rank. Give each rank its own part of the data: "
            f"dataset = dataset.shard(get_rank_size(), get_rank_id()), before shuffle and batch.",
        )


class FirstBatchOfFit:
    """Records the first batch that `fit` trains on, without changing the training.

    Args:
      model: a Keras model that is about to train, eagerly or in functions.
    """

    def __init__(self, model: tf.keras.Model):
        self._values: list = []
        self._model = model
        # A train function of the model's own can take several batches.
        is_of_keras = type(model).make_train_function.__module__.split(".")[0] in ("keras", "tf_keras")
        if is_of_keras and steps_per_execution(model) == 1:
            wrap_train_function(model, self._train_first)

    def compare_recorded_batch(self) -> None:
        """Passes the recorded batch to the function `compare_first_batches`; call this method after the first step."""
        compare_first_batches(self._values)
        self._values = []

    def _train_first(self, train, iterator):
        unwrap_train_function(self._model, self._train_first)
        return train(self._record_first_batch(iterator))

    def _record_first_batch(self, iterator):
        try:
            element = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return iterator  # the caller finds the end itself
        self._values = [value.numpy() for value in tf.nest.flatten(element) if isinstance(value, tf.Tensor)]
        return iter(_dataset_of(element, iterator.element_spec))


def _dataset_of(element, spec):
    """Makes a dataset of one element whose iterators have exactly this `element_spec`.

    Functions are traced again for another spec. `from_generator` would do, too, but then a thread of TensorFlow needs
    Python in the middle of a step.
    """

    def with_shapes_of_spec(only):
        values, specs = (tf.nest.flatten(each, expand_composites=True) for each in (only, spec))
        values = [tf.compat.v1.placeholder_with_default(value, each.shape) for value, each in zip(values, specs)]
        return tf.nest.pack_sequence_as(spec, values, expand_composites=True)

    return tf.data.Dataset.from_tensors((element,)).map(with_shapes_of_spec)


def _hash_batch(values):
    """Returns a hash of all arrays whose elements are not all equal; `_NOTHING_SEEN` without such arrays."""
    digest, tells = hashlib.blake2b(digest_size=8), False
    for value in values:
        array = np.asarray(value)
        if array.dtype.kind not in "biufc" or array.size < 2 or np.all(array == array.flat[0]):
            continue
        tells = True
        part = np.ascontiguousarray(array).reshape(-1)[: max(_MAX_HASHED_BYTES // array.itemsize, 1)]
        digest.update(f"{array.dtype}{array.shape}".encode() + part.tobytes())
    return int.from_bytes(digest.digest(), "big", signed=True) if tells else _NOTHING_SEEN
