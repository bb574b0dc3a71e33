"""Runs an operator as people do: eagerly and in a TF 1 graph, with its gradients."""

from __future__ import annotations

import contextlib

import numpy as np
import tensorflow as tf

# The allowed difference when a formula is computed in another order, in units of the dtype's last place around 1.
PLACES = 16
# Long enough for the differences of float32, short enough for their limit.
STEP = 5e-3


@contextlib.contextmanager
def tf1_graph():
    """Opens a graph with the sizes and loops of scripts that switch TensorFlow 2 off."""
    tf.compat.v1.disable_v2_tensorshape()
    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            yield graph
    finally:
        tf.compat.v1.enable_control_flow_v2()
        tf.compat.v1.enable_v2_tensorshape()


def computed(function, *arrays):
    """Returns the result of a function of tensors, as numpy; the same eagerly and in a TF 1 graph."""
    eagerly = tf.nest.map_structure(np.asarray, function(*map(tf.constant, arrays)))
    with tf1_graph(), tf.compat.v1.Session() as session:
        placeholders = [tf.compat.v1.placeholder(array.dtype, array.shape) for array in map(np.asarray, arrays)]
        in_graph = session.run(function(*placeholders), dict(zip(placeholders, arrays)))
    for one, other in zip(tf.nest.flatten(eagerly), tf.nest.flatten(in_graph)):
        close(one, other)
    return eagerly


def close(actual, expected):
    """Asserts that arrays are equal except for rounding, with equal shapes and dtypes."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if actual.dtype.kind != "f":
        np.testing.assert_array_equal(actual, expected)
        return
    tolerance = PLACES * np.finfo(actual.dtype).eps
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * max(1, np.abs(expected).max()))


def differentiable(function, *arrays):
    """Asserts that the gradient in random directions is the limit of differences in these directions."""
    random = np.random.default_rng(len(arrays))
    given = [tf.constant(array) for array in arrays]
    weights = random.normal(size=function(*given).shape)

    @tf.function
    def weighted(*values):
        return tf.reduce_sum(function(*values) * tf.cast(weights, given[0].dtype))

    with tf.GradientTape() as tape:
        tape.watch(given)
        value = weighted(*given)
    for place, gradient in enumerate(tape.gradient(value, given)):
        direction = tf.constant(random.normal(size=gradient.shape), gradient.dtype)
        ahead, behind = (
            weighted(*given[:place], given[place] + step * direction, *given[place + 1 :]) for step in (STEP, -STEP)
        )
        slope = tf.reduce_sum(gradient * direction)
        assert abs(slope) > 1e-3
        np.testing.assert_allclose(slope, (ahead - behind) / (2 * STEP), rtol=5e-3, atol=1e-3)
