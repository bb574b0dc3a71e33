"""TF-Slim 1.1 uses names that TensorFlow 2.15 keeps elsewhere: its own modules get them back."""

from __future__ import annotations

import sys
import types

import tensorflow.compat.v1 as tf

from npu_bridge.base.tf_internals.contrib import modules_of_layers, modules_with_fewer_names, variable_scope_module


class _WithNames(types.ModuleType):
    """A module of TensorFlow with some names beside its own; the module itself stays as it is."""

    def __init__(self, module: types.ModuleType, names: dict) -> None:
        super().__init__(module.__name__, module.__doc__)
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str):
        return getattr(self._module, name)


def apply() -> None:
    """Gives the modules of TF-Slim the names they miss; TensorFlow's modules stay as they are."""
    missing = {**modules_with_fewer_names(), variable_scope_module(): ()}
    completed = {
        module: _WithNames(module, {name: getattr(tf, name) for name in names}) for module, names in missing.items()
    }
    completed.update(modules_of_layers())
    completed[variable_scope_module()].__dict__["variable"] = tf.Variable
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "tf_slim":
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType) and value in completed:
                setattr(module, attribute, completed[value])
