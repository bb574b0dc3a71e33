"""Small operations that keep a dense gradient dense and a sparse one sparse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable

import tensorflow as tf


def map_values(grad: Any, transform: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Applies `transform` to a dense gradient, or to the values of a sparse one."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(transform(grad.values), grad.indices, grad.dense_shape)
    return transform(grad)


def values_of(grad: Any) -> tf.Tensor:
    """The dense tensor itself, or the values of a sparse gradient."""
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def parts_of(grad: Any) -> list:
    """The tensors that a gradient is made of: itself, or values and indices."""
    return [grad.values, grad.indices] if isinstance(grad, tf.IndexedSlices) else [grad]


def rebuilt(grad: Any, variable: Any, parts: Iterator[tf.Tensor]) -> Any:
    """A gradient of the kind and shape of `grad`, made of the next of `parts`."""
    if not isinstance(grad, tf.IndexedSlices):
        return tf.ensure_shape(next(parts), grad.shape)
    return tf.IndexedSlices(next(parts), next(parts), tf.constant(variable.shape.as_list()))


def nothing_like(grad: Any, variable: Any) -> Any:
    """Zeros in the shape of the variable, or a sparse gradient without rows."""
    if not isinstance(grad, tf.IndexedSlices):
        return tf.zeros(variable.shape, grad.dtype)
    shape = variable.shape.as_list()
    return tf.IndexedSlices(
        tf.zeros([0, *shape[1:]], grad.dtype), tf.zeros([0], grad.indices.dtype), tf.constant(shape)
    )


def sum_repeated_rows(grad: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same sparse gradient with every row index once: rows that share an index are added up."""
    indices, position = tf.unique(grad.indices)
    values = tf.math.unsorted_segment_sum(grad.values, position, tf.size(indices))
    return tf.IndexedSlices(values, indices, grad.dense_shape)
