"""Implements `DynamicLossScaleManager`: a dynamic loss scale whose factors and limits the user chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from npu_bridge.base.arguments import check_count, check_number
from npu_bridge.estimator.npu.npu_loss_scale_manager import MovingLossScaleManager
from npu_bridge.gradients.scale_rule import LARGEST_SCALE, check_growth, check_scale, checked_rule

__all__ = ["DynamicLossScaleManager"]


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class DynamicLossScaleManager(MovingLossScaleManager):
    """A loss scale that grows after good steps and shrinks after bad steps, by factors that you choose.

    A bad step is a step with an overflow. After `growth_interval` good steps in a row the scale is multiplied by
    `growth_factor`; after `bad_steps` bad steps it is multiplied by `backoff_factor`. The scale stays within its
    bounds, and each change resets both counters. A scale of a checkpoint that is outside of them is moved into them by
    the first step. `apex`, `mindspore`, `keras` and `constant` make managers with the numbers of other frameworks.

    Args:
      init_loss_scale: scale of the first step.
      growth_factor: at least 1; 1 for a scale that does not grow.
      backoff_factor: above 0 and at most 1; 1 for a scale that does not shrink.
      growth_interval: number of good steps, at least 1.
      bad_steps: number of bad steps, at least 1.
      consecutive_bad_steps: whether a good step resets the count of bad steps. Otherwise bad steps are also counted
        with good steps between them.
      min_loss_scale: lower bound of the scale; None for 1e-37.
      max_loss_scale: upper bound of the scale; None for 3.4e38.
    Raises:
      TypeError: an argument is not a number, or a step count not an integer.
      ValueError: an argument is out of its range, or the first scale is out of the bounds.
    Graph: has the same variables as `ExponentialUpdateLossScaleManager`, so each resumes from the other's checkpoints.
    """

    def __init__(
        self,
        init_loss_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        bad_steps: int = 1,
        consecutive_bad_steps: bool = False,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
    ):
        owner = "DynamicLossScaleManager"
        rule, constants = checked_rule(
            owner,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            bad_steps=bad_steps,
            consecutive_bad_steps=consecutive_bad_steps,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
        )
        lowest, highest = rule.bounds
        first = check_number(owner, "init_loss_scale", init_loss_scale, at_least=lowest, at_most=highest)
        super().__init__("dynamic_loss_scale", rule, first, {"init_loss_scale": first, **constants})

    @classmethod
    def apex(
        cls,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> DynamicLossScaleManager:
        """Makes the loss scale of APEX: halved at every overflow, doubled after 2000 good steps in a row up to 2**24.

        Args:
          init_scale: scale of the first step; reduced to `max_loss_scale` if larger.
          growth_factor, backoff_factor, scale_window: `scale_growth_factor`, `scale_backoff_factor` and `scale_window`
            of APEX for NPUs.
          min_loss_scale, max_loss_scale: bounds.
        Raises:
          TypeError, ValueError: as for the constructor.
        """
        arguments = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "scale_window": scale_window,
            "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale,
        }
        check_apex_arguments("DynamicLossScaleManager.apex", arguments)
        first, bounds = min(init_scale, max_loss_scale), (min_loss_scale, max_loss_scale)
        return cls(first, growth_factor, backoff_factor, scale_window, 1, False, *bounds)

    @classmethod
    def mindspore(
        cls, init_loss_scale: float = 2.0**24, scale_factor: float = 2.0, scale_window: int = 2000
    ) -> DynamicLossScaleManager:
        """Makes the dynamic loss scale of MindSpore: divided at every overflow, down to 1; grows after good steps.

        Args:
          init_loss_scale: scale of the first step, at least 1.
          scale_factor: factor by which the scale is multiplied and divided, at least 1.
          scale_window: number of good steps in a row after which the scale grows.
        Raises:
          TypeError, ValueError: as for the constructor.
        """
        owner = "DynamicLossScaleManager.mindspore"
        check_number(owner, "init_loss_scale", init_loss_scale, at_least=1, at_most=LARGEST_SCALE)
        check_growth(owner, "scale_factor", scale_factor)
        check_count(owner, "scale_window", scale_window)
        return cls(init_loss_scale, scale_factor, 1.0 / scale_factor, scale_window, 1, False, 1.0, None)

    @classmethod
    def keras(cls, initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000) -> DynamicLossScaleManager:
        """Makes a scale that changes as in Keras's `LossScaleOptimizer`: halved down to 1, doubled without upper bound.

        Args:
          initial_scale, dynamic_growth_steps: as in `tf.keras.mixed_precision.LossScaleOptimizer`.
        Raises:
          TypeError, ValueError: as for the constructor.
        """
        owner = "DynamicLossScaleManager.keras"
        check_number(owner, "initial_scale", initial_scale, at_least=1, at_most=LARGEST_SCALE)
        check_count(owner, "dynamic_growth_steps", dynamic_growth_steps)
        return cls(initial_scale, 2.0, 0.5, dynamic_growth_steps, 1, False, 1.0, None)

    @classmethod
    def constant(cls, loss_scale: float) -> DynamicLossScaleManager:
        """Makes a loss scale that only `set_loss_scale` changes. A resumed training keeps the scale of its checkpoint.

        Args:
          loss_scale: scale of the first step.
        Raises:
          TypeError, ValueError: as for the constructor.
        """
        check_scale("DynamicLossScaleManager.constant", "loss_scale", loss_scale)
        return cls(loss_scale, 1.0, 1.0, 1, 1, False, None, None)


def check_apex_arguments(owner: str, arguments: Mapping[str, Any], first_name: str = "init_scale") -> None:
    """Checks arguments of `DynamicLossScaleManager.apex`, of which some can be missing.

    Args:
      owner: name of the caller.
      arguments: the arguments by the names under which the script gave them.
      first_name: the name of the scale of the first step.
    Raises:
      TypeError: an argument has the wrong type.
      ValueError: an argument is out of its range.
    """
    arguments = {"min_loss_scale": None, "max_loss_scale": 2.0**24, **arguments}
    first = arguments.pop(first_name, 2.0**16)
    rule, _ = checked_rule(owner, **arguments)
    check_scale(owner, "max_loss_scale", arguments["max_loss_scale"])  # not None
    check_scale(owner, first_name, first, at_least=rule.bounds[0])
