"""Does arithmetic on dense and sparse gradients: division by the loss scale, norms, sums of rows; and orders them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Callable

from npu_bridge.base.own_tensorflow import tf


def as_gradient(value: Any, variable: Any) -> Any:
    """Converts a gradient to tensors. Scripts can pass arrays, lists or variables; None stays None."""
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
    """Applies `transform` to a dense gradient, or to the values of a sparse one."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(transform(grad.values), grad.indices, grad.dense_shape)
    return transform(grad)


def values_of(grad: Any) -> tf.Tensor:
    """Returns a dense tensor unchanged, or the values of a sparse gradient."""
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def parts_of(grad: Any) -> list:
    """Returns the tensors of a gradient: itself, or values and indices."""
    return [grad.values, grad.indices] if isinstance(grad, tf.IndexedSlices) else [grad]


def rebuilt(grad: Any, variable: Any, parts: Iterator[tf.Tensor]) -> Any:
    """Builds a gradient of the kind and shape of `grad` from the next tensors of `parts`."""
    if not isinstance(grad, tf.IndexedSlices):
        return tf.ensure_shape(next(parts), grad.shape)
    return tf.IndexedSlices(next(parts), next(parts), tf.constant(variable.shape.as_list()))


def nothing_like(grad: Any, variable: Any) -> Any:
    """Returns zeros in the shape of the variable, or a sparse gradient without rows."""
    if not isinstance(grad, tf.IndexedSlices):
        return tf.zeros(variable.shape, grad.dtype)
    shape = variable.shape.as_list()
    return tf.IndexedSlices(
        tf.zeros([0, *shape[1:]], grad.dtype), tf.zeros([0], grad.indices.dtype), tf.constant(shape)
    )


def sum_repeated_rows(grad: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the rows of a sparse gradient that share an index, so each index occurs once."""
    indices, position = tf.unique(grad.indices)
    values = tf.math.unsorted_segment_sum(grad.values, position, tf.size(indices))
    return tf.IndexedSlices(values, indices, grad.dense_shape)


def mean_of_rows(grad: tf.IndexedSlices, gather: Callable[[tf.Tensor, str], tf.Tensor], ranks: int, name: str) -> Any:
    """Averages a sparse gradient over the ranks whose rows `gather` joins; each row occurs once."""
    values = gather(grad.values / ranks, f"{name}_values")
    return sum_repeated_rows(tf.IndexedSlices(values, gather(grad.indices, f"{name}_indices"), grad.dense_shape))


def in_true_units(grad, divisor):
    """Divides a dense or sparse gradient by `divisor`, in its own dtype.

    The division is done in float32 at least: in float16 a scale above 65504 does not exist, and its reciprocal is
    zero above 2**24. It is a division because the reciprocal of 2**127 is zero on processors that flush denormals.
    """

    def divided(values):
        if values.dtype.size < tf.float32.size:
            return tf.cast(tf.cast(values, tf.float32) / divisor, values.dtype)
        return values / tf.cast(divisor, values.dtype)

    return grad if divisor is None else map_values(grad, divided)


def has_finite_norm(gradients) -> tf.Tensor:
    """Returns True when the global norm of the gradients is finite in float32 (float64 gradients: in float64).

    Costs one pass over each gradient and one op for each, which is cheaper than testing every element.

    Args:
      gradients: dense or sparse gradients of floating dtypes; may be empty, which is usable.
    Returns:
      Boolean scalar.
    """
    verdicts = [tf.math.is_finite(half) for half in squared_halves(gradients)]
    if len(verdicts) == 1:
        return verdicts[0]
    return tf.reduce_all(tf.stack(verdicts)) if verdicts else tf.constant(True)


def squared_halves(gradients) -> list:
    """Returns half the sum of squares of the gradients for each of their dtypes; 16-bit gradients count as float32."""
    terms_of = {}
    for grad in gradients:
        if isinstance(grad, tf.IndexedSlices):
            grad = sum_repeated_rows(grad)  # their sum may overflow where no row does
        values = values_of(grad)
        if values.dtype.is_complex:
            values = tf.stack([tf.math.real(values), tf.math.imag(values)])
        if values.dtype.size < tf.float32.size:
            values = tf.cast(values, tf.float32)
        terms_of.setdefault(values.dtype, []).append(tf.nn.l2_loss(values))
    return [sum_in_order(terms) for terms in terms_of.values()]


def sum_in_order(numbers: list) -> tf.Tensor:
    """Sums scalars of one dtype in the same order in every run and on every rank.

    `tf.add_n` begins with whichever input it can overwrite, which depends on the memory freed by then. So the last bit
    of a sum of three or more numbers is left to chance.
    """
    return tf.reduce_sum(tf.stack(numbers))


def order_of_readiness(gradients: Sequence) -> Callable[[int], Any]:
    """Returns a sort key for positions: the order in which the backward pass delivers gradients.

    In a graph it is the order in which their ops were made, since backpropagation builds them from the loss down. When
    executed eagerly, it is the reverse of the variables' order.
    """
    if tf.executing_eagerly():
        return lambda position: -position
    made = {op: number for number, op in enumerate(tf.compat.v1.get_default_graph().get_operations())}
    ops = [getattr(values_of(grad), "op", None) for grad in gradients]
    return lambda position: (made.get(ops[position], len(made)), position)
