"""Rebuilds functional Keras models without some batch normalisations, or with another last layer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tensorflow as tf

from npu_bridge.base.tf_internals.names import KERAS
from npu_bridge.base.tf_internals.training import is_graph_network
from npu_bridge.boost import batch_norm_patterns as patterns

_KINDS = {
    "Activation": patterns.ACT,
    "Add": patterns.ADD,
    "BatchNormalization": patterns.NORM,
    "Concatenate": patterns.CONCAT,
    "Conv2D": patterns.CONV,
    "DepthwiseConv2D": patterns.DEPTHWISE,
    "Dropout": patterns.PASS,
    "LeakyReLU": patterns.ACT,
    "ReLU": patterns.ACT,
    "SyncBatchNormalization": patterns.NORM,
    "ZeroPadding2D": patterns.PASS,
}

# Functions of TensorFlow that a model can call between layers, such as `x + y`.
_SUMS = ("__operators__.add", "math.add")


def list_nodes_by_name(model: tf.keras.Model) -> dict[str, patterns.Node]:
    """Returns a functional model's layers as `patterns.Node` by name; a layer called twice has the kind OTHER."""
    nodes = {}
    for layer in model.get_config()["layers"]:
        calls = _find_calls(layer)
        sources = tuple(dict.fromkeys(name for call in calls for name in call))
        is_sum = layer["config"].get("function") in _SUMS
        kind = patterns.ADD if is_sum else _KINDS.get(layer["class_name"], patterns.OTHER)
        kind = kind if len(calls) == 1 else patterns.OTHER
        nodes[layer["name"]] = patterns.Node(kind, sources)
    return nodes


def reason_not_functional(model: Any) -> str:
    """Returns why a model cannot be rewritten; "" if it can."""
    if not isinstance(model, tf.keras.Model):
        return f"{type(model).__name__} is not a Keras model"
    if isinstance(model, tf.keras.Sequential):
        return "layers of a Sequential model follow each other, so it has no residual or dense block"
    if not is_graph_network(model) or not type(model).__module__.startswith(f"{KERAS}."):
        return f"{type(model).__name__} is not a functional model, which alone tells how its layers are connected"
    return ""


def copy_without_layers(
    model: tf.keras.Model, removed_names: Collection[str], replaced: dict[str, tf.keras.layers.Layer] | None = None
) -> tf.keras.Model:
    """Builds a copy of a functional model, with its weights, in which some layers are removed or replaced.

    Args:
      model: the functional model, which stays unchanged.
      removed_names: names of the removed layers, whose input and output must have the same shape.
      replaced: new layers, with their own weights, by the names of the layers that they replace.
    """
    config = model.get_config()
    source = {layer["name"]: _find_calls(layer)[0][0] for layer in config["layers"] if layer["name"] in removed_names}

    def redirect_references(part):
        if isinstance(part, (list, tuple)):
            if _is_reference(part) and part[0] in source:
                part = [_remaining_source(part[0], source), *part[1:]]
            return type(part)(redirect_references(element) for element in part)
        if isinstance(part, dict):
            return {key: redirect_references(value) for key, value in part.items()}
        return part

    replaced = replaced or {}
    for key in ("input_layers", "output_layers"):
        config[key] = redirect_references(config[key])
    config["layers"] = [layer for layer in config["layers"] if layer["name"] not in removed_names]
    for layer in config["layers"]:
        layer["inbound_nodes"] = redirect_references(layer["inbound_nodes"])
        if layer["name"] in replaced:
            layer.update(tf.keras.layers.serialize(replaced[layer["name"]]), name=layer["name"])
    known = {type(layer).__name__: type(layer) for layer in [*model.layers, *replaced.values()]}
    made = tf.keras.Model.from_config(config, custom_objects=known)
    for layer in made.layers:
        if layer.name not in replaced:
            layer.set_weights(model.get_layer(layer.name).get_weights())
    return made


def remove_batch_norms_of_model(model: tf.keras.Model) -> tuple[tf.keras.Model, patterns.ThinningReport]:
    """Returns a copy of a model without its removable batch normalisations; `model` itself if it has none."""
    if reason := reason_not_functional(model):
        return model, patterns.ThinningReport({}, 0, reason)
    nodes = list_nodes_by_name(model)
    report = patterns.make_report(
        nodes, patterns.match_blocks(nodes, set(_layer_names_in(model.get_config()["output_layers"])))
    )
    return (copy_without_layers(model, report.removed) if report.removed else model), report


def _find_calls(layer):
    """Returns a list for each call of a layer: the names of its input layers."""
    return [list(_layer_names_in(call)) for call in layer["inbound_nodes"]]


def _layer_names_in(config_part):
    if isinstance(config_part, (list, tuple)):
        if _is_reference(config_part):
            yield config_part[0]
            config_part = config_part[3:]
        for element in config_part:
            yield from _layer_names_in(element)
    elif isinstance(config_part, dict):
        for element in config_part.values():
            yield from _layer_names_in(element)


def _is_reference(part):
    """Returns whether a list refers to a layer's output, by the layer's name, the call number and the output number."""
    return len(part) >= 3 and isinstance(part[0], str) and all(isinstance(number, int) for number in part[1:3])


def _remaining_source(name, source):
    while name in source:
        name = source[name]
    return name
