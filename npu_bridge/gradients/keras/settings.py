"""Defines the settings of a Keras optimizer with a pipeline. The settings can be saved with a model."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Sequence
from typing import Any

from npu_bridge.base import environment
from npu_bridge.base.errors import say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.collective.fragments import check_first_parameters
from npu_bridge.gradients.inner.interface import InnerOptimizer
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.gradients.recipe import PipelineSettings, build_pipeline
from npu_bridge.gradients.stages.skip_record import SkipRecord


@dataclasses.dataclass(frozen=True)
class KerasSettings:
    """The settings of a Keras optimizer with a pipeline.

    Attributes:
      name, manager, is_distributed, stages: as in `recipe.PipelineSettings`.
      is_tailing_optimization: check for overflows early, while the last fragment is all-reduced; needs a manager and
        `is_distributed`.
      decides_together: with a manager, skip a step on all ranks if it overflows on one, even if other code averages
        the gradients.
      counts_skipped_steps: count skipped steps in the optimizer's `iterations`, too.
      wire: format in which gradients are sent: "none", "float16" or "bfloat16".
      first_parameters: positions of the parameters at which fragments of gradients begin; None for the default split.
      combines: with a manager, unscale and check gradients in flat tensors.
      checks_combined: compare the flat tensors with the single gradients in every step.
    """

    name: str
    manager: Any = None
    is_distributed: bool = True
    is_tailing_optimization: bool = False
    decides_together: bool = False
    counts_skipped_steps: bool = False
    stages: tuple = ()
    wire: str = "none"
    first_parameters: Sequence[int] | None = None
    combines: bool = False
    checks_combined: bool = False

    def __post_init__(self):
        if self.is_distributed and environment.read_overlapped_steps():
            say_once(
                logging.WARNING,
                "NPU_OVERLAPPED_STEPS=1 has no effect here: steps overlap in sessions and Estimators with "
                "iterations_per_loop; in fit, steps_per_execution and custom loops they run one by one.",
            )

    @property
    def documented_name(self) -> str:
        """The name of the documented function or class that makes an optimizer with these settings."""
        is_plain = self == KerasSettings(self.name)
        return "KerasDistributeOptimizer" if is_plain else "npu_keras_optimizer"

    def pipeline(self, inner: InnerOptimizer) -> Pipeline:
        """Builds a pipeline with these settings around an optimizer."""
        is_scaled = self.manager is not None
        settings = PipelineSettings(
            self.name,
            manager=self.manager,
            is_distributed=self.is_distributed,
            is_joint=(self.is_distributed or self.decides_together) if is_scaled else None,
            is_tailing_optimization=self.is_tailing_optimization,
            wire=self.wire,
            stages=self.stages,
            record=SkipRecord(inner.optimizer if self.counts_skipped_steps else None) if is_scaled else None,
            first_parameters=check_first_parameters(self.name, self.first_parameters),
            combines=self.combines,
            checks_combined=self.checks_combined,
            inner=inner,
            owner=self.name,
        )
        return build_pipeline(settings)

    def to_config(self) -> dict:
        """Returns the settings in JSON's types.

        Raises:
          TypeError: the manager or a stage cannot be saved.
        """
        config = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        managers = self.manager if isinstance(self.manager, (list, tuple)) else [self.manager]
        configs = [None if manager is None else _serialize(manager, self.name) for manager in managers]
        made = {"manager": configs if isinstance(self.manager, (list, tuple)) else configs[0]}
        return {**config, **made, "stages": [_serialize(stage, self.name) for stage in self.stages]}

    @classmethod
    def from_config(cls, config: dict) -> KerasSettings:
        """Makes settings from the result of `to_config`; ignores unknown keys, and takes defaults for missing ones."""
        arguments = {field.name: config[field.name] for field in dataclasses.fields(cls) if field.name in config}
        manager = config["manager"]
        if manager is not None:
            manager = [_deserialize(each) for each in manager] if isinstance(manager, list) else _deserialize(manager)
        stages = tuple(_deserialize(stage) for stage in config["stages"])
        return cls(**{**arguments, "manager": manager, "stages": stages})


# Keras serializes nested objects differently in .keras files and in older files, and reads the wrong form in .h5 files.
# This form is the same in all files.
def _serialize(manager, owner):
    made_by = type(manager)
    if not hasattr(manager, "get_config"):
        raise TypeError(
            f"{owner}: the loss-scale manager cannot be saved with the model. Expected a class with get_config and "
            f"from_config; got {made_by.__name__}. Define both methods, or save weights only."
        )
    return {
        "module": made_by.__module__,
        "class_name": made_by.__name__,
        "registered_name": tf.keras.utils.get_registered_name(made_by),
        "config": manager.get_config(),
    }


def _deserialize(config):
    made_by = tf.keras.utils.get_registered_object(config["registered_name"])
    if made_by is None:
        made_by = getattr(importlib.import_module(config["module"]), config["class_name"])
    return made_by.from_config(config["config"])
