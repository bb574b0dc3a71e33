"""Adds to TF-Slim 1.1 the names that it imports from modules in which TensorFlow 2.15 no longer has them."""

from __future__ import annotations

import contextlib
import sys
import types

import tensorflow.compat.v1 as tf

from npu_bridge.base.tf_internals.contrib import (
    missing_names_by_module,
    replacements_of_layer_modules,
    variable_scope_module,
)


class _ModuleWithNames(types.ModuleType):
    """A proxy of a TensorFlow module with additional names; the TensorFlow module does not change."""

    def __init__(self, module: types.ModuleType, names: dict) -> None:
        super().__init__(module.__name__, module.__doc__)
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str):
        return getattr(self._module, name)


def _gradient_of_lower_bound(op, grad):
    """Returns the gradients of `maximum(inputs, bound)`; None for the bound.

    An input below the bound gets a gradient only if the update then increases the input.
    """
    moves = (op.inputs[0] >= op.inputs[1]) | (grad < 0)
    return tf.cast(moves, grad.dtype) * grad, None


def add_missing_names() -> None:
    """Adds missing names to the modules of TF-Slim; the modules of TensorFlow do not change."""
    with contextlib.suppress(KeyError):  # registered by an earlier call
        tf.RegisterGradient("GDNLowerBound")(_gradient_of_lower_bound)  # TF-Slim's `gdn` looks it up by name
    missing = {**missing_names_by_module(), variable_scope_module(): ()}
    completed = {
        module: _ModuleWithNames(module, {name: getattr(tf, name) for name in names})
        for module, names in missing.items()
    }
    completed.update(replacements_of_layer_modules())
    completed[variable_scope_module()].__dict__["variable"] = tf.Variable
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "tf_slim":
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType) and value in completed:
                setattr(module, attribute, completed[value])
