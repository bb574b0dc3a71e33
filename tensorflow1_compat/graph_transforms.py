"""`tensorflow.tools.graph_transforms`: transforms a frozen graph before it is shipped."""

from __future__ import annotations

import re

import tensorflow.compat.v1 as tf

from tensorflow1_compat.journal import say_once

# These only make a graph smaller or faster; its results do not change.
_SAVE_TIME = (
    "flatten_atrous_conv", "fold_batch_norms", "fold_constants", "fold_old_batch_norms", "fuse_pad_and_conv",
    "fuse_remote_graph", "fuse_resize_and_conv", "fuse_resize_pad_and_conv", "merge_duplicate_nodes", "obfuscate_names",
    "remove_attribute", "remove_device", "remove_nodes", "set_device", "sort_by_execution_order",
)  # fmt: skip


def TransformGraph(input_graph_def, inputs, outputs, transforms):
    """Reduces a graph to the nodes that its outputs need.

    Transforms that only save time are skipped with a message.

    Args:
      input_graph_def: a frozen GraphDef.
      inputs: names of fed nodes or tensors.
      outputs: names of fetched nodes or tensors.
      transforms: names of transforms, with arguments in parentheses.
    Returns:
      A new GraphDef.
    Raises:
      NotImplementedError: a transform would change the results of the graph, such as quantize_weights.
    """
    graph = tf.GraphDef.FromString(input_graph_def.SerializeToString())
    for transform in transforms:
        name = re.match(r"\s*(\w*)", transform).group(1)
        if name == "strip_unused_nodes":
            graph = tf.graph_util.extract_sub_graph(graph, [output.partition(":")[0] for output in outputs])
        elif name in _SAVE_TIME:
            say_once(f"TransformGraph({name})", "left out: the graph computes the same without it")
        else:
            raise NotImplementedError(
                f"TransformGraph: {name} is not available here. Expected strip_unused_nodes or one of "
                f"{', '.join(_SAVE_TIME)}. Use tf.lite.TFLiteConverter to quantize a graph."
            )
    return graph
