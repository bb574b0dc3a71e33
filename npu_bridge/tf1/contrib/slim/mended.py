"""TF-Slim 1.1 uses names that TensorFlow 2.15 keeps elsewhere: its own modules get them back."""

from __future__ import annotations

import sys
import types

import tensorflow.compat.v1 as tf
from keras.src.legacy_tf_layers import convolutional, core, normalization, pooling
from tensorflow.python.framework import ops
from tensorflow.python.layers import convolutional as old_convolutional
from tensorflow.python.layers import core as old_core
from tensorflow.python.layers import normalization as old_normalization
from tensorflow.python.layers import pooling as old_pooling
from tensorflow.python.ops import array_ops, control_flow_ops, variable_scope

_MISSING = {
    array_ops: ("stack", "unstack"),
    control_flow_ops: ("Assert", "case", "cond", "while_loop"),
    ops: ("IndexedSlices", "SparseTensor", "Tensor", "register_tensor_conversion_function"),
    variable_scope: (),
}

# 2.15's own modules of these names look for a package that need not be installed.
_LAYERS = {
    old_convolutional: convolutional, old_core: core, old_normalization: normalization, old_pooling: pooling,
}  # fmt: skip


class _WithNames(types.ModuleType):
    """A module of TensorFlow with some names beside its own; the module itself stays as it is."""

    def __init__(self, module: types.ModuleType, names: dict) -> None:
        super().__init__(module.__name__, module.__doc__)
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str):
        return getattr(self._module, name)


def mend() -> None:
    """Gives the modules of TF-Slim the names they miss; TensorFlow's modules stay as they are."""
    completed = {
        module: _WithNames(module, {name: getattr(tf, name) for name in names}) for module, names in _MISSING.items()
    }
    completed.update(_LAYERS)
    completed[variable_scope].__dict__["variable"] = tf.Variable
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "tf_slim":
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType) and value in completed:
                setattr(module, attribute, completed[value])
