"""Reads the numbers that callbacks may set in an optimizer of Keras, such as its learning rate."""

from __future__ import annotations

import contextlib
from typing import Any

from npu_bridge.base.arguments import is_integer, is_number


def optimizer_numbers(optimizer: Any) -> dict[str, float]:
    """Returns the current hyperparameters of an optimizer by name, without a learning rate that follows a schedule.

    Empty if the optimizer has no configuration, such as one of TensorFlow 1 in a Keras model.
    """
    config: dict = {}
    with contextlib.suppress(NotImplementedError, AttributeError):
        config = optimizer.get_config()
    config = config["optimizer"]["config"] if isinstance(config.get("optimizer"), dict) else config  # a wrapper
    found = {name: value for name, value in config.items() if is_number(value) and hasattr(optimizer, name)}
    return {name: int(value) if is_integer(value) else float(value) for name, value in found.items()}
