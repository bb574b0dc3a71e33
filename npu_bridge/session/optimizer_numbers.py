"""Reads the hyperparameters that callbacks can set in a Keras optimizer, such as the learning rate."""

from __future__ import annotations

import contextlib
from typing import Any

from npu_bridge.base.arguments import is_integer, is_number

_OF_BATCHES = ("gradient_accumulation_steps", "ema_overwrite_frequency")


def optimizer_numbers(optimizer: Any) -> dict[str, float]:
    """Returns an optimizer's current numeric hyperparameters by name, without a learning rate that is a schedule.

    Numbers that say in which batches Keras 3 updates are left out: no callback sets them.

    The result is empty if the optimizer has no configuration, such as a TensorFlow 1 optimizer in a Keras model, or one
    that cannot be written, such as groups of variables.
    """
    config: dict = {}
    with contextlib.suppress(NotImplementedError, AttributeError, TypeError, ValueError):
        config = optimizer.get_config()
    config = config["optimizer"]["config"] if isinstance(config.get("optimizer"), dict) else config  # a wrapper
    found = {name: value for name, value in config.items() if is_number(value) and hasattr(optimizer, name)}
    found = {name: value for name, value in found.items() if name not in _OF_BATCHES}
    return {name: int(value) if is_integer(value) else float(value) for name, value in found.items()}
