"""`tf.contrib.image`: geometric and colour transformations of images."""

from __future__ import annotations

import collections

import numpy as np
import tensorflow.compat.v1 as tf


def _as_batch(images):
    """Returns images of rank 2, 3 or 4 as [batch, height, width, channels]."""
    rank = images.shape.rank
    if rank not in (2, 3, 4):
        raise TypeError(f"tf.contrib.image: expected images of rank 2, 3 or 4; got rank {rank}.")
    return images[None, :, :, None] if rank == 2 else images[None] if rank == 3 else images


def _restore_rank(batch, images):
    rank = images.shape.rank
    result = batch[0, :, :, 0] if rank == 2 else batch[0] if rank == 3 else batch
    if images.dtype != result.dtype:
        result = tf.cast(result, images.dtype)
    return result


def transform(images, transforms, interpolation="NEAREST", output_shape=None, name=None):
    """Applies projective transformations to images.

    Args:
      images: [batch, height, width, channels], [height, width, channels] or [height, width].
      transforms: float32 [8] or [batch, 8]. (a0, a1, a2, b0, b1, b2, c0, c1) maps an output point (x, y) to the input
        point ((a0 x + a1 y + a2) / k, (b0 x + b1 y + b2) / k), where k = c0 x + c1 y + 1. Values outside the input are
        0.
      interpolation: "NEAREST" or "BILINEAR".
      output_shape: (height, width) of the output; by default the size of the images.

    Returns:
      Images of the same rank and type.
    """
    with tf.name_scope(name, "transform"):
        images = tf.convert_to_tensor(images)
        batch = _as_batch(images)
        transforms = tf.convert_to_tensor(transforms, tf.float32)
        transforms = transforms[None] if transforms.shape.rank == 1 else transforms
        shape = tf.shape(batch)[1:3] if output_shape is None else tf.convert_to_tensor(output_shape, tf.int32)
        done = tf.raw_ops.ImageProjectiveTransformV2(
            images=batch, transforms=transforms, output_shape=shape, interpolation=interpolation.upper()
        )
        fixed = tf.get_static_value(shape)
        done.set_shape([batch.shape[0], *(batch.shape[1:3] if output_shape is None else fixed), batch.shape[3]])
        return _restore_rank(done, images)


def rotate(images, angles, interpolation="NEAREST", name=None):
    """Rotates images counter-clockwise about their centre; `angles` in radians, a number or [batch]."""
    with tf.name_scope(name, "rotate"):
        images = tf.convert_to_tensor(images)
        shape = tf.cast(tf.shape(_as_batch(images)), tf.float32)
        return transform(images, angles_to_projective_transforms(angles, shape[1], shape[2]), interpolation)


def translate(images, translations, interpolation="NEAREST", name=None):
    """Shifts images; `translations` are (x, y) in pixels, [2] or [batch, 2]."""
    with tf.name_scope(name, "translate"):
        return transform(images, translations_to_projective_transforms(translations), interpolation)


def angles_to_projective_transforms(angles, image_height, image_width, name=None):
    """Returns transforms [batch, 8] that rotate images about their centre."""
    with tf.name_scope(name, "angles_to_projective_transforms"):
        angles = tf.convert_to_tensor(angles, tf.float32)
        angles = angles[None] if angles.shape.rank == 0 else angles
        height, width = tf.cast(image_height, tf.float32) - 1, tf.cast(image_width, tf.float32) - 1
        cos, sin = tf.cos(angles), tf.sin(angles)
        x_offset = (width - (cos * width - sin * height)) / 2
        y_offset = (height - (sin * width + cos * height)) / 2
        zeros = tf.zeros_like(cos)
        return tf.stack([cos, -sin, x_offset, sin, cos, y_offset, zeros, zeros], 1)


def translations_to_projective_transforms(translations, name=None):
    """Returns transforms [batch, 8] that shift images by (x, y) pixels."""
    with tf.name_scope(name, "translations_to_projective_transforms"):
        shift = tf.convert_to_tensor(translations, tf.float32)
        shift = shift[None] if shift.shape.rank == 1 else shift
        zeros, ones = tf.zeros_like(shift[:, 0]), tf.ones_like(shift[:, 0])
        return tf.stack([ones, zeros, -shift[:, 0], zeros, ones, -shift[:, 1], zeros, zeros], 1)


def flat_transforms_to_matrices(transforms):
    """Converts transforms [8] or [batch, 8] to matrices [batch, 3, 3]."""
    transforms = tf.reshape(tf.convert_to_tensor(transforms, tf.float32), [-1, 8])
    return tf.reshape(tf.concat([transforms, tf.ones_like(transforms[:, :1])], 1), [-1, 3, 3])


