"""Checks shapes and types of tensors: `tf.contrib.framework.python.framework.tensor_util`."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from npu_bridge.base.tf_internals import contrib

assert_same_float_dtype = tf.debugging.assert_same_float_dtype
assert_scalar = tf.debugging.assert_scalar


def assert_scalar_int(tensor, name=None):
    """Returns the tensor; raises ValueError if it is not a scalar integer."""
    tensor = tf.convert_to_tensor(tensor, name=name)
    if not tensor.dtype.base_dtype.is_integer:
        raise ValueError(f"assert_scalar_int: {tensor.name} is not a whole number; its type is {tensor.dtype.name}.")
    return tf.debugging.assert_scalar(tensor)


def convert_to_tensor_or_sparse_tensor(value, dtype=None, name=None):
    """Returns the value as a Tensor, or unchanged if it is a SparseTensor."""
    if isinstance(value, (tf.SparseTensor, tf.SparseTensorValue)):
        value = tf.SparseTensor.from_value(value) if isinstance(value, tf.SparseTensorValue) else value
        if dtype is not None and tf.as_dtype(dtype) != value.dtype:
            raise RuntimeError("convert_to_tensor_or_sparse_tensor: the sparse tensor has another type. Expected "
                               f"{tf.as_dtype(dtype).name}; got {value.dtype.name}.")  # fmt: skip
        return value
    return tf.convert_to_tensor(value, dtype, name)


def reduce_sum_n(tensors, name=None):
    """Returns the scalar sum of all elements of all tensors; raises ValueError for an empty list."""
    if not tensors:
        raise ValueError("reduce_sum_n: expected at least one tensor; got an empty list.")
    with tf.name_scope(name, "reduce_sum_n", tensors) as scope:
        sums = [tf.reduce_sum(tensor) for tensor in tensors]
        return sums[0] if len(sums) == 1 else tf.add_n(sums, name=scope)


def remove_squeezable_dimensions(predictions, labels, name=None):
    """Returns predictions and labels; if the rank of one is higher by 1, removes its last dimension of size 1."""
    return tuple(reversed(contrib.remove_squeezable_dimensions(labels, predictions, name)))


def with_shape(expected_shape, tensor):
    """Returns a tensor with a check of its shape.

    The check raises immediately if both shapes are known, else when the tensor is computed.

    Args:
      expected_shape: a list of integers, a partially known shape, or an integer tensor.
    """
    tensor = tf.convert_to_tensor(tensor)
    static = expected_shape if isinstance(expected_shape, tf.TensorShape) else None
    if static is None:
        is_tensor = tf.is_tensor(expected_shape)
        try:
            expected = tf.convert_to_tensor(expected_shape, name="shape")
        except TypeError as error:
            raise ValueError(f"with_shape: Invalid dtype of the shape expected of {tensor.name}; {error}") from None
        if not expected.dtype.is_integer:
            raise ValueError(f"with_shape: Invalid dtype {expected.dtype.name} of the shape expected of {tensor.name}.")
        if expected.shape.rank not in (1, None):
            raise ValueError(
                f"with_shape: Invalid rank {expected.shape.rank}; the expected shape for {tensor.name} is a vector."
            )
        static = tf.TensorShape(None) if is_tensor else tf.TensorShape(tf.get_static_value(expected).tolist())
    else:
        expected = tf.constant([-1 if size is None else size for size in static.as_list()])
    if static.rank is not None and tensor.shape.is_fully_defined():
        if not tensor.shape.is_compatible_with(static):
            raise ValueError(f"with_shape: {tensor.name} has the wrong shape. Expected {static}; got {tensor.shape}.")
        return tensor
    actual = tf.shape(tensor, out_type=expected.dtype)
    wanted = tf.where(expected < 0, actual, expected) if static.rank and not static.is_fully_defined() else expected
    # TensorFlow itself reports different ranks if both are known.
    is_right = tf.raw_ops.Equal(
        x=wanted, y=actual, incompatible_shape_error=None not in (static.rank, tensor.shape.rank)
    )
    is_right = tf.reduce_all(is_right) & tf.equal(tf.size(expected), tf.size(actual))
    wrong = f"Wrong shape for {tensor.name} [expected] [actual]."
    with tf.control_dependencies([tf.Assert(is_right, [wrong, expected, actual])]):
        checked = tf.identity(tensor)
    checked.set_shape(static)
    return checked


def with_same_shape(expected_tensor, tensor):
    """Returns a tensor with a check that it has the shape of `expected_tensor`."""
    with tf.name_scope("same_shape/"):
        expected = tf.convert_to_tensor(expected_tensor)
        shape = expected.shape if expected.shape.is_fully_defined() else tf.shape(expected)
        return with_shape(shape, tensor)
