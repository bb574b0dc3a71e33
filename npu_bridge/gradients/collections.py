"""Graph collections through which hooks find what an optimizer built, without knowing the optimizer.

They are filled in TF 1 graphs only; each holds one tensor per optimizer, in the order of construction.
"""

from __future__ import annotations

import tensorflow as tf

from npu_bridge.gradients.graph_mode import building_graph

UNSCALED_LOSS = "npu_bridge/unscaled_loss"  # scalar losses as the user computed them
LOSS_SCALE = "npu_bridge/loss_scale"  # float32 scalars: the scale used in this step
STEP_SKIPPED = "npu_bridge/step_skipped"  # boolean scalars: True when this step's update did not happen


def publish(name: str, tensor: tf.Tensor) -> None:
    """Adds a tensor to a collection of the graph being built; does nothing inside functions and in eager mode."""
    if building_graph():
        tf.compat.v1.add_to_collection(name, tensor)
