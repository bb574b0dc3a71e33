"""Combines gradients into flat tensors, so that many gradients take one division by the loss scale and one check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

from npu_bridge.base.errors import message
from npu_bridge.base.flat_tensors import concatenate_flat, split_flat
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.terminal import logger
from npu_bridge.gradients.arithmetic import unscale_in_float32
from npu_bridge.gradients.step import Step

_LOG = logger(__name__)


class CombinedGradients:
    """Joins dense gradients of an optimizer into flat tensors, one for each dtype and each fused update.

    The resulting gradients are pieces of a flat tensor; a fused update finds the flat tensor through them. Sparse
    gradients and gradients of unknown shape are not joined.

    Args:
      owner: name of the optimizer, for messages.
      is_checked: compare the pieces with separately computed gradients in every step.
      key_of: function of a variable; gradients are joined if the keys of their variables are equal.
    """

    def __init__(self, owner: str, is_checked: bool = False, key_of: Callable[[Any], Any] = lambda variable: None):
        self._owner = owner
        self._is_checked = is_checked
        self._names: tuple | None = None
        self._key_of = key_of

    def unscale(self, step: Step) -> None:
        """Divides a step's gradients by the step's divisor, and replaces them by pieces of flat tensors.

        Gradients of 16 bits become float32.
        """
        pairs = step.grads_and_vars
        made = {position: grad for position, (grad, _) in enumerate(pairs)}
        joins = self._positions_to_join(pairs)
        self._log_changed_names(tuple(pairs[position][1].name for join in joins for position in join))
        with tf.name_scope("combined_gradients"):
            for join in joins:
                singles = [pairs[position][0] for position in join]
                names = [pairs[position][1].name.partition(":")[0] for position in join]
                made.update(zip(join, self._unscale_joined(singles, names, step.divisor)))
        for position in set(made).difference(*joins):
            made[position] = None if made[position] is None else unscale_in_float32(made[position], step.divisor)
        step.grads_and_vars = [(made[position], variable) for position, (_, variable) in enumerate(pairs)]

    def join_tensors(self, tensors: Sequence[tf.Tensor]) -> list:
        """Joins tensors into flat tensors; returns the flat tensors, then the tensors that cannot be joined."""
        joins = self._positions_to_join([(tensor, None) for tensor in tensors])
        alone = [tensor for position, tensor in enumerate(tensors) if not any(position in join for join in joins)]
        return [*(concatenate_flat([tensors[position] for position in join]) for join in joins), *alone]

    def _positions_to_join(self, pairs):
        """Returns a list for each flat tensor: the positions, at least two, of the gradients to join."""
        joins: dict = {}
        for position, (grad, variable) in enumerate(pairs):
            if isinstance(grad, tf.Tensor) and grad.shape.is_fully_defined():
                key = self._key_of(variable) if hasattr(variable, "assign") else None
                joins.setdefault((grad.dtype, key), []).append(position)
        return [join for join in joins.values() if len(join) > 1]

    def _unscale_joined(self, singles, names, divisor):
        flat = unscale_in_float32(concatenate_flat(singles), divisor)
        shapes = [single.shape for single in singles]
        if self._is_checked:
            alone = [unscale_in_float32(single, divisor) for single in singles]
            checked = check_pieces(self._owner, flat, alone, names)
            with tf.control_dependencies([] if checked is None else [checked]):
                flat = tf.identity(flat)
        return split_flat(flat, shapes)

    def _log_changed_names(self, names):
        if self._names is not None and set(self._names) != set(names):
            changed = sorted(set(self._names).symmetric_difference(names))
            text = "%s: gradients are combined again, because these variables gained or lost gradients: %s."
            _LOG.info(text, self._owner, ", ".join(changed))
        self._names = names


def check_pieces(owner: str, flat: tf.Tensor, single_tensors: Sequence[tf.Tensor], names: Sequence[str]) -> Any:
    """Compares the pieces of a flat tensor with single tensors: dtypes, sizes, positions and values.

    Args:
      owner: name of the caller, for messages.
      flat: a vector that joins the single tensors.
      single_tensors: dense tensors of known shapes, in the order of their pieces in `flat`.
      names: names of the variables of `single_tensors`.
    Returns:
      The op that compares values; None in eager execution.
    Raises:
      ValueError: a dtype or the total size differs.
      tf.errors.InvalidArgumentError: when the op runs: a value differs; the error names the first such variable.
    """
    what, start, size = "combined gradients", 0, flat.shape.num_elements()
    for single, name in zip(single_tensors, names):
        end = start + single.shape.num_elements()
        if single.dtype != flat.dtype or end > size:
            problem = f"{name} does not fit the {what}"
            expected, got = f"at least {end} values of {single.dtype.name}", f"{size} values of {flat.dtype.name}"
            raise ValueError(message(owner, problem, expected, got, "Combine the gradients again."))
        start = end
    if start != size:
        problem, expected = f"the {what} have another size than {', '.join(names)}", f"{start} values"
        raise ValueError(message(owner, problem, expected, f"{size} values", "Combine the gradients again."))
    pieces = split_flat(flat, [single.shape for single in single_tensors])
    alike = tf.stack([_are_equal_or_nan(piece, single) for piece, single in zip(pieces, single_tensors)])
    first = tf.gather(tf.constant(list(names)), tf.argmin(tf.cast(alike, tf.int32)))
    text = f"{owner}: check_combined_tensors: the {what} differ from the single gradients, first for the variable"
    return tf.debugging.Assert(tf.reduce_all(alike), [text, first])


def _are_equal_or_nan(first, second):
    both_nan = tf.logical_and(tf.math.is_nan(first), tf.math.is_nan(second))
    return tf.reduce_all(tf.logical_or(tf.equal(first, second), both_nan))
