"""Places variables on parameter servers: strategies for `tf.train.replica_device_setter(ps_strategy=)`."""

from __future__ import annotations

import numpy as np


class RandomStrategy:
    """Chooses a random task; the same tasks for the same seed."""

    def __init__(self, num_ps_tasks, seed=0):
        self._num_tasks, self._random = num_ps_tasks, np.random.RandomState(seed)

    def __call__(self, op):
        return self._random.randint(self._num_tasks)


class GreedyLoadBalancingStrategy:
    """Chooses the task with the least load so far; `load_fn(op)` returns the load of an op."""

    def __init__(self, num_tasks, load_fn):
        self._load_fn, self._loads = load_fn, np.zeros(num_tasks)

    def __call__(self, op):
        task = int(np.argmin(self._loads))
        self._loads[task] += self._load_fn(op)
        return task


def byte_size_load_fn(op):
    """Returns the bytes of an op's only output, whose shape must be known."""
    output = op.outputs[0]
    if len(op.outputs) != 1 or not output.shape.is_fully_defined():
        raise ValueError(f"byte_size_load_fn: {op.name} needs one output of a known shape; got {op.outputs}.")
    return output.dtype.base_dtype.size * int(np.prod(output.shape.as_list(), dtype=np.int64))
