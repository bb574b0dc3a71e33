"""Computes index operators: scatter updates, indices of non-zero elements, random choices and nearest centroids."""

from __future__ import annotations

from typing import Any

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.operators.dropping import stateless_seed


def scatter_elements(data: Any, indices: Any, updates: Any, axis: int, where: str) -> tf.Tensor:
    """Returns data with elements replaced along an axis: for axis 1, out[i][indices[i][j]] = updates[i][j]."""
    data, updates = tf.convert_to_tensor(data), tf.convert_to_tensor(updates)
    indices = tf.cast(indices, tf.int64)
    if not indices.shape.is_compatible_with(updates.shape):
        got = f"shapes {indices.shape} and {updates.shape}"
        raise ValueError(
            message(where, "indices and updates differ in shape", "one shape", got, "Give one index for each update.")
        )
    rank = data.shape.rank
    if not -rank <= axis < rank:
        raise ValueError(
            message(where, "axis is out of range", f"{-rank} to {rank - 1}", str(axis), "Give an axis of data.")
        )
    shape = tf.shape(indices, tf.int64)
    places = tf.meshgrid(*[tf.range(shape[i]) for i in range(rank)], indexing="ij")
    places[axis] = indices
    return tf.tensor_scatter_nd_update(data, tf.stack(places, axis=-1), updates)


def nonzero(x: Any, transpose: bool, dtype: Any) -> tf.Tensor:
    """Returns the indices of the non-zero elements: one column for each element, or one row with `transpose`."""
    rows = tf.cast(tf.where(tf.cast(x, tf.bool)), dtype)
    return rows if transpose else tf.transpose(rows)


def nonzero_with_value(x: Any, transpose: bool, dtype: Any, where: str) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the non-zero elements, their indices and their number.

    Elements and indices are padded with 0 to a shape that depends only on the shape of x. The indices are first all
    rows, then all columns; with `transpose`, row and column alternate.
    """
    x = tf.convert_to_tensor(x)
    if x.shape.rank != 2:
        raise ValueError(message(where, "x is not a matrix", "2 axes", f"shape {x.shape}", "Reshape x."))
    places = tf.where(tf.cast(x, tf.bool))
    size, count = tf.size(x), tf.shape(places)[0]
    values = tf.pad(tf.gather_nd(x, places), [[0, size - count]])
    padded = tf.pad(places, [[0, size - count], [0, 0]])
    indices = tf.reshape(padded if transpose else tf.transpose(padded), [-1])
    values.set_shape([x.shape.num_elements()])
    return values, tf.cast(indices, dtype), tf.cast(count[tf.newaxis], dtype)


def random_choice(x: Any, count: int, seed: int, seed2: int, where: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Chooses positions where x is True; returns `count` rows of indices, and a mask of rows that are not padding."""
    return _choose_positions(
        x, count, lambda shape: tf.raw_ops.RandomUniform(shape=shape, dtype=tf.float32, seed=seed, seed2=seed2), where
    )


def stateless_random_choice(x: Any, count: int, seed: Any, offset: Any, where: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Chooses positions as `random_choice` does; the same seed and offset always choose the same positions."""
    return _choose_positions(
        x, count, lambda shape: tf.random.stateless_uniform(shape, stateless_seed(seed, offset)), where
    )


def _choose_positions(x, count, draw, where):
    if count < 0:
        raise ValueError(message(where, "count is negative", "0 or more", str(count), "Use 0 for all positions."))
    places = tf.cast(tf.where(tf.cast(x, tf.bool)), tf.int32)
    found = tf.shape(places)[0]
    shuffled = tf.gather(places, tf.argsort(draw(found[tf.newaxis])))
    if count == 0:
        return shuffled, tf.ones([found], tf.bool)
    taken = tf.minimum(found, count)
    chosen = tf.pad(shuffled[:taken], [[0, count - taken], [0, 0]])
    chosen.set_shape([count, None])
    return chosen, tf.range(count) < taken


def k_means_step(
    rows: Any, centroids: Any, square_centroids: Any, square_rows: Any | None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the sums [n, d] and numbers [n, 1] of rows nearest to each centroid, and the total squared distance [1].

    Rows are [m, d], centroids [n, d]. Without `square_rows`, the total lacks the squares of the rows.
    """
    rows, centroids = tf.convert_to_tensor(rows), tf.convert_to_tensor(centroids)
    distances = square_centroids - 2 * tf.matmul(rows, centroids, transpose_b=True)
    if square_rows is not None:
        distances += square_rows
    nearest = tf.one_hot(tf.argmin(distances, axis=1), tf.shape(centroids)[0], dtype=rows.dtype)
    sums = tf.matmul(nearest, rows, transpose_a=True)
    counts = tf.reduce_sum(nearest, axis=0)[:, tf.newaxis]
    return sums, counts, tf.reduce_sum(tf.reduce_min(distances, axis=1))[tf.newaxis]
