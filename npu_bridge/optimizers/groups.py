"""Defines parameter groups: the rule and the hyper-parameters for each variable."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from npu_bridge.base.arguments import check_pattern
from npu_bridge.base.errors import did_you_mean, message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.graphs import original_variable_of
from npu_bridge.optimizers import rules
from npu_bridge.optimizers.rule import Rule


@dataclasses.dataclass(frozen=True)
class VariableTreatment:
    """The way a variable is updated. Variables with equal treatment can be updated together.

    Attributes:
      rule: the rule with the hyper-parameters of the variable's group.
      decays: whether weight decay applies.
      adapts_layer: whether the norm of the whole tensor is used, in rules that use norms.
      has_own_rate: whether the variable's group gives a learning rate, or a rule, which has one.
    """

    rule: Rule
    decays: bool
    adapts_layer: bool
    has_own_rate: bool


class ParameterGroups:
    """The groups of an optimizer; finds the treatment of each variable.

    Args:
      rule: the rule, with its hyper-parameters, for all variables outside of groups.
      groups: dictionaries with "match" and the hyper-parameters that differ from the rule's ("lr" means
        "learning_rate"). "match" is a list of variables, or a regular expression that is searched for in their names.
        With "rule", the name of another optimizer of this package, the group takes this optimizer's rule and arguments,
        except those that bound the global norm.
        A variable belongs to the first group that matches.
      may_decay: function that returns whether weight decay can apply to a variable; None means to all variables.
    Raises:
      TypeError, ValueError: a group is not such a dictionary, or a value is not allowed.
    """

    def __init__(
        self, rule: Rule, groups: Sequence[dict] | None = None, may_decay: Callable[[Any], bool] | None = None
    ):
        self._owner = type(rule).__name__
        self.rule = rule
        self._may_decay = may_decay or (lambda variable: True)
        self._groups = [self._read_group(number, group) for number, group in enumerate(groups or ())]
        self._treatments: dict[VariableTreatment, VariableTreatment] = {}

    def treatment_of(self, variable: Any) -> VariableTreatment:
        """Returns the update rule and settings of a variable; variables with equal settings share one object."""
        name = keras3.name_of(variable)
        own = (self.rule, False)
        rule, has_own_rate = next((of for match, *of in self._groups if _is_match(match, variable, name)), own)
        decays = self._may_decay(variable) and not _is_any_match(rule.exclude_from_weight_decay, name)
        of_layers = getattr(rule, "exclude_from_layer_adaptation", None)
        adapts_layer = decays if of_layers is None else not _is_any_match(of_layers, name)
        treatment = VariableTreatment(rule, decays, adapts_layer, has_own_rate)
        return self._treatments.setdefault(treatment, treatment)

    def check_groups_match(self, variables: Sequence[Any]) -> None:
        """Checks that every group matches a variable.

        If ranks share the update, `variables` can be only a part of the trained variables. So all trainable variables
        of the graph are searched, too.

        Raises:
          ValueError: a group matches no variable.
        """
        if not tf.executing_eagerly():
            variables = [*variables, *tf.compat.v1.trainable_variables()]
        names = [keras3.name_of(variable) for variable in variables]
        for number, (match, *_) in enumerate(self._groups):
            if any(_is_match(match, variable, name) for variable, name in zip(variables, names)):
                continue
            hint = did_you_mean(match, names if isinstance(match, str) else (), f"Match one of {', '.join(names[:5])}.")
            got = repr(match) if isinstance(match, str) else "variables that are not trained"
            problem, expected = f"group {number} matches no variable", "a match for at least one variable"
            raise ValueError(message(self._owner, problem, expected, got, hint))

    def _read_group(self, number, group):
        where = f"{self._owner}: group {number}"
        if not isinstance(group, dict) or "match" not in group:
            problem, expected = (
                "the group does not say which variables it contains",
                'a dictionary with the key "match"',
            )
            raise TypeError(message(where, problem, expected, repr(group), "Add the key."))
        values = {"learning_rate" if name == "lr" else name: value for name, value in group.items() if name != "match"}
        rule_name = values.pop("rule", None)
        rule_class = type(self.rule) if rule_name is None else _find_rule(rule_name, where)
        known = (
            self.rule.hyper_names() if rule_name is None else [field.name for field in dataclasses.fields(rule_class)]
        )
        for name in values:
            if name not in known:
                fix = did_you_mean(name, known, f"Use one of {', '.join(known)}.")
                raise ValueError(
                    message(where, f"unknown hyper-parameter {name!r}", "a hyper-parameter of the rule", name, fix)
                )
        match = group["match"]
        if isinstance(match, str):
            check_pattern(where, "its match", match)
        else:
            match = tuple(keras3.tensorflow_variable_of(variable).ref() for variable in match)
        if rule_name is not None:
            made = rule_class(**values)
            if made.uses_global_norm:
                problem, expected = "the global norm is of all gradients, not of a group", "no bound of it in a group"
                fix = "Bound it by the optimizer's own rule, or by tf.clip_by_global_norm."
                raise ValueError(message(where, problem, expected, ", ".join(values), fix))
            return match, made, True
        return match, dataclasses.replace(self.rule, **values), "learning_rate" in values


def _find_rule(name, owner):
    known = {rule.__name__: rule for rule in rules.ALL}
    if not isinstance(name, str) or name not in known:
        fix = did_you_mean(name, known, "Use one of these names.")
        raise ValueError(message(owner, "unknown rule", f"one of {', '.join(known)}", repr(name), fix))
    return known[name]


def distinct_names(variables: Sequence[Any]) -> list[str]:
    """Returns variables' names, with numbers after the first variable of a name: `v`, `v:1`, `v:2`.

    In eager execution, variables can share a name.
    """
    names: list[str] = []
    seen: dict[str, int] = {}
    for name in map(keras3.name_of, variables):
        seen[name] = seen.get(name, -1) + 1
        names.append(f"{name}:{seen[name]}" if seen[name] else name)
    return names


def _is_match(match, variable, name):
    return (
        re.search(match, name) is not None if isinstance(match, str) else original_variable_of(variable).ref() in match
    )


def _is_any_match(patterns, name):
    return any(re.search(pattern, name) for pattern in patterns or ())
