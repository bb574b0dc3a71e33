"""Computes with gradients: division by the loss scale, norms, their order; sums and gathers rows of sparse ones."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Callable

from npu_bridge.base.own_tensorflow import tf


def as_gradient(value: Any, variable: Any) -> Any:
    """Converts a gradient given as an array, a list or a variable to a tensor; None stays None."""
    if value is None or isinstance(value, tf.Tensor):
        return value
    if isinstance(value, tf.IndexedSlices):
        parts = (value.values, value.indices, value.dense_shape)
        if all(part is None or isinstance(part, tf.Tensor) for part in parts):
            return value
        return tf.IndexedSlices(*(None if part is None else tf.convert_to_tensor(part) for part in parts))
    dtype = None if tf.is_tensor(value) else getattr(variable, "dtype", None)
    return tf.convert_to_tensor(value, None if dtype is None else tf.as_dtype(dtype).base_dtype)


def map_values(grad: Any, transform: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Applies `transform` to a dense gradient, or to the values of a sparse gradient."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(transform(grad.values), grad.indices, grad.dense_shape)
    return transform(grad)


def is_16_bit(variable: Any) -> bool:
    """Returns whether a variable holds 16-bit numbers."""
    dtype = tf.as_dtype(variable.dtype).base_dtype
    return dtype.is_floating and dtype.size < tf.float32.size


def widen(values: tf.Tensor) -> tf.Tensor:
    """Converts values of fewer than 32 bits to float32; other values stay unchanged."""
    return tf.cast(values, tf.float32) if values.dtype.size < tf.float32.size else values


def gradient_values(grad: Any) -> tf.Tensor:
    """Returns the values of a sparse gradient, or a dense gradient unchanged."""
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def gradient_parts(grad: Any) -> list:
    """Returns the tensors of a gradient as a list: the dense gradient, or values and indices of a sparse one."""
    return [grad.values, grad.indices] if isinstance(grad, tf.IndexedSlices) else [grad]


def gradient_from_parts(grad: Any, variable: Any, parts: Iterator[tf.Tensor]) -> Any:
    """Builds a gradient from the next tensors of `parts`: one if `grad` is dense, two if it is sparse."""
    if not isinstance(grad, tf.IndexedSlices):
        return tf.ensure_shape(next(parts), grad.shape)
    return tf.IndexedSlices(next(parts), next(parts), tf.constant(variable.shape.as_list()))


def zero_gradient_like(grad: Any, variable: Any) -> Any:
    """Returns a zero gradient for a variable: dense zeros, or no rows if `grad` is sparse."""
    if not isinstance(grad, tf.IndexedSlices):
        return tf.zeros(variable.shape, grad.dtype)
    shape = variable.shape.as_list()
    return tf.IndexedSlices(
        tf.zeros([0, *shape[1:]], grad.dtype), tf.zeros([0], grad.indices.dtype), tf.constant(shape)
    )


def sum_repeated_rows(grad: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the rows of a sparse gradient that share an index, so each index occurs once; 16 bits in float32."""
    indices, position = tf.unique(grad.indices)
    wide = widen(grad.values)  # in bfloat16, a sum of ones would end at 256
    values = tf.cast(tf.math.unsorted_segment_sum(wide, position, tf.size(indices)), grad.values.dtype)
    return tf.IndexedSlices(values, indices, grad.dense_shape)


def gather_sparse_rows(
    grad: tf.IndexedSlices, gather: Callable[[tf.Tensor, str], tf.Tensor], name: str
) -> tf.IndexedSlices:
    """Gathers the rows of a sparse gradient from all ranks; equal indices are not merged.

    Args:
      grad: this rank's gradient.
      gather: function of a tensor and a name; concatenates the tensors of all ranks.
      name: prefix of the names of the collectives.
    """
    values = gather(grad.values, f"{name}_values")
    return tf.IndexedSlices(values, gather(grad.indices, f"{name}_indices"), grad.dense_shape)


def average_sparse_rows(
    grad: tf.IndexedSlices, gather: Callable[[tf.Tensor, str], tf.Tensor], ranks: int, name: str
) -> Any:
    """Averages a sparse gradient over the ranks; the result has each row once.

    Args:
      grad: this rank's gradient.
      gather: function of a tensor and a name; concatenates the tensors of all ranks.
      ranks: number of ranks.
      name: prefix of the names of the collectives.
    """
    return sum_repeated_rows(gather_sparse_rows(map_values(grad, lambda values: values / ranks), gather, name))


def multiply_values(values: tf.Tensor, factor: Any) -> tf.Tensor:
    """Multiplies values by a scalar, 16-bit values in float32; the dtype does not change."""
    wide = widen(values)
    return tf.cast(wide * tf.cast(factor, wide.dtype), values.dtype)


def unscale_gradient(grad, divisor):
    """Divides a dense or sparse gradient by `divisor`, usually the loss scale; the dtype does not change.

    16-bit gradients are divided in float32: in float16 there is no scale above 65504, and the reciprocal of a scale
    above 2**24 is zero. Multiplying by the reciprocal would be wrong in float32, too: the reciprocal of 2**127 is zero
    on processors that flush denormals.
    """

    def divide_values(values):
        wide = widen(values)
        return tf.cast(wide / tf.cast(divisor, wide.dtype), values.dtype)

    return grad if divisor is None else map_values(grad, divide_values)


