"""`opt_level="O0".."O3"`: a shorthand for a precision mode, lists of operator types and a kind of loss scale.

The options of a run do not cast the model, so O2 and O3 lower all operators that have a float16 kernel. Variables and
their updates stay float32 in every level, so no level needs a second copy of the weights. In contrast, O3 of
`npu_bridge.amp` has float16 variables. Source: the levels of mixed-precision training with PyTorch, translated to
TensorFlow's rewriter.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from npu_bridge.base.errors import message, unknown_keyword
from npu_bridge.session.precision.levels import (
    DYNAMIC,
    LevelProperties,
    contradiction_error,
    level_properties,
    read_low_dtype,
)
from npu_bridge.session.precision.modes import FLOAT16
from npu_bridge.session.precision.op_lists import OpLists

_OWNER = "from_opt_level"
_TYPES = ("half_types", "float_types", "promote_types")
_OVERRIDES = ("loss_scale", "low_dtype", "keep_batchnorm_fp32", *_TYPES)
# Start, growth and limits of the dynamic scale of these levels.
_DYNAMIC = {
    "init_loss_scale": 2.0**16,
    "incr_every_n_steps": 2000,
    "decr_every_n_nan_or_inf": 1,
    "incr_ratio": 2,
    "decr_ratio": 0.5,
}


class LossScale(NamedTuple):
    """The loss-scale manager of a level, by its name and arguments.

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
      precision_mode_v2: value of the option of this name.
      op_lists: operator types that deviate from the precision mode.
      loss_scale: the loss-scale manager to use.
    """

    level: str
    precision_mode_v2: str
    op_lists: OpLists
    loss_scale: LossScale

    def options(self, folder: str | None = None) -> dict[str, str]:
        """Returns the level as arguments of `NPURunConfig`; entries of `parameter_map` have the same names.

        Args:
          folder: folder for the file with `op_lists`, created if missing. None leaves `op_lists` out; call
            `op_lists.register(graph)` instead.
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
      **overrides: settings that replace those of the level; None keeps the level's setting.
        loss_scale: "dynamic", or a fixed scale: a number of at least 1, or its text; 1.0 means no scaling.
        low_dtype: under O1, "float16" or "bfloat16".
        keep_batchnorm_fp32: True or False, or their texts; only under O2 and O3, as O0 and O1 always keep it.
        half_types, float_types, promote_types: under O1, operator types as for `register_half_function` and its
          siblings.
    Raises:
      TypeError: an override does not exist, or has the wrong type.
      ValueError: there is no such level, the level does not support an override, or a value is not legal.
    Example:
      level = from_opt_level("O1", float_types=["Softplus"])
      config = NPURunConfig(model_dir="out", **level.options("out"))
    """
    for name in overrides:
        if name not in _OVERRIDES:
            raise unknown_keyword(_OWNER, name, _OVERRIDES)
    given = {name: value for name, value in overrides.items() if value is not None}
    of_level = {name: value for name, value in given.items() if name in LevelProperties._fields}
    properties = level_properties(_OWNER, level, of_level)
    mode = properties.precision_mode(read_low_dtype(_OWNER, level, properties, given.get("low_dtype")))
    return OptLevel(level, mode, _make_op_lists(level, properties, given), _choose_loss_scale(properties.loss_scale))


def _make_op_lists(level: str, properties: LevelProperties, given_options: dict[str, Any]) -> OpLists:
    for name in _TYPES:
        if name in given_options and level != "O1":
            raise contradiction_error(
                _OWNER, name, given_options, level, "this level does not choose operators by type", "O1"
            )
    half, floats, promote = (_read_types(given_options, name) for name in _TYPES)
    return properties.op_lists().with_half(*half).with_float(*floats).with_promote(*promote)


def _read_types(given: dict[str, Any], name: str) -> Iterable[str]:
    value = given.get(name, ())
    if isinstance(value, str) or not isinstance(value, Iterable):
        fix = f"Pass {name}=[...]."
        raise TypeError(message(_OWNER, f"{name} is not a list", "a list of operator types", repr(value), fix))
    value = list(value)
    for other in (key for key in _TYPES if key != name):
        for twice in value:
            if twice in given.get(other, ()):
                problem, expected = f"{twice!r} is in {name} and {other}", "one list for each type"
                raise ValueError(message(_OWNER, problem, expected, "two lists", "Remove one."))
    return value


def _choose_loss_scale(scale: float | str) -> LossScale:
    if scale == DYNAMIC:
        return LossScale("ExponentialUpdateLossScaleManager", dict(_DYNAMIC))
    return LossScale(None, {}) if scale == 1.0 else LossScale("FixedLossScaleManager", {"loss_scale": scale})
