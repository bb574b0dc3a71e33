"""Holds a table of the properties of levels O0 to O3, and replaces properties that a script overrides."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

from npu_bridge.base.errors import did_you_mean, message, shown
from npu_bridge.session.precision.modes import BFLOAT16, FLOAT16
from npu_bridge.session.precision.op_lists import OpLists

DYNAMIC = "dynamic"
LOW_DTYPES = (FLOAT16, BFLOAT16)
BATCH_NORM_TYPES = ("FusedBatchNormV2", "FusedBatchNormV3", "FusedBatchNormGradV2", "FusedBatchNormGradV3")


class LevelProperties(NamedTuple):
    """The properties of a level.

    Attributes:
      cast_model_type: dtype of the model's layers: "float32", "float16" or "bfloat16"; None leaves the layers
        unchanged.
      patch_functions: whether single operators are lowered, according to lists of operator types.
      keep_batchnorm_fp32: whether batch normalisation stays in float32 between 16-bit layers; None if this does not
        apply.
      master_weights: whether variables stay in float32, and are cast at each use, while layers compute in 16 bits; None
        if this does not apply.
      loss_scale: "dynamic", or a fixed scale; 1.0 means no scaling.
      cast_model_outputs: dtype of the model's floating-point outputs; None leaves them unchanged.
    """

    cast_model_type: str | None
    patch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str
    cast_model_outputs: str | None

    @property
    def casts_model(self) -> bool:
        """Whether the layers of the model compute in 16 bits."""
        return self.cast_model_type in LOW_DTYPES

    def precision_mode(self, low_dtype: str) -> str:
        """Returns the value of `precision_mode_v2` for these properties, with operators lowered to `low_dtype`."""
        if not (self.patch_functions or self.casts_model):
            return "origin"
        if low_dtype == BFLOAT16:
            return "mixed_bfloat16"
        return "fp16" if self.casts_model else "mixed_float16"

    def op_lists(self) -> OpLists:
        """Returns the operator types that deviate from the mode: batch normalisation, if it stays in float32."""
        keeps_batchnorm = self.patch_functions or self.keep_batchnorm_fp32
        return OpLists().with_float(*BATCH_NORM_TYPES) if keeps_batchnorm else OpLists()


LEVELS = {
    "O0": LevelProperties("float32", False, None, False, 1.0, "float32"),
    "O1": LevelProperties(None, True, None, None, DYNAMIC, None),
    "O2": LevelProperties("float16", False, True, True, DYNAMIC, "float32"),
    "O3": LevelProperties("float16", False, False, False, 1.0, "float32"),
}


def level_properties(owner: str, level: Any, overrides: dict[str, Any]) -> LevelProperties:
    """Returns the properties of a level after overrides, given by name; an override of None keeps the property.

    Raises:
      TypeError: an override has the wrong type.
      ValueError: there is no such level, a value is not legal, or an override contradicts other properties.
    """
    if not isinstance(level, str) or level not in LEVELS:
        otherwise = "Pass the letter O and a digit, as in 'O1'."
        fix = did_you_mean(level, LEVELS, otherwise) if isinstance(level, str) else otherwise
        raise ValueError(message(owner, "there is no such level", ", ".join(LEVELS), shown(level), fix))
    given = {name: _READERS[name](owner, name, value) for name, value in overrides.items() if value is not None}
    properties = LEVELS[level]._replace(**given)
    _check_consistency(owner, level, given, properties)
    if properties.cast_model_type == "float32":  # nothing is in 16 bits, so there is nothing to keep
        properties = properties._replace(keep_batchnorm_fp32=None, master_weights=False)
    return properties


def _check_consistency(owner: str, level: str, given: dict[str, Any], properties: LevelProperties) -> None:
    """Raises ValueError if properties contradict each other."""
    if properties.patch_functions and level != "O1":
        reason = "the whole model is cast, not operator by operator"
        raise contradiction_error(owner, "patch_functions", given, level, reason, "O1")
    if level == "O1":
        for name in ("cast_model_type", "keep_batchnorm_fp32", "master_weights"):
            if name in given:
                raise contradiction_error(owner, name, given, level, _WHY_NOT_O1[name], "O2")
    if given.get("master_weights") and not properties.casts_model:
        reason = "the variables are float32 themselves"
        raise contradiction_error(owner, "master_weights", given, level, reason, "O2")
    if "keep_batchnorm_fp32" in given and not properties.casts_model:
        reason = "nothing is in 16 bits, so batch normalisation is in float32 anyway"
        raise contradiction_error(owner, "keep_batchnorm_fp32", given, level, reason, "O2 or O3")


_WHY_NOT_O1 = {
    "cast_model_type": "the model stays in float32 and single operators are lowered",
    "keep_batchnorm_fp32": "batch normalisation is on the list of operators that stay in float32 anyway",
    "master_weights": "the variables are float32 themselves",
}


def contradiction_error(
    owner: str, name: str, given: dict[str, Any], level: str, reason: str, better: str
) -> ValueError:
    """Returns the ValueError for an override that a level does not support."""
    fix = f"Leave it out, or use {better}."
    return ValueError(message(owner, f"{name} contradicts {level}: {reason}", f"no {name}", shown(given[name]), fix))


def read_dtype(owner: str, name: str, value: Any) -> str:
    """Returns the name of a floating-point dtype, given as text or as a dtype of TensorFlow or numpy."""
    text = getattr(value, "name", None) or getattr(value, "__name__", None) or value
    if text not in ("float32", *LOW_DTYPES):
        expected = "float32, float16 or bfloat16"
        raise ValueError(message(owner, f"{name} is not a known dtype", expected, shown(value), "Pass one of these."))
    return str(text)


def read_low_dtype(owner: str, level: str, properties: LevelProperties, requested_dtype: Any) -> str:
    """Returns the 16-bit dtype of a level's operators; `requested_dtype` overrides the default unless it is None."""
    if requested_dtype is None:
        return str(properties.cast_model_type) if properties.casts_model else FLOAT16
    dtype = read_dtype(owner, "low_dtype", requested_dtype)
    if not properties.patch_functions or dtype == "float32":
        fix = "Pass cast_model_type instead, or use O1."
        problem = f"low_dtype does not fit {level}: it is the 16-bit dtype of operator lists"
        raise ValueError(message(owner, problem, "no low_dtype", shown(requested_dtype), fix))
    return dtype


def read_bool(owner: str, name: str, value: Any) -> bool:
    """Converts True or False, or the text of either, to a bool."""
    if isinstance(value, bool) or (isinstance(value, str) and value in ("True", "False")):
        return value in (True, "True")
    raise ValueError(message(owner, f"{name} is not a truth value", "True or False", shown(value), "Pass one of them."))


def read_loss_scale(owner: str, name: str, value: Any) -> float | str:
    """Converts a loss scale: a number of at least 1 (also as text), or "dynamic"."""
    if isinstance(value, str) and value == DYNAMIC:
        return DYNAMIC
    expected = 'a number of at least 1, its text, or "dynamic"'
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
        raise TypeError(message(owner, f"{name} is not a number", expected, shown(value), "Pass 128.0, for example."))
    try:
        scale = float(value)
    except ValueError:
        scale = 0.0
    if not 1 <= scale < float("inf"):
        raise ValueError(message(owner, f"{name} is not usable", expected, shown(value), "Pass 128.0, for example."))
    return scale


_READERS = {
    "cast_model_type": read_dtype,
    "patch_functions": read_bool,
    "keep_batchnorm_fp32": read_bool,
    "master_weights": read_bool,
    "loss_scale": read_loss_scale,
    "cast_model_outputs": read_dtype,
}
