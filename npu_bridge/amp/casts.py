"""Registers the dtypes that a script chooses for operators and layers, before it calls `configure`."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from npu_bridge.base.arguments import check_instance
from npu_bridge.base.errors import did_you_mean, message, shown
from npu_bridge.session.precision.op_lists import OpLists
from npu_bridge.session.precision.rewriter import has_floating_type

_HALF, _FLOAT, _PROMOTE = "half", "float", "promote"
_REGISTERED: dict[str, str] = {}


class RegisteredCasts(NamedTuple):
    """The registered casts.

    Attributes:
      op_lists: the casts of operator types.
      layers: "half" or "float" for each class name of a Keras layer. A name such as Softmax is also an operator type.
    """

    op_lists: OpLists
    layers: dict[str, str]

    @property
    def layers_alone(self) -> list[str]:
        """The sorted class names in `layers` that are not operator types."""
        return sorted(name for name in self.layers if not _is_operator(name))


def half_function(name: str) -> str:
    """Makes operators of a type, or layers of a class, compute in the low dtype, whatever the level's lists say.

    Call it before `configure`; a later call for the same name replaces the earlier call.

    Args:
      name: an operator type, such as "Softmax", or the class of a Keras layer, such as "Dense".
    Returns:
      `name`.
    Raises:
      TypeError: `name` is not a text.
      ValueError: no operator type or layer class has this name; the message suggests a similar name.
    """
    return _register_cast(half_function.__name__, name, _HALF)


def float_function(name: str) -> str:
    """Keeps operators of a type, or layers of a class, in float32; for arguments and errors see `half_function`."""
    return _register_cast(float_function.__name__, name, _FLOAT)


def promote_function(name: str) -> str:
    """Makes operators of a type compute in float32 unless all their inputs are lowered.

    Only for operator types: a Keras layer always follows the widest of its own dtype and its inputs' dtypes. Arguments,
    result and errors: see `half_function`.
    """
    return _register_cast(promote_function.__name__, name, _PROMOTE)


def forget_functions() -> None:
    """Clears the registered casts; existing configurations keep their casts."""
    _REGISTERED.clear()


def registered_casts() -> RegisteredCasts:
    """Returns the casts registered so far."""
    lists, layers = OpLists(), {}
    for name, kind in _REGISTERED.items():
        if _is_operator(name):
            add = {_HALF: lists.with_half, _FLOAT: lists.with_float, _PROMOTE: lists.with_promote}[kind]
            lists = add(name)
        if _is_layer(name) and kind != _PROMOTE:
            layers[name] = kind
    return RegisteredCasts(lists, layers)


def _register_cast(function: str, name: Any, kind: str) -> str:
    where, expected = f"amp.{function}", "an operator type with a floating dtype, or the class of a Keras layer"
    if kind == _PROMOTE:
        expected = "an operator type with a floating dtype"
    check_instance(where, "the name", name, str, "a text", 'Pass "Softmax" or "Dense", for example.', expected)
    if not _is_operator(name) and not (_is_layer(name) and kind != _PROMOTE):
        layers = [] if kind == _PROMOTE else [each for each in dir(tf.keras.layers) if _is_layer(each)]
        known = [*filter(has_floating_type, dir(tf.raw_ops)), *layers]
        fix = did_you_mean(name, known, "Read the type of an operator from op.type.")
        raise ValueError(message(where, "the name fits nothing that can be cast", expected, shown(name), fix))
    _REGISTERED.pop(name, None)
    _REGISTERED[name] = kind
    return name


def _is_operator(name: str) -> bool:
    return name.isidentifier() and hasattr(tf.raw_ops, name) and has_floating_type(name)


def _is_layer(name: str) -> bool:
    found = getattr(tf.keras.layers, name, None)
    return isinstance(found, type) and issubclass(found, tf.keras.layers.Layer)
