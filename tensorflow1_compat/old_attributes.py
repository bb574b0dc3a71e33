"""Attributes that tensors and models had for scripts of TensorFlow 1.15 and the Keras of its time.

They are set on the real classes, which everybody sees; what a class has by itself stays, but for one check of Keras.
"""

from __future__ import annotations

import types
from typing import Any

from npu_bridge.base.after_import import when_loaded

__all__ = ["give"]


def give() -> None:
    """Gives the attributes; those of Keras once Keras has been loaded."""
    import tensorflow.compat.v1 as tf

    _set(tf.Tensor, "_keras_shape", property(_shape_of, _set_shape))
    _set(tf.Tensor, "_uses_learning_phase", False)
    when_loaded("keras.src.engine.base_layer_v1", lambda module: _set(module.Layer, "apply", _apply))
    when_loaded("keras.src.engine.sequential", _complete_models)
    convolutions = "keras.src.layers.convolutional.base"
    when_loaded(f"{convolutions}_separable_conv", lambda module: _allow_dilated_strides(module.SeparableConv))
    when_loaded(f"{convolutions}_depthwise_conv", lambda module: _allow_dilated_strides(module.DepthwiseConv))


def _set(kind: type, name: str, value: Any) -> None:
    if not hasattr(kind, name):
        setattr(kind, name, value)


def _complete_models(module: types.ModuleType) -> None:
    _set(module.Sequential, "predict_classes", _predict_classes)
    _set(module.Sequential, "predict_proba", _predict_proba)


def _allow_dilated_strides(kind: type) -> None:
    """Lets a layer have strides and a dilation above 1: 1.15 refused that in its plain convolutions alone."""

    def check(self: Any) -> None:
        dilation, self.dilation_rate = self.dilation_rate, (1,)
        try:
            super(kind, self)._validate_init()
        finally:
            self.dilation_rate = dilation

    kind._validate_init = check


def _shape_of(tensor: Any) -> tuple:
    """The static shape as Keras 2.2 wrote it: a tuple with None for what is not known."""
    return vars(tensor).get("_own_keras_shape") or tuple(tensor.shape.as_list())


def _set_shape(tensor: Any, shape: Any) -> None:
    vars(tensor)["_own_keras_shape"] = tuple(shape)


def _apply(self: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
    """The layer's outputs."""
    return self(inputs, *arguments, **options)


def _predict_proba(self: Any, x: Any, batch_size: int | None = None, verbose: int = 0, steps: int | None = None) -> Any:
    """The model's outputs."""
    return self.predict(x, batch_size=batch_size, verbose=verbose, steps=steps)


def _predict_classes(
    self: Any, x: Any, batch_size: int | None = None, verbose: int = 0, steps: int | None = None
) -> Any:
    """The place of the largest output; of a single output, whether it is above 0.5, as 0 or 1."""
    found = self.predict(x, batch_size=batch_size, verbose=verbose, steps=steps)
    return found.argmax(-1) if found.shape[-1] > 1 else (found > 0.5).astype("int32")
