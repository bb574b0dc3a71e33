"""Whether gradients may travel while the backward pass goes on (`hcom_parallel`)."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from npu_bridge.gradients.dense_or_sparse import map_values, values_of
from npu_bridge.options import of_graph


def may_overlap() -> bool:
    """What the option says in the run of the graph being built; unknown, as in eager execution, it is on."""
    options = of_graph.options_of_graph()
    return options is None or options.hcom_parallel


def ready_to_travel(gradients: Sequence) -> list:
    """The gradients as transfers take them: themselves, or, with `hcom_parallel=False`, once all of them exist.

    The option is that of the run the graph being built belongs to; unknown, as in eager execution, it is on.

    Args:
      gradients: dense or sparse gradients, or None.
    Returns:
      List in the same order, of the same values.
    """
    overlaps = may_overlap()
    of_graph.built_with("hcom_parallel", overlaps)
    if overlaps:
        return list(gradients)
    with tf.control_dependencies([values_of(grad) for grad in gradients if grad is not None]):
        return [grad if grad is None else map_values(grad, tf.identity) for grad in gradients]
