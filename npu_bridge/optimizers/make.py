"""Makes the optimizer classes of all update rules: for TF 1 and for the versions of Keras."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from npu_bridge.base.errors import unknown_keyword
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.optimizers import rules

_COMMON_ARGUMENTS = ("groups", "name", "fused")


def make_optimizer_classes(base: type, module: str) -> dict:
    """Returns a class for each rule by name: a subclass of `base` with the arguments and docstring of the rule."""
    return {rule.__name__: _make_optimizer_class(base, rule, module) for rule in rules.ALL}


def make_signature(rule: type) -> inspect.Signature:
    """Returns the signature of the optimizers of a rule."""
    fields = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if field.metadata.get("is_required") else field.default,
        )
        for field in dataclasses.fields(rule)
    ]
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _COMMON_ARGUMENTS]
    rest = inspect.Parameter("keywords", inspect.Parameter.VAR_KEYWORD)
    return inspect.Signature([*fields, *own, rest])


def _make_optimizer_class(base, rule, module):
    signature = make_signature(rule)

    def __init__(self, *arguments: Any, **keywords: Any):
        given = signature.bind(*arguments, **keywords).arguments
        others = given.pop("keywords", {})
        for name in others:
            if name not in base.other_keywords:
                known = [*signature.parameters][:-1]
                raise unknown_keyword(rule.__name__, name, [*known, *base.other_keywords])
        base.__init__(self, **given, **others)

    __init__.__signature__ = signature
    members = {"__init__": __init__, "__doc__": rule.__doc__, "__module__": module, "rule_class": rule}
    made = type(rule.__name__, (base,), members)
    if issubclass(base, tf.compat.v1.train.Optimizer):
        return made
    return base.registered(made)
