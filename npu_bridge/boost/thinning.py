"""Implements `less_batch_norm`, which removes batch normalisations from models and graphs."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from npu_bridge.base.arguments import check_instance
from npu_bridge.boost.batch_norm_of_graphs import remove_batch_norms_of_graph
from npu_bridge.boost.batch_norm_of_models import (
    copy_without_layers,
    reason_not_functional,
    remove_batch_norms_of_model,
)
from npu_bridge.boost.batch_norm_patterns import ThinningReport
from npu_bridge.operators.cosine_head import CosineHead


class ThinningResult(NamedTuple):
    """The result of `less_batch_norm`.

    Attributes:
      model: the new model, or the graph.
      report: the removed normalisations, or why none was removed; `report.text()` returns it as text.
    """

    model: Any
    report: ThinningReport


def less_batch_norm(model: Any) -> ThinningResult:
    """Removes batch normalisations that residual and dense blocks do not need, and keeps the other weights.

    A residual block (basic or bottleneck block of a ResNet) loses its inner normalisations and the normalisation of its
    shortcut, and keeps the last one before the addition. An inverted residual block (MobileNetV2) that ends in an
    addition loses the normalisation after the expansion. A DenseNet block loses the normalisation between its two
    convolutions. All other blocks stay unchanged, and the report says why. The outputs of a trained model change, so
    continue its training, or train from the start.

    Args:
      model: a functional Keras model, which stays unchanged; the result is a new model, not compiled. Or a `tf.Graph`,
        which is changed: call this after building the network and before `compute_gradients`. Change the graph for
        evaluation, too.
    Raises:
      TypeError: `model` is neither a Keras model nor a graph.
      ValueError: the graph has been differentiated already.
    """
    if isinstance(model, tf.Graph):
        return ThinningResult(model, remove_batch_norms_of_graph(model))
    fix = "Pass the model, or tf.compat.v1.get_default_graph()."
    check_instance("less_batch_norm", "model", model, tf.keras.Model, "a Keras model or a tf.Graph", fix)
    return ThinningResult(*remove_batch_norms_of_model(model))


def with_cosine_head(model: tf.keras.Model) -> tuple[tf.keras.Model, str]:
    """Replaces a model's last dense layer by a `CosineHead` with the same kernel and no bias.

    Returns:
      (new model, line about the change). A model that is not functional, or has no dense layer, is returned unchanged.
    """
    if reason := reason_not_functional(model):
        return model, f"no cosine head, because {reason}"
    dense = [layer for layer in model.layers if type(layer) is tf.keras.layers.Dense]
    if not dense:
        return model, "no cosine head, because there is no dense layer"
    last = dense[-1]
    head = CosineHead(
        last.units,
        activation=last.activation,
        kernel_initializer=last.kernel_initializer,
        kernel_regularizer=last.kernel_regularizer,
        kernel_constraint=last.kernel_constraint,
        name=last.name,
        dtype=last.dtype_policy,
    )
    made = copy_without_layers(model, (), {last.name: head})
    made.get_layer(last.name).set_weights([last.get_weights()[0], 1.0])
    return made, f"{last.name} compares by angles now, {'without its bias' if last.use_bias else 'it had no bias'}"
