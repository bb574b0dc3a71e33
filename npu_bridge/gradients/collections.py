"""Defines the graph collections in which hooks find the tensors of an optimizer, without access to the optimizer.

Only TF 1 graphs have these collections. Each collection holds one tensor per optimizer (`LOSS_SCALE_STATE`: three
variables per manager), in the order of construction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import current_control_flow_context, read_tensor
from npu_bridge.base.tf_internals.training import learning_rates
from npu_bridge.gradients.graph_mode import is_building_graph

UNSCALED_LOSS = "npu_bridge/unscaled_loss"  # scalar losses as the user computed them
LOSS_SCALE = "npu_bridge/loss_scale"  # float32 scalars: the scale used in this step
LOSS_SCALE_STATE = "npu_bridge/loss_scale_state"  # the variables of a dynamic loss scale
LEARNING_RATE = "npu_bridge/learning_rate"  # scalars, or numbers: the inner optimizer's rate in this step
STEP_SKIPPED = "npu_bridge/step_skipped"  # boolean scalars: True when this step skipped its update
# Parts of each optimizer's latest update. These keys are not strings, so that TensorFlow does not export them.
GRADIENTS = ("npu_bridge", "gradients")
PIPELINES = ("npu_bridge", "pipelines")
# For each of `STEP_SKIPPED`, whether this step applies or skips gradients: a boolean scalar, or True if each step does.
STEP_IS_DUE = ("npu_bridge", "step_is_due")
COLLAPSE_HOOKS = ("npu_bridge", "collapse_hooks")  # names of the hooks that name the operator of a first NaN
UPDATES = ("npu_bridge", "updates")  # operators that compute new values of variables and of optimizers' state


def gradients_of(graph: Any) -> list[Any]:
    """Returns the averaged, unscaled gradients that the last optimizer of a graph applies; [] without an optimizer."""
    kept = graph.get_collection(GRADIENTS)
    return kept[-1] if kept else []


def latest_decision(graph: Any) -> list[tf.Tensor]:
    """Returns whether the last optimizer of a graph skips its step, and, if not each step is due, whether it is due."""
    latest = [each for name in (STEP_SKIPPED, STEP_IS_DUE) for each in graph.get_collection(name)[-1:]]
    return [each for each in latest if tf.is_tensor(each)]


def pipelines_in(graph: Any) -> list[Any]:
    """Returns the pipelines that have an update in a graph, without duplicates."""
    return list(dict.fromkeys(graph.get_collection(PIPELINES)))


@contextlib.contextmanager
def record_update_operators() -> Iterator[None]:
    """Records the operators made inside the context as operators of an update; does nothing outside a TF 1 graph."""
    if not is_building_graph():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    graph.get_collection_ref(UPDATES).extend(graph.get_operations()[before:])


def publish_in_graph(name: Any, value: Any) -> None:
    """Adds a tensor, a variable or another object to a collection of the current TF 1 graph.

    Does nothing in eager execution, in a function, and inside a `tf.cond` or a loop, where tensors cannot be fetched.
    """
    if is_building_graph() and current_control_flow_context(tf.compat.v1.get_default_graph()) is None:
        tf.compat.v1.add_to_collection(name, value)


def publish_learning_rate(optimizer: Any) -> None:
    """Adds the learning rate of an optimizer to the collection `LEARNING_RATE`; the update must already be built.

    Adds an existing tensor or a number, but makes no operator. Does nothing if the optimizer hides its learning rate or
    computes it inside a function, as for a Keras schedule.
    """
    if not is_building_graph():
        return
    graph = tf.compat.v1.get_default_graph()
    for rate in learning_rates(optimizer):
        tensor = read_tensor(rate)
        # Tensors made inside the gate of loss scaling cannot be fetched.
        is_fetchable = isinstance(tensor, tf.Tensor) and tensor.graph is graph and graph.is_fetchable(tensor)
        if is_fetchable or isinstance(rate, float):
            publish_in_graph(LEARNING_RATE, tensor if is_fetchable else rate)
            return
