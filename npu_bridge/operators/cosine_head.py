"""Provides a last layer for classifiers: cosines between the inputs and the weights of each class."""

from __future__ import annotations

from typing import Any

from npu_bridge.base.arguments import check_count, check_number
from npu_bridge.base.own_tensorflow import tf


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class CosineHead(tf.keras.layers.Layer):
    """A dense layer whose outputs are cosines, multiplied by one trained factor.

    With x a row of the input, w_j the weights of output j and s the multiplier:

        y_j = s * (x / |x|) . (w_j / |w_j|)

    Args:
      units: number of outputs, at least 1.
      activation: as in `tf.keras.layers.Dense`; none by default.
      kernel_initializer, kernel_regularizer, kernel_constraint: as in `tf.keras.layers.Dense`, for the kernel, which is
        called `cosine_kernel` and has the shape (inputs, units).
      multiplier: the initial value of s.
      **keywords: arguments of `tf.keras.layers.Layer`.
    Raises:
      TypeError: `units` is not an integer, or `multiplier` not a number.
      ValueError: `units` is below 1, or `multiplier` not finite.
    """

    def __init__(
        self,
        units: int,
        activation: Any = None,
        kernel_initializer: Any = "glorot_uniform",
        kernel_regularizer: Any = None,
        kernel_constraint: Any = None,
        multiplier: float = 1.0,
        **keywords: Any,
    ):
        super().__init__(**keywords)
        self.units = check_count("CosineHead", "units", units, "Give the number of classes.")
        self.activation = tf.keras.activations.get(activation)
        self.kernel_initializer = tf.keras.initializers.get(kernel_initializer)
        self.kernel_regularizer = tf.keras.regularizers.get(kernel_regularizer)
        self.kernel_constraint = tf.keras.constraints.get(kernel_constraint)
        self.start = check_number("CosineHead", "multiplier", multiplier, "Leave multiplier out for 1.0.")

    def build(self, input_shape):
        self.kernel = self.add_weight(
            name="cosine_kernel",
            shape=(input_shape[-1], self.units),
            initializer=self.kernel_initializer,
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
        )
        self.multiplier = self.add_weight(
            name="multiplier", shape=(), initializer=tf.keras.initializers.Constant(self.start)
        )
        super().build(input_shape)

    def call(self, inputs):
        """Returns the outputs; only the last axis differs from the shape of the inputs."""
        cosines = tf.tensordot(_normalise(inputs, -1), _normalise(self.kernel, 0), [[-1], [0]])
        return self.activation(self.multiplier * cosines)

    def compute_output_shape(self, input_shape):
        return tf.TensorShape([*tf.TensorShape(input_shape)[:-1], self.units])

    def get_config(self):
        return {
            **super().get_config(),
            "units": self.units,
            "activation": tf.keras.activations.serialize(self.activation),
            "kernel_initializer": tf.keras.initializers.serialize(self.kernel_initializer),
            "kernel_regularizer": tf.keras.regularizers.serialize(self.kernel_regularizer),
            "kernel_constraint": tf.keras.constraints.serialize(self.kernel_constraint),
            "multiplier": self.start,
        }


def _normalise(vectors, axis):
    """Divides vectors by their norms; 16 bits in float32, where a norm neither overflows nor becomes zero."""
    vectors = tf.convert_to_tensor(vectors)
    wide = tf.cast(vectors, tf.float32) if vectors.dtype.size < tf.float32.size else vectors
    return tf.cast(tf.nn.l2_normalize(wide, axis), vectors.dtype)
