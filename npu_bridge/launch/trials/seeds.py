"""Pins the seeds of a process, and shifts them: runs of one script then differ in nothing else.

Generators that a script makes with a seed of its own (`numpy.random.RandomState(0)`, `random.Random(0)`) are left as
they are: as a rule they make its data.
"""

from __future__ import annotations

import functools
import random
from typing import Any, Callable

import numpy as np

from npu_bridge.base.tf_internals.training import change_seeds, seed_all_operators
from npu_bridge.launch.trials.trial import SEED


def pin_seeds(shift: int, rank: int) -> None:
    """Gives Python and numpy a fixed seed, another one on each rank, and adds `shift` to those that the script sets."""
    for module in (random, np.random):
        set_seed = module.seed
        module.seed = functools.partial(_set_shifted, set_seed, shift, seed_of_rank(rank))
        set_seed(seed_of_rank(rank) + shift)


def pin_seeds_of_tensorflow(shift: int, rank: int) -> None:
    """The same for TensorFlow, which must be loaded: graphs without a seed get one, and all are shifted."""
    import tensorflow as tf

    def shifted(get_seed: Callable, op_seed: Any):
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            if graph.seed is None and op_seed is None:
                graph.seed = seed_of_rank(rank)
        first, second = get_seed(op_seed)
        return (first if first is None else (first + shift) % 2**31), second

    change_seeds(shifted)
    seed_all_operators(seed_of_rank(rank) + shift)
    tf.random.set_seed(seed_of_rank(rank))


def seed_of_rank(rank: int) -> int:
    """The seed where the script says none: without one, ranks draw different numbers."""
    return SEED + 10007 * rank


def _set_shifted(
    set_seed: Callable, shift: int, default: int, seed: Any = None, *arguments: Any, **keywords: Any
) -> Any:
    if seed is None:
        seed = default
    return set_seed(seed + shift if isinstance(seed, (int, np.integer)) else seed, *arguments, **keywords)
