"""Implements `GroupLossScaleManager`: a loss scale for each group of variables, with boundaries between groups."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_bridge.base.arguments import check_count, check_number, check_pattern
from npu_bridge.base.errors import message, shown
from npu_bridge.base.tf_internals import keras3
from npu_bridge.estimator.npu.npu_loss_scale_manager import MovingLossScaleManager
from npu_bridge.gradients.scale_rule import checked_rule

__all__ = ["GroupLossScaleManager", "scale_boundary"]

_latest: weakref.WeakKeyDictionary[Any, weakref.ref] = weakref.WeakKeyDictionary()  # manager by `_graph_or_eager`
# Managers whose last boundary a backward pass has gone through, by `_graph_or_eager`.
_with_last_boundary: weakref.WeakKeyDictionary[Any, weakref.WeakSet] = weakref.WeakKeyDictionary()


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class GroupLossScaleManager(MovingLossScaleManager):
    """A loss-scale manager with a separate scale for each of several groups of variables.

    Gradients shrink or grow during backpropagation. So one scale can be too large for the network's last layers and too
    small for its first layers. Call `scale_boundary` between the groups: it multiplies the gradients that pass, so that
    the gradients of group i are computed with scale i. Optimizers still return unscaled gradients. An overflow in one
    group, on any rank, skips the step and shrinks the scale of that group; the scales of the other groups grow.

    Args:
      groups: the members of each group, numbered from 1: a regular expression that is found in a variable's
        name, a variable, a Keras layer or model (its trainable variables), or a list of these. Each trained
        variable belongs to one group. `scale_boundary` numbers the groups in this order.
      init: scale of the first step, at least 1e-37; one number for all groups, or a list.
      growth_factor, backoff_factor, growth_interval: as in `DynamicLossScaleManager`; by default a scale is multiplied
        by 2**(1/1000) after each good step and divided by the square root of 2 at each overflow.
      min_loss_scale, max_loss_scale: bounds, or None.
    Raises:
      TypeError: a group or a number is of another type.
      ValueError: there is no group, `init` has another length, or a number is out of its range. Also raised in the
        first step, if a variable belongs to no group or to several, or if the last boundary is missing.
    Graph: `loss_scale`, `good_steps` and `bad_steps` as in other managers, each a vector with a value for each group.
    """

    is_for_groups = True

    def __init__(
        self,
        groups: Sequence[Any],
        init: Any = 2.0**10,
        growth_factor: float = 2.0 ** (1 / 1000),
        backoff_factor: float = 2.0**-0.5,
        growth_interval: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
    ):
        owner = "GroupLossScaleManager"
        members = _checked_groups(owner, groups)
        rule, constants = checked_rule(
            owner,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
        )
        scales = list(init) if isinstance(init, (list, tuple, np.ndarray)) else [init] * len(members)
        if len(scales) != len(members):
            problem, expected = "init does not fit the groups", f"one number, or {len(members)} numbers"
            raise ValueError(message(owner, problem, expected, shown(init), "Give one scale for each group."))
        lowest, highest = rule.bounds
        scales = [check_number(owner, "init", scale, at_least=lowest, at_most=highest) for scale in scales]
        super().__init__("group_loss_scale", rule, scales, {"groups": len(members), "init": scales, **constants})
        self._members = lambda: members  # TensorFlow would save a list of layers in checkpoints
        self.use_at_boundaries()

    @property
    def has_last_boundary(self) -> bool:
        """Whether a backward pass of this graph has gone through the boundary from a group to the outside.

        There gradients are first scaled.
        """
        return self in _with_last_boundary.get(_graph_or_eager(), ())

    def use_at_boundaries(self) -> None:
        """Makes `scale_boundary` use this manager by default in the current graph, or in eager execution."""
        _latest[_graph_or_eager()] = weakref.ref(self)

    def get_config(self):
        """Returns the configuration that Keras saves with a model, if all groups are regular expressions.

        Raises:
          TypeError: a group contains a variable or a layer.
        """
        given = [member for group in self._members() for member in group if not isinstance(member, str)]
        if given:
            problem, expected = "the groups cannot be saved with the model", "regular expressions as groups"
            fix = "Replace variables and layers by regular expressions, or save only weights."
            raise TypeError(message("GroupLossScaleManager", problem, expected, shown(given[0]), fix))
        return {**self.agreed_constants(), "groups": [list(group) for group in self._members()]}

    def group_of(self, variable: tf.Variable) -> int:
        """Returns the position of the variable's group, from 0.

        Raises:
          ValueError: the variable belongs to no group, or to several.
        """
        name = keras3.name_of(variable)
        found = [
            number
            for number, group in enumerate(self._members())
            if any(_includes_variable(member, variable) for member in group)
        ]
        if len(found) != 1:
            problem = f"{name} belongs to {'no group' if not found else 'several groups'}"
            got = "no group" if not found else f"groups {', '.join(str(number + 1) for number in found)}"
            fix = "List the variable only in the group that uses it."
            raise ValueError(message("GroupLossScaleManager", problem, "one group for each variable", got, fix))
        return found[0]


def scale_boundary(x: tf.Tensor, i: int, j: int, manager: GroupLossScaleManager | None = None) -> tf.Tensor:
    """Marks a boundary from group `i` to group `j`: the gradient of the returned tensor changes its scale there.

    Write `scale_boundary(x, 0, 1)` on the inputs of the first group, `scale_boundary(x, i, i + 1)` between two groups,
    and `scale_boundary(x, n, 0)` on the outputs of the last group. Groups are numbered from 1. The number 0,
    and any number above the last group, means outside of all groups, where gradients are unscaled. Mark every path from
    one group to another.

    Args:
      x: floating tensor of any shape.
      i: the group in which `x` is computed.
      j: the group that uses the result.
      manager: the manager of the scales; by default the manager that was made, or given to an optimizer, last: in this
        graph or eagerly, before the gradient is computed. Without a manager, gradients are unchanged.
    Returns:
      Tensor of the same dtype and shape. Its gradient is multiplied by the scale of `i` and divided by the scale of
      `j`, in float32 at least.
    Raises:
      TypeError: `i` or `j` is not an integer.
      ValueError: `i` or `j` is negative.
    """
    for name, number in (("i", i), ("j", j)):
        fix = "Count groups from 1; 0 means no group."
        check_count("scale_boundary", name, number, fix, at_least=0, value_text="the number of a group")

    @tf.custom_gradient
    def boundary(x):
        def rescale_gradient(upstream):
            scaling = _latest.get(_graph_or_eager(), lambda: None)() if manager is None else manager
            if scaling is None:
                return upstream
            scales, count = scaling.get_loss_scale(), scaling.scale_shape.num_elements()
            if 1 <= i <= count and not 1 <= j <= count:
                _with_last_boundary.setdefault(_graph_or_eager(), weakref.WeakSet()).add(scaling)
            ratio = _scale_of_group(scales, i) / _scale_of_group(scales, j)
            dtype = tf.float32 if upstream.dtype.size < tf.float32.size else upstream.dtype
            return tf.cast(tf.cast(upstream, dtype) * tf.cast(ratio, dtype), upstream.dtype)

        return tf.identity(x), rescale_gradient

    return boundary(tf.convert_to_tensor(x))


def _scale_of_group(scales, number):
    return scales[number - 1] if 1 <= number <= scales.shape.num_elements() else tf.constant(1.0)


def _graph_or_eager():
    """Returns the TF 1 graph outside of functions, conditions and loops; in eager execution, a stand-in for it."""
    with tf.init_scope():
        return GroupLossScaleManager if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _checked_groups(owner, groups):
    """Checks the groups and returns them as lists of their members."""
    if isinstance(groups, str) or not isinstance(groups, (list, tuple)) or not groups:
        kind = ValueError if isinstance(groups, (list, tuple)) else TypeError
        expected, fix = "a list with the members of each group", "Write groups=['block_1', 'block_2'], for example."
        raise kind(message(owner, "groups is not a list of groups", expected, shown(groups), fix))
    members = [list(group) if isinstance(group, (list, tuple)) else [group] for group in groups]
    for member in (member for group in members for member in group):
        if isinstance(member, str):
            check_pattern(owner, "a member of a group", member)
        elif not hasattr(member, "trainable_variables") and not isinstance(
            keras3.tensorflow_variable_of(member), tf.Variable
        ):
            expected = "a regular expression, a variable, a Keras layer, or a list of them"
            raise TypeError(
                message(
                    owner,
                    "groups has an entry that cannot be a member of a group",
                    expected,
                    shown(member),
                    "Replace this entry.",
                )
            )
    return members


def _includes_variable(member, variable):
    if isinstance(member, str):
        return re.search(member, keras3.name_of(variable)) is not None
    members = getattr(member, "trainable_variables", [member])
    return any(variable is keras3.tensorflow_variable_of(own) for own in members)
