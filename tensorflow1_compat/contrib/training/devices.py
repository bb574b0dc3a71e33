"""Defines strategies that place variables on parameter servers, for `tf.train.replica_device_setter(ps_strategy=)`."""

from __future__ import annotations

import numpy as np


class RandomStrategy:
    """A placement strategy that chooses random tasks; the same seed gives the same choices."""

    def __init__(self, num_ps_tasks, seed=0):
        self._num_tasks, self._random = num_ps_tasks, np.random.RandomState(seed)

    def __call__(self, op):
        return self._random.randint(self._num_tasks)


class GreedyLoadBalancingStrategy:
    """A placement strategy that chooses the task with the least load so far; `load_fn(op)` returns an op's load."""

    def __init__(self, num_tasks, load_fn):
        self._load_fn, self._loads = load_fn, np.zeros(num_tasks)

    def __call__(self, op):
        task = int(np.argmin(self._loads))
        self._loads[task] += self._load_fn(op)
        return task


def byte_size_load_fn(op):
    """Returns the size in bytes of an op's only output, whose shape must be known."""
    output = op.outputs[0]
    if len(op.outputs) != 1 or not output.shape.is_fully_defined():
        raise ValueError(f"byte_size_load_fn: {op.name} needs one output of a known shape; got {op.outputs}.")
    return output.dtype.base_dtype.size * int(np.prod(output.shape.as_list(), dtype=np.int64))
