"""Makes optimizers of the kind that the caller needs: TF 1 while a TF 1 graph is built, Keras elsewhere."""

from __future__ import annotations

from typing import Any

from npu_bridge.base.errors import did_you_mean, message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.optimizers import keras, rules, tf1
from npu_bridge.optimizers.make import make_signature


def from_config(config: dict) -> Any:
    """Makes an optimizer from a dictionary (a table of a TOML file, say).

    Args:
      config: the name of an optimizer of this package as "rule", and the arguments of this optimizer.
    Raises:
      ValueError: there is no such rule or argument.
    """
    arguments = dict(config)
    name = arguments.pop("rule", None)
    known = [rule.__name__ for rule in rules.ALL]
    if name not in known:
        fix = did_you_mean(name, known, "Use one of these names.")
        raise ValueError(message("optimizers.from_config", "unknown rule", ", ".join(known), repr(name), fix))
    make = globals()[name]
    known = [parameter for parameter in make.__signature__.parameters if parameter != "keywords"]
    for argument in arguments:
        if argument not in known:
            fix = did_you_mean(argument, known, f"Use one of {', '.join(known)}.")
            raise ValueError(message(name, f"unknown argument {argument!r}", f"an argument of {name}", argument, fix))
    return make(**arguments)


def _make_function(rule):
    def make(*arguments: Any, **keywords: Any) -> Any:
        default = tf.compat.v1.get_default_graph()
        is_tf1_graph = not tf.executing_eagerly() and not default.building_function
        return getattr(tf1 if is_tf1_graph else keras, rule.__name__)(*arguments, **keywords)

    make.__name__ = make.__qualname__ = rule.__name__
    make.__doc__ = rule.__doc__
    make.__signature__ = make_signature(rule)
    return make


globals().update({rule.__name__: _make_function(rule) for rule in rules.ALL})
