"""TF-Slim 1.1 uses a few names that TensorFlow 2.15 keeps elsewhere: its own modules get them back."""

from __future__ import annotations

import types

import tensorflow.compat.v1 as tf
from tensorflow.python.ops import array_ops, control_flow_ops


class _WithNames(types.ModuleType):
    """A module of TensorFlow with some names beside its own; the module itself stays as it is."""

    def __init__(self, module: types.ModuleType, **names) -> None:
        super().__init__(module.__name__, module.__doc__)
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str):
        return getattr(self._module, name)


def mend() -> None:
    """Gives TF-Slim the names it misses: `stack`, `cond`, `case` and `while_loop`."""
    from tf_slim.data import tfexample_decoder

    if not isinstance(tfexample_decoder.array_ops, _WithNames):
        tfexample_decoder.array_ops = _WithNames(array_ops, stack=tf.stack)
        tfexample_decoder.control_flow_ops = _WithNames(
            control_flow_ops, cond=tf.cond, case=tf.case, while_loop=tf.while_loop
        )
