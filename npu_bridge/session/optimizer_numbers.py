"""Reads the hyperparameters that callbacks can set in a Keras optimizer, such as the learning rate."""

from __future__ import annotations

import contextlib
from typing import Any

from npu_bridge.base.arguments import is_integer, is_number


def optimizer_numbers(optimizer: Any) -> dict[str, float]:
    """Returns an optimizer's current numeric hyperparameters by name, without a learning rate that is a schedule.

    `gradient_accumulation_steps` is left out: no callback sets it, and another number of ranks needs another one.

    The result is empty if the optimizer has no configuration, such as a TensorFlow 1 optimizer in a Keras model, or one
    that cannot be written, such as groups of variables.
    """
    optimizer, config = optimizer_in_scaling(optimizer), {}
    with contextlib.suppress(NotImplementedError, AttributeError, TypeError, ValueError):
        config = optimizer.get_config()
    config = config["optimizer"]["config"] if isinstance(config.get("optimizer"), dict) else config  # a wrapper
    found = {name: value for name, value in config.items() if is_number(value) and hasattr(optimizer, name)}
    found.pop("gradient_accumulation_steps", None)
    return {name: int(value) if is_integer(value) else float(value) for name, value in found.items()}


def optimizer_in_scaling(optimizer: Any) -> Any:
    """Returns the optimizer inside Keras' own loss scaling, which `compile` adds in mixed_float16; others unchanged."""
    return getattr(optimizer, "inner_optimizer", optimizer)
