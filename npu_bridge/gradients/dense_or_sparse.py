"""Small operations that keep a dense gradient dense and a sparse one sparse."""

from __future__ import annotations

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


def sum_repeated_rows(grad: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same sparse gradient with every row index once: rows that share an index are added up."""
    indices, position = tf.unique(grad.indices)
    values = tf.math.unsorted_segment_sum(grad.values, position, tf.size(indices))
    return tf.IndexedSlices(values, indices, grad.dense_shape)
