"""The learning rate of somebody else's optimizer, for whoever shows it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.gradients import collections
from npu_bridge.gradients.graph_mode import building_graph
from npu_bridge.tf_internals.graphs import read_tensor
from npu_bridge.tf_internals.training import learning_rates


def publish_learning_rate(optimizer: Any) -> None:
    """Publishes what an optimizer's update, which is built already, reads as its learning rate.

    Graph: an entry in a collection, a tensor or a number, and no operator. An optimizer that does not tell, or computes
    the rate inside a function (a schedule of Keras, say), publishes nothing.
    """
    if not building_graph():
        return
    graph = tf.compat.v1.get_default_graph()
    for rate in learning_rates(optimizer):
        tensor = read_tensor(rate)
        # What is made behind the gate of loss scaling cannot be fetched.
        is_fetchable = isinstance(tensor, tf.Tensor) and tensor.graph is graph and graph.is_fetchable(tensor)
        if is_fetchable or isinstance(rate, float):
            collections.publish(collections.LEARNING_RATE, tensor if is_fetchable else rate)
            return
