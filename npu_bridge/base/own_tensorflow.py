"""Keeps TensorFlow's public functions as they were when this package was imported.

A script can write `tf.nn.dropout = npu_ops.dropout`. An operator that looked up `tf.nn.dropout` when it is called would
then call itself. So operators here use `from npu_bridge.base.own_tensorflow import tf`.
"""

from __future__ import annotations

import types
from typing import Any

import tensorflow

_PUBLIC = ("tensorflow._api.", "tensorflow.compat")
# Namespaces of other types load Keras or Estimators at the first access.
_LOADED = (types.ModuleType, type(tensorflow.compat.v1))
# Scripts do not replace raw operators. `v2` is this namespace again.
_LEFT_OUT = ("raw_ops", "v2")


class _NamespaceCopy(types.ModuleType):
    """A copy of a TensorFlow namespace at import; lazily loaded parts such as Keras are not copied.

    Args:
      module: the namespace.
      seen: copies made so far, by the id of the original namespace.
    """

    def __init__(self, module: types.ModuleType, seen: dict[int, _NamespaceCopy]):
        super().__init__(module.__name__)
        seen[id(module)] = self
        self._module = module
        for name, value in list(vars(module).items()):
            if name.startswith("_"):
                continue
            if type(value) in _LOADED and name not in _LEFT_OUT and value.__name__.startswith(_PUBLIC):
                value = seen.get(id(value)) or _NamespaceCopy(value, seen)
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


tf: Any = _NamespaceCopy(tensorflow, {})
