"""`deterministic`: the same run gives the same bits."""

from __future__ import annotations

import logging

import tensorflow as tf

from npu_bridge.options import TrainingOptions
from npu_bridge.options.errors import say_once

# Graph seed of a deterministic run that names none; any number would do (ours).
FALLBACK_SEED = 2023


def make_deterministic(options: TrainingOptions, graph: tf.Graph | None = None) -> None:
    """Switches this process to deterministic kernels when the options ask for it.

    With them TensorFlow refuses random operators that have no seed, so a graph without a seed gets one. Random
    operators that the graph has already keep theirs. It holds for every session of the process from then on:
    TensorFlow cannot switch it off again.

    Args:
      options: the options of the run.
      graph: the graph to give a seed; None when its maker sets it.
    """
    if options.deterministic != 1:
        return
    tf.config.experimental.enable_op_determinism()
    if graph is not None and graph.seed is None:
        graph.seed = seed_of(options)


def seed_of(options: TrainingOptions) -> int | None:
    """The graph seed of a run: `tf_random_seed`, or a fixed one, with a warning, when determinism needs one."""
    if options.tf_random_seed is not None or options.deterministic != 1 or not options.use_off_line:
        return options.tf_random_seed
    say_once(
        logging.WARNING,
        f"deterministic: random operators need a seed and none is set. Expected tf_random_seed or "
        f"tf.set_random_seed(...) before the graph is built; got none. {FALLBACK_SEED} is used for operators "
        f"that are made from now on; set your own seed.",
    )
    return FALLBACK_SEED
