"""Defines batch normalisation layers for Keras models: entirely in 16 bits, or in float32 between 16-bit layers.

Keras keeps the four variables of a `BatchNormalization` in float32 under every policy, and applies them to 16-bit
inputs. `BatchNormalizationIn16Bits` does everything in 16 bits, `BatchNormalizationInFloat32` everything in float32.
Both have the configuration of Keras' layer, so a model can be rebuilt with either of them, and again with Keras' layer.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class BatchNormalizationIn16Bits(tf.keras.layers.BatchNormalization):
    """`tf.keras.layers.BatchNormalization` whose variables have the dtype of its policy, such as "float16".

    For images (four axes, channels last) the layer is one fused kernel with 16-bit inputs, which sums in float32.

    Args:
      **arguments: arguments of Keras' layer.
    Raises:
      ValueError: `renorm`, `virtual_batch_size`, `adjustment` or `synchronized` is set.
    """

    def __init__(self, **arguments: Any):
        for name in ("renorm", "virtual_batch_size", "adjustment", "synchronized"):
            if arguments.get(name):
                raise ValueError(
                    f"BatchNormalizationIn16Bits: {name} does not work in 16 bits. Expected no {name}; got "
                    f"{arguments[name]!r}. Keep batch normalisation in float32: keep_batchnorm_fp32=True."
                )
        super().__init__(**arguments)

    @property
    def _param_dtype(self):
        """The dtype in which Keras creates the variables."""
        return tf.as_dtype(self.variable_dtype)

    def call(self, inputs, training=None, mask=None):
        """Normalises as Keras does: with the statistics of the batch in training, else with the moving statistics."""
        inputs = tf.cast(inputs, self.compute_dtype)
        training = tf.keras.backend.learning_phase() if training is None else training
        if not self.trainable:
            training = False
        if isinstance(training, (bool, int)):
            return (
                self._normalise_with_batch_statistics(inputs, mask)
                if training
                else self._normalise_with_moving_statistics(inputs)
            )
        return tf.cond(
            tf.cast(training, tf.bool),
            lambda: self._normalise_with_batch_statistics(inputs, mask),
            lambda: self._normalise_with_moving_statistics(inputs),
        )

    def _normalise_with_batch_statistics(self, inputs, mask):
        if self._has_fused_kernel(inputs) and mask is None:
            scale, offset = self._scale_and_offset(tf.float32)
            outputs, mean, variance = tf.compat.v1.nn.fused_batch_norm(inputs, scale, offset, epsilon=self.epsilon)
        else:
            axes = [axis for axis in range(inputs.shape.rank) if axis not in self.axis]
            if mask is None:
                mean, variance = tf.nn.moments(inputs, axes, keepdims=True)
            else:
                weights = tf.cast(mask, inputs.dtype)
                weights = tf.reshape(
                    weights, tf.concat([tf.shape(weights), [1] * (inputs.shape.rank - mask.shape.rank)], 0)
                )
                mean, variance = tf.nn.weighted_moments(inputs, axes, weights, keepdims=True)
            outputs = self._apply_normalisation(inputs, mean, variance)
        for moving, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
            value = tf.reshape(tf.cast(value, moving.dtype), moving.shape)
            moving.assign_sub((moving - value) * tf.cast(1.0 - self.momentum, moving.dtype))
        return outputs

    def _normalise_with_moving_statistics(self, inputs):
        if not self._has_fused_kernel(inputs):
            return self._apply_normalisation(inputs, self.moving_mean, self.moving_variance)
        scale, offset = self._scale_and_offset(tf.float32)
        mean, variance = (tf.cast(moving, tf.float32) for moving in (self.moving_mean, self.moving_variance))
        return tf.compat.v1.nn.fused_batch_norm(
            inputs, scale, offset, mean, variance, epsilon=self.epsilon, is_training=False
        )[0]

    def _has_fused_kernel(self, inputs):
        return inputs.shape.rank == 4 and list(self.axis) == [3]

    def _scale_and_offset(self, dtype):
        """Returns gamma and beta; ones if the layer has no gamma, zeros if it has no beta."""
        shape = self.moving_mean.shape
        scale = tf.ones(shape, dtype) if self.gamma is None else tf.cast(self.gamma, dtype)
        return scale, tf.zeros(shape, dtype) if self.beta is None else tf.cast(self.beta, dtype)

    def _apply_normalisation(self, inputs, mean, variance):
        shape = [inputs.shape[axis] if axis in self.axis else 1 for axis in range(inputs.shape.rank)]
        parts = (mean, variance, *self._scale_and_offset(inputs.dtype))
        mean, variance, scale, offset = (tf.reshape(tf.cast(part, inputs.dtype), shape) for part in parts)
        return tf.nn.batch_normalization(inputs, mean, variance, offset, scale, self.epsilon)


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class BatchNormalizationInFloat32(tf.keras.layers.BatchNormalization):
    """`tf.keras.layers.BatchNormalization` that computes in float32 and casts its result to another dtype.

    Args:
      output_dtype: the dtype of the layer's output, such as "float16", for following layers that do not cast their
        inputs.
      **arguments: arguments of Keras' layer, whose policy must be float32.
    """

    output_dtype = "float32"

    def __init__(self, output_dtype: str = "float32", **arguments: Any):
        super().__init__(**arguments)
        self.output_dtype = output_dtype

    def call(self, inputs, training=None, mask=None):
        """Calls Keras' layer and casts the result."""
        return tf.cast(super().call(inputs, training=training, mask=mask), self.output_dtype)

    def get_config(self):
        """Returns the configuration of Keras' layer with `output_dtype` added."""
        return {**super().get_config(), "output_dtype": self.output_dtype}