def matrices_to_flat_transforms(transform_matrices):
    """Converts matrices [3, 3] or [batch, 3, 3] to transforms [batch, 8]."""
    flat = tf.reshape(tf.convert_to_tensor(transform_matrices, tf.float32), [-1, 9])
    return (flat / flat[:, 8:9])[:, :8]


def compose_transforms(*transforms):
    """Returns one transform that has the effect of all given transforms applied in order."""
    if not transforms:
        raise ValueError("compose_transforms: expected at least one transform; got an empty list.")
    composed = flat_transforms_to_matrices(transforms[0])
    for each in transforms[1:]:
        composed = tf.matmul(composed, flat_transforms_to_matrices(each))
    return matrices_to_flat_transforms(composed)


_YIQ = np.array([[0.299, 0.596, 0.211], [0.587, -0.274, -0.523], [0.114, -0.322, 0.312]], np.float32)


def adjust_hsv_in_yiq(image, delta_hue=0, scale_saturation=1, scale_value=1, name=None):
    """Rotates the hue of images [..., 3] by `delta_hue` radians, and scales saturation and value, in YIQ colours."""
    with tf.name_scope(name, "adjust_hsv_in_yiq"):
        image = tf.convert_to_tensor(image)
        if image.shape.rank is not None and image.shape.rank < 3:
            raise ValueError(f"adjust_hsv_in_yiq: Shape must be at least rank 3; got {image.shape}.")
        if image.shape.rank is not None and image.shape[-1] not in (3, None):
            wrong = f"adjust_hsv_in_yiq: input must have 3 channels but instead has {image.shape[-1]} channels"
            raise tf.errors.InvalidArgumentError(None, None, wrong)
        flat = tf.image.convert_image_dtype(image, tf.float32)
        hue = tf.cast(delta_hue, tf.float32)
        part, scale = tf.cast(scale_saturation, tf.float32) * scale_value, tf.cast(scale_value, tf.float32)
        cos, sin, zero = part * tf.cos(hue), part * tf.sin(hue), tf.zeros([])
        turn = tf.stack([tf.stack([scale, zero, zero]), tf.stack([zero, cos, sin]), tf.stack([zero, -sin, cos])])
        matrix = tf.matmul(tf.matmul(_YIQ, turn), np.linalg.inv(_YIQ))
        adjusted = tf.tensordot(flat, matrix, 1)
        adjusted.set_shape(image.shape)
        return tf.image.convert_image_dtype(adjusted, image.dtype, saturate=True) if image.dtype.is_integer else (
            tf.cast(adjusted, image.dtype)
        )  # fmt: skip


def random_hsv_in_yiq(
    image, max_delta_hue=0, lower_saturation=1, upper_saturation=1, lower_value=1, upper_value=1, seed=None, name=None
):
    """Calls `adjust_hsv_in_yiq` with a random hue within +-`max_delta_hue` and random scales within their bounds."""
    if max_delta_hue < 0 or lower_saturation > upper_saturation or lower_value > upper_value:
        raise ValueError(
            "random_hsv_in_yiq: max_delta_hue must be at least 0, and lower bounds must not exceed upper bounds."
        )
    with tf.name_scope(name, "random_hsv_in_yiq"):

        def draw_uniform(low, high):
            return low if low == high else tf.random_uniform([], low, high, seed=seed)

        return adjust_hsv_in_yiq(
            image, draw_uniform(-max_delta_hue, max_delta_hue), draw_uniform(lower_saturation, upper_saturation),
            draw_uniform(lower_value, upper_value),
        )  # fmt: skip


BipartiteMatch = collections.namedtuple("BipartiteMatch", ("row_to_col_match_indices", "col_to_row_match_indices"))


