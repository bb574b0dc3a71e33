"""Combines gradients into flat tensors: one division by the loss scale and one check for many of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

from npu_bridge.base.errors import message
from npu_bridge.base.flat_tensors import concatenate_flat, split_flat
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.terminal import logger
from npu_bridge.gradients.arithmetic import in_true_units
from npu_bridge.gradients.stage import Step

_LOG = logger(__name__)


class CombinedGradients:
    """Joins the dense gradients of an optimizer that share a dtype and a fused update into flat tensors.

    Each returned gradient is a piece of a flat tensor, by which a fused update finds that tensor. Sparse gradients and
    gradients of unknown shape are not joined.

    Args:
      owner: name of the optimizer, for messages.
      is_checked: compare the pieces with the gradients computed singly, in every step.
      key_of: called with a variable; gradients are joined when the keys of their variables are equal.
    """

    def __init__(self, owner: str, is_checked: bool = False, key_of: Callable[[Any], Any] = lambda variable: None):
        self._owner = owner
        self._is_checked = is_checked
        self._names: tuple | None = None
        self._key_of = key_of

    def unscale(self, step: Step) -> None:
        """Replaces the gradients of a step by pieces of flat tensors, divided by the step's divisor."""
        pairs = step.grads_and_vars
        made = {position: grad for position, (grad, _) in enumerate(pairs)}
        batches = self._batches(pairs)
        self._tell(tuple(pairs[position][1].name for batch in batches for position in batch))
        with tf.name_scope("combined_gradients"):
            for batch in batches:
                singles = [pairs[position][0] for position in batch]
                names = [pairs[position][1].name.partition(":")[0] for position in batch]
                made.update(zip(batch, self._unscaled(singles, names, step.divisor)))
        for position in set(made).difference(*batches):
            made[position] = None if made[position] is None else in_true_units(made[position], step.divisor)
        step.grads_and_vars = [(made[position], variable) for position, (_, variable) in enumerate(pairs)]

    def joined(self, tensors: Sequence[tf.Tensor]) -> list:
        """Joins tensors into flat ones where possible; returns these, then the tensors that cannot be joined."""
        batches = self._batches([(tensor, None) for tensor in tensors])
        alone = [tensor for position, tensor in enumerate(tensors) if not any(position in batch for batch in batches)]
        return [*(concatenate_flat([tensors[position] for position in batch]) for batch in batches), *alone]

    def _batches(self, pairs):
        """Returns the positions to join, as lists of at least two."""
        batches: dict = {}
        for position, (grad, variable) in enumerate(pairs):
            if isinstance(grad, tf.Tensor) and grad.shape.is_fully_defined():
                key = self._key_of(variable) if hasattr(variable, "assign") else None
                batches.setdefault((grad.dtype, key), []).append(position)
        return [batch for batch in batches.values() if len(batch) > 1]

    def _unscaled(self, singles, names, divisor):
        flat = in_true_units(concatenate_flat(singles), divisor)
        shapes = [single.shape for single in singles]
        if self._is_checked:
            alone = [in_true_units(single, divisor) for single in singles]
            checked = check_pieces(self._owner, flat, alone, names)
            with tf.control_dependencies([] if checked is None else [checked]):
                flat = tf.identity(flat)
        return split_flat(flat, shapes)

    def _tell(self, names):
        if self._names is not None and set(self._names) != set(names):
            changed = sorted(set(self._names).symmetric_difference(names))
            text = "%s: gradients are combined again, because other variables have some: %s."
            _LOG.info(text, self._owner, ", ".join(changed))
        self._names = names


def check_pieces(owner: str, flat: tf.Tensor, singles: Sequence[tf.Tensor], names: Sequence[str]) -> Any:
    """Compares a flat tensor with the single tensors it stands for: dtypes, sizes, places and values.

    Args:
      owner: name of the caller, for messages.
      flat: a vector.
      singles: dense tensors of known shapes, in their order in the flat one.
      names: names of their variables.
    Returns:
      The op that compares values; None when executed eagerly.
    Raises:
      ValueError: a dtype or the total size differs.
      tf.errors.InvalidArgumentError: when the op runs: a value differs; names the first variable concerned.
    """
    what, start, size = "combined gradients", 0, flat.shape.num_elements()
    for single, name in zip(singles, names):
        end = start + single.shape.num_elements()
        if single.dtype != flat.dtype or end > size:
            problem = f"{name} is not what the {what} hold"
            expected, got = f"{single.dtype.name} at {start} to {end}", f"{flat.dtype.name}, {size} in all"
            raise ValueError(message(owner, problem, expected, got, "Combine them again."))
        start = end
    if start != size:
        problem, expected = f"the {what} have another size than {', '.join(names)}", str(start)
        raise ValueError(message(owner, problem, expected, str(size), "Combine them again."))
    pieces = split_flat(flat, [single.shape for single in singles])
    alike = tf.stack([_are_alike(piece, single) for piece, single in zip(pieces, singles)])
    first = tf.gather(tf.constant(list(names)), tf.argmin(tf.cast(alike, tf.int32)))
    text = f"{owner}: check_combined_tensors: the {what} differ from the single ones. The first is that of"
    return tf.debugging.Assert(tf.reduce_all(alike), [text, first])


def _are_alike(one, other):
    both_nan = tf.logical_and(tf.math.is_nan(one), tf.math.is_nan(other))
    return tf.reduce_all(tf.logical_or(tf.equal(one, other), both_nan))
