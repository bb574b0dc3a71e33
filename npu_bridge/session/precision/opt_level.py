"""`opt_level="O0".."O3"`: a shorthand for a precision mode, lists of operator types and a kind of loss scale.

| level | operators | batch normalisation | loss scale |
| --- | --- | --- | --- |
| O0 | float32 | float32 | none |
| O1 | those mixed precision allows in float16 | float32 | dynamic |
| O2 | all that have float16 | float32 | dynamic |
| O3 | all that have float16 | float16 | none |

Variables and their updates are float32 in every level, so no level needs a second copy of the weights. Elsewhere O3
means float16 variables, here it does not.
Source: the levels of mixed-precision training with PyTorch, in the terms of TensorFlow's rewriter.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from npu_bridge.base.errors import did_you_mean, message
from npu_bridge.session.precision.levels import DYNAMIC, LOW_DTYPES, Properties, level_of, read_loss_scale, read_truth
from npu_bridge.session.precision.modes import BFLOAT16, FLOAT16
from npu_bridge.session.precision.op_lists import OpLists

_OWNER = "from_opt_level"
_OVERRIDES = ("loss_scale", "low_dtype", "keep_batchnorm_fp32", "half_types", "float_types", "promote_types")
# Start, growth and limits of the dynamic scale of these levels.
_DYNAMIC = {
    "init_loss_scale": 2.0**16,
    "incr_every_n_steps": 2000,
    "decr_every_n_nan_or_inf": 1,
    "incr_ratio": 2,
    "decr_ratio": 0.5,
}


class LossScale(NamedTuple):
    """The loss-scale manager of a level.

    Attributes:
      manager: name of the manager's class; None for no loss scale.
      arguments: arguments of its constructor.
    """

    manager: str | None
    arguments: dict[str, Any]


class OptLevel(NamedTuple):
    """The settings of a level.

    Attributes:
      level: "O0" to "O3".
      precision_mode_v2: the option of this name.
      op_lists: operator types that deviate from the mode.
      loss_scale: the loss-scale manager to use.
    """

    level: str
    precision_mode_v2: str
    op_lists: OpLists
    loss_scale: LossScale

    def options(self, folder: str | None = None) -> dict[str, str]:
        """Returns the level as arguments of `NPURunConfig`; they have the same names in `parameter_map`.

        Args:
          folder: folder for the file with `op_lists`, created if missing. None leaves the lists out; then
            `op_lists.register(graph)` can give them to a graph.
        """
        options = {"precision_mode_v2": self.precision_mode_v2}
        if folder is None or self.op_lists == OpLists():
            return options
        os.makedirs(folder, exist_ok=True)
        if self.precision_mode_v2.startswith("mixed"):
            options["modify_mixlist"] = os.path.join(folder, f"mixlist_{self.level}.json")
            self.op_lists.write_mixlist(options["modify_mixlist"])
        else:  # only mixed precision reads a mixlist
            options["customize_dtypes"] = os.path.join(folder, f"dtypes_{self.level}.txt")
            self.op_lists.write_operator_dtypes(options["customize_dtypes"], FLOAT16)
        return options


def from_opt_level(level: str, **overrides: Any) -> OptLevel:
    """Translates `opt_level` to the options of this library.

    Args:
      level: "O0", "O1", "O2" or "O3".
      **overrides: parts of the level to replace; None keeps the part.
        loss_scale: "dynamic", or a number of at least 1 or its text for a fixed scale; 1.0 scales nothing.
        low_dtype: "float16" or, under O1, "bfloat16".
        keep_batchnorm_fp32: True or False, or their texts; only under O2 and O3, as the others keep it anyway.
        half_types, float_types, promote_types: under O1, operator types as for `register_half_function` and its
          siblings.
    Raises:
      TypeError: an override does not exist, or has the wrong type.
      ValueError: there is no such level, an override does not go with it, or its value is not legal.
    Example:
      level = from_opt_level("O1", float_types=["Softplus"])
      config = NPURunConfig(model_dir="out", **level.options("out"))
    """
    properties = level_of(_OWNER, level)
    for name in overrides:
        if name not in _OVERRIDES:
            fix = did_you_mean(name, _OVERRIDES, "Remove it: variables are float32 in every level.")
            raise TypeError(message(_OWNER, "unknown override", ", ".join(_OVERRIDES), repr(name), fix))
    given = {name: value for name, value in overrides.items() if value is not None}
    properties = _replaced(level, properties, given)
    mode = properties.precision_mode(_low_dtype(level, given))
    return OptLevel(level, mode, _op_lists(level, properties, given), _loss_scale(properties.loss_scale))


def _replaced(level: str, properties: Properties, given: dict[str, Any]) -> Properties:
    if "keep_batchnorm_fp32" in given:
        if properties.keep_batchnorm_fp32 is None:
            raise _does_not_go(level, "keep_batchnorm_fp32", given, "it keeps float32 there anyway", "O2 or O3")
        keeps_batchnorm = read_truth(_OWNER, "keep_batchnorm_fp32", given["keep_batchnorm_fp32"])
        properties = properties._replace(keep_batchnorm_fp32=keeps_batchnorm)
    if "loss_scale" in given:
        properties = properties._replace(loss_scale=read_loss_scale(_OWNER, "loss_scale", given["loss_scale"]))
    return properties


def _low_dtype(level: str, given: dict[str, Any]) -> str:
    low_dtype = given.get("low_dtype", FLOAT16)
    if low_dtype not in LOW_DTYPES:
        raise _error("low_dtype is not a low dtype", f"{FLOAT16} or {BFLOAT16}", repr(low_dtype), "Use one of them.")
    if level == "O0" and "low_dtype" in given:
        raise _does_not_go(level, "low_dtype", given, "nothing is lowered there", "O1")
    if low_dtype == BFLOAT16 and level != "O1":
        raise _does_not_go(level, "low_dtype", given, "only mixed precision knows bfloat16", "O1")
    return low_dtype


def _op_lists(level: str, properties: Properties, given: dict[str, Any]) -> OpLists:
    for name in ("half_types", "float_types", "promote_types"):
        if name in given and level != "O1":
            raise _does_not_go(level, name, given, "its operators are not chosen by type", "O1")
    lists = properties.op_lists().with_half(*_types(given, "half_types"))
    lists = lists.with_float(*_types(given, "float_types"))
    return lists.with_promote(*_types(given, "promote_types"))


def _types(given: dict[str, Any], name: str) -> Iterable[str]:
    value = given.get(name, ())
    if isinstance(value, str) or not isinstance(value, Iterable):
        fix = f"Pass {name}=[...]."
        raise TypeError(message(_OWNER, f"{name} is not a list", "a list of operator types", repr(value), fix))
    value = list(value)
    others = [key for key in ("half_types", "float_types", "promote_types") if key != name]
    for other in others:
        for twice in value:
            if twice in given.get(other, ()):
                raise _error(f"{twice!r} is in {name} and {other}", "one list for each type", "two", "Remove one.")
    return value


def _loss_scale(scale: float | str) -> LossScale:
    if scale == DYNAMIC:
        return LossScale("ExponentialUpdateLossScaleManager", dict(_DYNAMIC))
    return LossScale(None, {}) if scale == 1.0 else LossScale("FixedLossScaleManager", {"loss_scale": scale})


def _does_not_go(level: str, name: str, given: dict[str, Any], reason: str, better: str) -> ValueError:
    fix = f"Leave it out, or use {better}."
    return _error(f"{name} does not go with {level}, because {reason}", f"no {name}", repr(given[name]), fix)


def _error(problem: str, expected: str, got: str, fix: str) -> ValueError:
    return ValueError(message(_OWNER, problem, expected, got, fix))
