"""Sets the seeds of a process to fixed values plus a shift, so that runs of a script differ only by the shift.

Generators that a script makes with its own seed (`numpy.random.RandomState(0)`, `random.Random(0)`) stay unchanged:
they usually make its data.
"""

from __future__ import annotations

import functools
import random
from typing import Any, Callable

import numpy as np

from npu_bridge.base.tf_internals.training import replace_seed_choice, seed_unseeded_operators
from npu_run.trials.trial import SEED


def pin_seeds(shift: int, rank: int) -> None:
    """Seeds Python and numpy, differently on each rank, and adds `shift` to every seed that the script sets."""
    for module in (random, np.random):
        set_seed = module.seed
        module.seed = functools.partial(_set_shifted_seed, set_seed, shift, seed_of_rank(rank))
        set_seed(seed_of_rank(rank) + shift)


def pin_seeds_of_tensorflow(shift: int, rank: int) -> None:
    """Seeds graphs that have no seed, and adds `shift` to all seeds; TensorFlow must be loaded."""
    import tensorflow as tf

    def get_shifted_seeds(get_seed: Callable, op_seed: Any):
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            if graph.seed is None and op_seed is None:
                graph.seed = seed_of_rank(rank)
        first, second = get_seed(op_seed)
        return (first if first is None else (first + shift) % 2**31), second

    replace_seed_choice(get_shifted_seeds)
    seed_unseeded_operators(seed_of_rank(rank) + shift)
    tf.random.set_seed(seed_of_rank(rank))


def seed_of_rank(rank: int) -> int:
    """Returns the seed of a rank for scripts that set no seed; each rank gets a different seed."""
    return SEED + 10007 * rank


def _set_shifted_seed(
    set_seed: Callable, shift: int, default: int, seed: Any = None, *arguments: Any, **keywords: Any
) -> Any:
    if seed is None:
        seed = default
    return set_seed(seed + shift if isinstance(seed, (int, np.integer)) else seed, *arguments, **keywords)
