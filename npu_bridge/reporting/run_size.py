"""Measures the size of a training: samples in a step, trained parameters, and memory of each rank."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from npu_bridge.base.machine import peak_memory
from npu_bridge.graph.operators import computed_ops

_SAMPLES = ("npu_bridge", "samples_of_batch")  # key of a graph's collection
_NEXT = ("IteratorGetNext", "IteratorGetNextSync", "QueueDequeueManyV2", "QueueDequeueUpToV2")
# Datasets that change the elements of their input dataset.
_OTHER_ELEMENTS = ("Unbatch", "FlatMap", "Interleave", "Window", "GroupBy", "Rebatch", "Concatenate", "Sample")


def samples_of_batch(graph: tf.Graph, loss: tf.Tensor | None) -> int | None:
    """Returns the number of samples in a batch of this rank, from which `loss` is computed; None if it is unknown.

    The number is the first dimension of the input's tensors, or else the argument of the last `batch` in a `tf.data`
    pipeline. The number is unknown if several inputs disagree, or if batches are fed.

    Graph: adds nothing.
    """
    kept = graph.get_collection_ref(_SAMPLES)
    if not kept:
        ops: Iterable = graph.get_operations() if loss is None else computed_ops([loss])
        found = {_find_first_dimension(op) for op in ops if op.type in _NEXT}
        kept.append(found.pop() if len(found) == 1 else None)
    return kept[0]


def count_parameters(variables: Iterable) -> int | None:
    """Returns the number of values in variables; None without variables, or if a shape is unknown."""
    sizes = [variable.shape.num_elements() for variable in variables]
    return sum(sizes) if sizes and None not in sizes else None


def peak_memory_of_ranks(places: Sequence[Mapping[str, Any]], rank: int) -> dict[int, int]:
    """Returns a dict from rank to peak memory in bytes, for this rank and the other ranks on its host.

    Args:
      places: `host` and `process` of each rank, as from `places_of_ranks`.
      rank: this rank.
    """
    host, found = socket.gethostname()[:100], {rank: peak_memory()}
    for other, place in enumerate(places):
        if other != rank and place.get("host") == host and place.get("process"):
            found[other] = peak_memory(place["process"])
    return {number: peak for number, peak in sorted(found.items()) if peak}


def peak_gpu_memory() -> int | None:
    """Returns the peak memory in bytes of this process on its first GPU; None if unknown or without a GPU."""
    if not tf.config.list_physical_devices("GPU"):
        return None
    with contextlib.suppress(Exception):  # some builds do not know
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
    return None


def _find_first_dimension(op: tf.Operation) -> int | None:
    found = {tensor.shape.as_list()[0] for tensor in op.outputs if tensor.shape.rank}
    if found == {None}:
        return _find_dataset_batch_size(op.inputs[0].op)
    return found.pop() if len(found) == 1 else None


def _find_dataset_batch_size(iterator: tf.Operation) -> int | None:
    """Returns the argument of the last `batch` before an iterator."""
    made = [op for op in iterator.outputs[0].consumers() if op.type == "MakeIterator"]
    sizes = {_batch_size(op.inputs[0].op) for op in made}
    return sizes.pop() if len(sizes) == 1 else None


def _batch_size(op: tf.Operation) -> int | None:
    while not any(word in op.type for word in _OTHER_ELEMENTS):
        names = [argument.name for argument in op.op_def.input_arg]
        if "batch_size" in names:
            # Counted from the end: any number of captured arguments come before it.
            size = tf.get_static_value(op.inputs[names.index("batch_size") - len(names)])
            return None if size is None else int(size)
        if not len(op.inputs) or op.inputs[0].dtype != tf.variant:
            return None
        op = op.inputs[0].op
    return None
