"""Defines the optimizers of stand-alone Keras, and those of `tensorflow.python.keras.optimizers` in TensorFlow 1.15.

They differ from `tf.keras.optimizers` in their default learning rates. Stand-alone Keras also clips the norm of all
gradients together.
"""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

import tensorflow.compat.v1 as tf

from npu_bridge.base.tf_internals.names import KERAS

_stock = importlib.import_module(f"{KERAS}.src.optimizers.optimizer_v1")
_DEFAULTS: dict[str, dict[str, float]] = {
    "Adadelta": {"learning_rate": 1.0},
    "Adagrad": {"learning_rate": 0.01, "initial_accumulator_value": 0.0},
    "Adamax": {"learning_rate": 0.002},
    "Nadam": {"learning_rate": 0.002},
}


def _define(name: str, owner: str) -> type:
    stock = getattr(tf.keras.optimizers, name)

    @functools.wraps(stock.__init__)
    def initialize(self: Any, *arguments: Any, **options: Any) -> None:
        defaults = dict(_DEFAULTS.get(name, {}))
        if arguments:
            defaults.pop("learning_rate", None)
        if owner == "of_keras" and "clipnorm" in options:
            options["global_clipnorm"] = options.pop("clipnorm") or None  # 0 does not clip
        stock.__init__(self, *arguments, **{**defaults, **options})

    namespace = {"__init__": initialize, "__doc__": stock.__doc__, "__module__": __name__}
    return type(name, (stock,), {**namespace, "__qualname__": f"{owner}.{name}"})


def _define_all(owner: str) -> types.SimpleNamespace:
    names = ("Adadelta", "Adagrad", "Adam", "Adamax", "Nadam", "RMSprop", "SGD")
    return types.SimpleNamespace(**{name: _define(name, owner) for name in names})


of_keras, of_tensorflow = _define_all("of_keras"), _define_all("of_tensorflow")


class _IncludesStockOptimizers(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return super().__subclasscheck__(subclass) or (
            cls is Optimizer and issubclass(subclass, tf.keras.optimizers.Optimizer)
        )


class Optimizer(_stock.Optimizer, metaclass=_IncludesStockOptimizers):
    """The base class from which scripts derive; optimizers of `tf.keras` also count as its subclasses."""


def _own_class(name: Any) -> Any:
    return {each.lower(): kind for each, kind in vars(of_keras).items()}.get(str(name).lower())


def get(stock: Any, identifier: Any, **options: Any) -> Any:
    """Returns what `keras.optimizers.get` (`stock`) returns; for a name, with the defaults of stand-alone Keras."""
    own = _own_class(identifier) if isinstance(identifier, str) else None
    return own() if own else stock(identifier, **options)


def deserialize(stock: Any, config: Any, custom_objects: Any = None, **options: Any) -> Any:
    """Returns what `keras.optimizers.deserialize` (`stock`) returns, as an optimizer of stand-alone Keras if it is one.

    So a model that stand-alone Keras saved keeps its clipping and defaults.
    """
    name = config["class_name"]
    own = None if name in (custom_objects or {}) else _own_class(name)
    return own.from_config(config["config"]) if own else stock(config, custom_objects, **options)