def bipartite_match(distance_mat, num_valid_rows, top_k=-1, name="bipartite_match"):
    """Matches rows and columns greedily by smallest distance.

    Args:
      distance_mat: float32 [rows, columns].
      num_valid_rows: number of rows to match, from the first row on; a scalar or a list of one number.
      top_k: maximum number of matches; a negative number sets no limit.

    Returns:
      `BipartiteMatch(row_to_col_match_indices, col_to_row_match_indices)`: int32, -1 without a match.
    """
    with tf.name_scope(name, "bipartite_match"):
        distance = tf.convert_to_tensor(distance_mat, tf.float32)
        rows, columns = tf.shape(distance)[0], tf.shape(distance)[1]
        valid = tf.cast(tf.reshape(num_valid_rows, []), tf.int32)
        valid = tf.where(valid < 0, rows, valid)
        count = tf.minimum(tf.minimum(valid, columns), tf.where(tf.less(top_k, 0), columns, top_k))
        distance = tf.where(tf.broadcast_to((tf.range(rows) < valid)[:, None], [rows, columns]), distance,
                            tf.fill([rows, columns], np.float32(np.inf)))  # fmt: skip

        def match_nearest(done, distance, row_matches, column_matches):
            place = tf.argmin(tf.reshape(distance, [-1]), output_type=tf.int32)
            row, column = place // columns, place % columns
            at_row, at_column = tf.equal(tf.range(rows), row), tf.equal(tf.range(columns), column)
            taken = at_row[:, None] | at_column[None]
            return (
                done + 1, tf.where(taken, tf.fill([rows, columns], np.float32(np.inf)), distance),
                tf.where(at_row, tf.fill([rows], column), row_matches),
                tf.where(at_column, tf.fill([columns], row), column_matches),
            )  # fmt: skip

        start = (tf.constant(0), distance, tf.fill([rows], -1), tf.fill([columns], -1))
        _, _, row_matches, column_matches = tf.while_loop(lambda done, *_: done < count, match_nearest, start)
        row_matches.set_shape(distance.shape[:1])
        column_matches.set_shape(distance.shape[1:])
        return BipartiteMatch(row_matches, column_matches)


def dense_image_warp(image, flow, name="dense_image_warp"):
    """Samples images [batch, height, width, channels] at `(row, column) - flow`; `flow` is (row, column) in pixels."""
    import tensorflow_addons as tfa

    return tfa.image.dense_image_warp(image, flow, name=name)


def sparse_image_warp(
    image, source_control_point_locations, dest_control_point_locations, interpolation_order=2,
    regularization_weight=0.0, num_boundary_points=0, name="sparse_image_warp",
):  # fmt: skip
    """Warps images so that control points [batch, points, 2] move to their destination; returns images and flow."""
    import tensorflow_addons as tfa

    return tfa.image.sparse_image_warp(
        image, source_control_point_locations, dest_control_point_locations, interpolation_order,
        regularization_weight, num_boundary_points, name,
    )  # fmt: skip


def interpolate_spline(
    train_points, train_values, query_points, order, regularization_weight=0.0, name="interpolate_spline"
):
    """Returns the values at query points of a polyharmonic spline through training points."""
    import tensorflow_addons as tfa

    return tfa.image.interpolate_spline(train_points, train_values, query_points, order, regularization_weight, name)


def connected_components(images):
    """Returns the number of each pixel's component, as int32 in the shape of the images; 0 for zero pixels.

    A component consists of connected pixels with equal non-zero values. Components are numbered from 1 over all images,
    in the order of their first pixels.
    """
    images = tf.convert_to_tensor(images)
    batch = images[None] if images.shape.rank == 2 else images
    size = tf.size(batch, out_type=tf.int64)
    places = tf.reshape(tf.range(size), tf.shape(batch))
    background = tf.equal(batch, tf.zeros_like(batch))
    around = ((0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0))

    def shifted_to_neighbours(tensor, fill):
        height, width = tf.shape(tensor)[1], tf.shape(tensor)[2]
        for top, bottom, left, right in around:
            padded = tf.pad(tensor, [[0, 0], [top, bottom], [left, right]], constant_values=fill)
            yield padded[:, bottom : bottom + height, right : right + width]

    is_inside = [tf.equal(each, tf.ones_like(each)) for each in shifted_to_neighbours(tf.ones_like(places), 0)]
    codes = tf.cast(batch, tf.int32) if batch.dtype == tf.bool else batch
    joined = [tf.equal(each, codes) & inside for each, inside in zip(shifted_to_neighbours(codes, 0), is_inside)]

    def take_smallest_neighbour(labels, _):
        new = labels
        for each, may in zip(shifted_to_neighbours(labels, 0), joined):
            new = tf.where(may, tf.minimum(new, each), new)
        return new, tf.reduce_any(tf.not_equal(new, labels))

    # Each pixel takes the smallest number around it until no number changes.
    labels, _ = tf.while_loop(lambda _, moved: moved, take_smallest_neighbour, (places, tf.constant(True)))
    is_first = tf.reshape(tf.equal(labels, places) & ~background, [-1])
    numbers = tf.gather(tf.cumsum(tf.cast(is_first, tf.int32)), labels)
    found = tf.where(background, tf.zeros_like(numbers), numbers)
    return found[0] if images.shape.rank == 2 else found
