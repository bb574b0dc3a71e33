"""Stores variables of a TF 1 graph in 16 bits, while the graph uses their values as float32.

`tf.get_variable` and layers of `tf.layers` get the variable's value cast to float32, so nothing else in a model has to
change. If the precision mode computes in 16 bits, TensorFlow's rewriter removes this cast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

# Methods with which moving averages and the like change a variable.
_ASSIGNMENTS = ("assign", "assign_add", "assign_sub")


@contextlib.contextmanager
def get_variable_stored_in(dtype: str, stays_float32: Callable[[str], bool] = lambda name: False) -> Iterator[None]:
    """Makes `tf.get_variable`, in a block, store float32 variables in "float16" or "bfloat16".

    The variables start with rounded float32 values. Variables remain float32 if `stays_float32` returns True
    for their name.
    `tf.Variable` and Keras layers are not affected.

    Graph: a cast for each variable.
    """

    def getter(getter, name, dtype=tf.float32, initializer=None, regularizer=None, **arguments):
        if initializer is not None and not callable(initializer):  # then its own dtype counts
            initializer = tf.convert_to_tensor(initializer)
            dtype = initializer.dtype
        if dtype is None or tf.as_dtype(dtype).base_dtype != tf.float32 or stays_float32(name):
            return getter(name, dtype=dtype, initializer=initializer, regularizer=regularizer, **arguments)
        variable = getter(
            name,
            dtype=tf.as_dtype(narrow),
            initializer=_with_rounding(initializer, arguments.get("shape"), narrow),
            regularizer=None if regularizer is None else lambda value: regularizer(tf.cast(value, tf.float32)),
            **arguments,
        )
        return _as_float32(variable)

    narrow = dtype
    scope = tf.compat.v1.get_variable_scope()
    with tf.compat.v1.variable_scope(scope, custom_getter=getter, auxiliary_name_scope=False):
        yield


def _with_rounding(initializer: Any, shape: Any, dtype: str) -> Any:
    """Wraps an initializer to compute in float32 and round, because not all initializers can compute in 16 bits."""
    if initializer is None:
        initializer = tf.compat.v1.glorot_uniform_initializer()
    if isinstance(initializer, type):
        initializer = initializer()
    if not callable(initializer):
        return tf.cast(initializer, dtype)
    if shape is None:  # then TensorFlow calls the initializer without a shape
        return lambda: tf.cast(initializer(), dtype)
    return lambda shape, dtype=dtype, partition_info=None: tf.cast(initializer(shape, dtype=tf.float32), dtype)


def _as_float32(variable: Any) -> tf.Tensor:
    """Returns the float32 value of a variable, with `assign` methods, which moving averages call."""
    value = tf.cast(variable, tf.float32)

    def assign(method):
        dtype = variable.dtype.base_dtype
        return lambda change, *arguments, **keywords: method(tf.cast(change, dtype), *arguments, **keywords)

    for name in _ASSIGNMENTS:
        if hasattr(variable, name):
            setattr(value, name, assign(getattr(variable, name)))
    return value
