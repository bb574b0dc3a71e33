"""Reads size files: a TOML file sets the size of the model, and defaults for flags of the training."""

from __future__ import annotations

import difflib
import os
import sys
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class ModelTable(NamedTuple):
    """The `[model]` table. `vocab_size` is an upper limit: a small corpus can have fewer pieces."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    max_positions: int
    dropout: float = 0.0
    lower_case: bool = True


class TrainingTable(NamedTuple):
    """The `[training]` table. `train_batch_size` is per rank; `warmup_share` is a share of the whole run."""

    train_batch_size: int
    max_seq_length: int
    num_train_steps: int
    learning_rate: float
    warmup_share: float
    weight_decay_rate: float
    save_checkpoints_steps: int


class Settings(NamedTuple):
    """A whole size file."""

    model: ModelTable
    training: TrainingTable


def read_settings(path: str) -> Settings:
    """Reads a size file.

    Args:
      path: a file; if there is none, the same name under this checkout.
    Raises:
      ValueError: no such file, an unknown or missing key, a wrong type, or numbers that do not fit together.
    """
    found = path if os.path.exists(path) else os.path.join(_REPOSITORY, path)
    if not os.path.exists(found):
        names = sorted(name for name in os.listdir(os.path.join(_REPOSITORY, "configs")) if name.startswith("bert_"))
        known = ", ".join(f"configs/{name}" for name in names)
        raise ValueError(f"--config: expected a file; got {path!r}, which does not exist. There are: {known}.")
    with open(found, "rb") as file:
        try:
            tables = tomllib.load(file)
        except ValueError as error:
            raise ValueError(f"{found}: it is not TOML. {error}. Correct that line.") from None
    _check_names(found, "a table", tables, Settings._fields)
    settings = Settings(
        _fill(found, "model", ModelTable, tables.get("model", {})),
        _fill(found, "training", TrainingTable, tables.get("training", {})),
    )
    _check_fit(found, settings)
    return settings


def _fill(path: str, table: str, kind, values: dict[str, Any]):
    _check_names(path, f"a key of [{table}]", values, kind._fields)
    missing = [name for name in kind._fields if name not in values and name not in kind._field_defaults]
    if missing:
        raise ValueError(f"{path}: [{table}] lacks {', '.join(missing)}.")
    for name, value in values.items():
        expected = kind.__annotations__[name]
        expected = {"int": int, "float": float, "bool": bool}.get(getattr(expected, "__forward_arg__", expected))
        if expected is float and type(value) is int:
            continue
        if type(value) is not expected:
            raise ValueError(f"{path}: [{table}] {name} expected {expected.__name__}; got {value!r}.")
    return kind(**values)


def _check_names(path: str, what: str, values: dict[str, Any], known):
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
            raise ValueError(f"{path}: {name!r} is not {what}. {hint}")


def _check_fit(path: str, settings: Settings):
    model, training = settings
    if model.hidden_size % model.num_heads:
        raise ValueError(
            f"{path}: heads do not share the width evenly. Expected hidden_size a multiple of "
            f"num_heads={model.num_heads}; got hidden_size={model.hidden_size}."
        )
    if training.max_seq_length > model.max_positions:
        raise ValueError(
            f"{path}: rows are longer than the position table. Expected max_seq_length of at most "
            f"max_positions={model.max_positions}; got {training.max_seq_length}."
        )
    if not 0 <= training.warmup_share < 1:
        raise ValueError(f"{path}: warmup_share expected from 0 to below 1; got {training.warmup_share}.")
