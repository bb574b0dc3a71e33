"""Defines functions of Keras 1 and 2 that Keras 2.15 lacks."""

from __future__ import annotations

import logging

import tensorflow.compat.v1 as tf

from npu_bridge.base.errors import say_once
from npu_bridge.base.tf_internals.contrib import keras_engine_classes

Network, InputLayer, InputSpec = keras_engine_classes()
keras = tf.keras
Layer, Model, Input = keras.layers.Layer, keras.models.Model, keras.layers.Input
get_session, set_session = keras.backend.get_session, keras.backend.set_session
get_source_inputs = keras.utils.get_source_inputs
Deconvolution2D, Deconvolution3D = keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose


def multi_gpu_model(model, gpus=None, cpu_merge=True, cpu_relocation=False):
    """Returns the model unchanged; each rank trains it on one device."""
    say_once(logging.WARNING, "multi_gpu_model: the model stays on one device; its batches are not split.")
    return model


def image_dim_ordering():
    """Returns the position of the channel axis in images: "tf" for last, "th" for first."""
    return {"channels_last": "tf", "channels_first": "th"}[keras.backend.image_data_format()]


def set_image_dim_ordering(dim_ordering):
    """Sets the position of the channel axis in images: "tf" for last, "th" for first."""
    keras.backend.set_image_data_format({"tf": "channels_last", "th": "channels_first"}[dim_ordering])


def legacy_get_updates_support(function):
    """Returns the method `get_updates` of an optimizer unchanged; `legacy_add_weight_support` is the same."""
    return function


legacy_add_weight_support = legacy_get_updates_support
