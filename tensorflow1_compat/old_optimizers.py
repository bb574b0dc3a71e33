"""Defines the optimizers of stand-alone Keras, and those of `tensorflow.python.keras.optimizers` in TensorFlow 1.15.

They differ from `tf.keras.optimizers` in their default learning rates. Stand-alone Keras also clips the norm of all
gradients together.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import tensorflow.compat.v1 as tf

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


def get(stock: Any, identifier: Any, **options: Any) -> Any:
    """Returns what `keras.optimizers.get` (`stock`) returns; for a name, with the defaults of stand-alone Keras."""
    if not isinstance(identifier, str):
        return stock(identifier, **options)
    found = {name.lower(): kind for name, kind in vars(of_keras).items()}.get(identifier.lower())
    return found() if found else stock(identifier, **options)
