"""Variables of a TF 1 graph that are kept in 16 bits, while the graph computes on them as on float32 ones.

What `tf.get_variable` and layers of `tf.layers` are given is the variable cast to float32, so nothing else in a model
has to change. Where the mode of the session computes in 16 bits, TensorFlow's rewriter takes that cast out again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

# Methods by which moving averages and the like change a variable.
_ASSIGNMENTS = ("assign", "assign_add", "assign_sub")


@contextlib.contextmanager
def stored_in(dtype: str, stays: Callable[[str], bool] = lambda name: False) -> Iterator[None]:
    """Inside, float32 variables that `tf.get_variable` makes are kept in "float16" or "bfloat16".

    They begin with the values of the float32 ones, rounded; those that `stays` knows by name remain as they are.
    `tf.Variable` is not concerned, nor are Keras layers.

    Graph: a cast for each variable.
    """

    def getter(getter, name, dtype=tf.float32, initializer=None, regularizer=None, **arguments):
        if initializer is not None and not callable(initializer):  # then its own dtype counts
            initializer = tf.convert_to_tensor(initializer)
            dtype = initializer.dtype
        if dtype is None or tf.as_dtype(dtype).base_dtype != tf.float32 or stays(name):
            return getter(name, dtype=dtype, initializer=initializer, regularizer=regularizer, **arguments)
        variable = getter(
            name,
            dtype=tf.as_dtype(narrow),
            initializer=_rounding(initializer, arguments.get("shape"), narrow),
            regularizer=None if regularizer is None else lambda value: regularizer(tf.cast(value, tf.float32)),
            **arguments,
        )
        return _as_float32(variable)

    narrow = dtype
    scope = tf.compat.v1.get_variable_scope()
    with tf.compat.v1.variable_scope(scope, custom_getter=getter, auxiliary_name_scope=False):
        yield


def _rounding(initializer: Any, shape: Any, dtype: str) -> Any:
    """An initializer that draws in float32: not all of them can in 16 bits."""
    if initializer is None:
        initializer = tf.compat.v1.glorot_uniform_initializer()
    if isinstance(initializer, type):
        initializer = initializer()
    if not callable(initializer):
        return tf.cast(initializer, dtype)
    if shape is None:  # then TensorFlow calls it without
        return lambda: tf.cast(initializer(), dtype)
    return lambda shape, dtype=dtype, partition_info=None: tf.cast(initializer(shape, dtype=tf.float32), dtype)


def _as_float32(variable: Any) -> tf.Tensor:
    """The value of a variable, which can also be assigned to, as moving averages are."""
    value = tf.cast(variable, tf.float32)

    def assign(method):
        dtype = variable.dtype.base_dtype
        return lambda change, *arguments, **keywords: method(tf.cast(change, dtype), *arguments, **keywords)

    for name in _ASSIGNMENTS:
        if hasattr(variable, name):
            setattr(value, name, assign(getattr(variable, name)))
    return value