def unscale_in_float32(grad, divisor):
    """Divides a dense or sparse gradient by `divisor`; a 16-bit gradient becomes float32."""
    return unscale_gradient(map_values(grad, widen), divisor)


def has_finite_norm(gradients) -> tf.Tensor:
    """Returns whether the global norm of the gradients is finite in float32 (float64 gradients: in float64).

    Costs one op and one pass for each gradient, which is cheaper than testing every element.

    Args:
      gradients: list of dense or sparse gradients of floating dtypes; True for an empty list.
    Returns:
      Boolean scalar.
    """
    verdicts = [tf.math.is_finite(half) for half in half_squared_sums(gradients)]
    if len(verdicts) == 1:
        return verdicts[0]
    return tf.reduce_all(tf.stack(verdicts)) if verdicts else tf.constant(True)


def are_elements_finite(gradients) -> tf.Tensor:
    """Returns whether no element of dense or sparse gradients is Inf or NaN, a boolean scalar."""
    values = [gradient_values(grad) for grad in gradients]
    real = [tf.abs(each) if each.dtype.is_complex else each for each in values]
    return tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(each)) for each in real]))


def half_squared_sums(gradients) -> list:
    """Returns, for each dtype, half the sum of squares of the gradients; 16-bit gradients are converted to float32."""
    terms_of = {}
    for grad in gradients:
        if isinstance(grad, tf.IndexedSlices):
            grad = sum_repeated_rows(grad)  # their sum may overflow where no row does
        values = gradient_values(grad)
        if values.dtype.is_complex:
            values = tf.stack([tf.math.real(values), tf.math.imag(values)])
        values = widen(values)
        terms_of.setdefault(values.dtype, []).append(tf.nn.l2_loss(values))
    return [sum_in_order(terms) for terms in terms_of.values()]


def sum_in_order(numbers: list) -> tf.Tensor:
    """Sums scalars of one dtype in the same order in every run and on every rank.

    `tf.add_n` begins with an input whose memory it can overwrite, so its order depends on timing. The last bit of a sum
    of three or more numbers would then be random.
    """
    return tf.reduce_sum(tf.stack(numbers))


def backward_order_key(gradients: Sequence) -> Callable[[int], Any]:
    """Returns a sort key for positions in `gradients`: the order in which the backward pass computes them.

    In a graph, gradients are ordered by the creation of their ops, since backpropagation builds ops from the loss down.
    `map_gradients` builds replaced gradients in this order, too. In eager execution, the order of the list is reversed.
    """
    if tf.executing_eagerly():
        return lambda position: -position
    ops = [getattr(gradient_values(grad), "op", None) for grad in gradients]
    # In a branch, gradients of the enclosing graph are used.
    graphs = {op.graph: None for op in ops if op is not None}
    made = {op: number for graph in graphs for number, op in enumerate(graph.get_operations())}
    return lambda position: (made.get(ops[position], len(made)), position)


def map_gradients(transform: Callable[[int, Any], Any], gradients: Sequence) -> list:
    """Applies `transform` to the position and value of each gradient that is not None; None stays None.

    The results are built in the order in which the backward pass computes the gradients, so that it stays known.
    """
    made = [None] * len(gradients)
    for position in sorted(range(len(gradients)), key=backward_order_key(gradients)):
        if gradients[position] is not None:
            made[position] = transform(position, gradients[position])
    return made


def sum_gradients_by_variable(grads_and_vars: Sequence, more_grads_and_vars: Sequence) -> list:
    """Adds up the gradients of each variable, in the order of first occurrence; sparse gradients give a sparse sum."""
    if not grads_and_vars:
        return list(more_grads_and_vars)
    terms: dict = {}
    for grad, variable in [*grads_and_vars, *more_grads_and_vars]:
        given = terms.setdefault(id(variable), ([], variable))[0]
        given += [] if grad is None else [grad]
    summed = [given for given, _ in terms.values()]
    sums = map_gradients(
        lambda position, _: functools.reduce(_add_two_gradients, summed[position]),
        [given[-1] if given else None for given in summed],
    )
    return [(total, variable) for total, (_, variable) in zip(sums, terms.values())]


def _add_two_gradients(first, second):
    if not isinstance(first, tf.IndexedSlices) and not isinstance(second, tf.IndexedSlices):
        return first + second
    if isinstance(first, tf.IndexedSlices) and isinstance(second, tf.IndexedSlices):
        indices = [first.indices, second.indices]
        if first.indices.dtype != second.indices.dtype:
            indices = [tf.cast(rows, tf.int64) for rows in indices]
        shape = second.dense_shape if first.dense_shape is None else first.dense_shape
        return tf.IndexedSlices(tf.concat([first.values, second.values], 0), tf.concat(indices, 0), shape)
    dense, sparse = (second, first) if isinstance(first, tf.IndexedSlices) else (first, second)
    return tf.tensor_scatter_nd_add(dense, sparse.indices[:, tf.newaxis], sparse.values)
