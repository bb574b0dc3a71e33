"""Defines the base classes of Keras optimizers with a pipeline, for all generations."""

from __future__ import annotations

import abc
import copy
import inspect
import types
from typing import Any

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.plain_config import to_python_numbers
from npu_bridge.base.tf_internals import training
from npu_bridge.base.tf_internals.savers import delegating_trackable_class, track_part
from npu_bridge.collective import wire_names
from npu_bridge.gradients.graph_mode import initialise_with_keras
from npu_bridge.gradients.inner.families import adapt_optimizer
from npu_bridge.gradients.inner.interface import mark_as_distributed
from npu_bridge.gradients.keras.own_variables import all_shapes_fit
from npu_bridge.gradients.keras.pipeline import KerasPipeline
from npu_bridge.gradients.keras.settings import KerasSettings
from npu_bridge.gradients.stage import variables_of
from npu_bridge.gradients.stages.skip_record import SkipRecord
from npu_bridge.gradients.steps.backward_passes import BackwardPasses
from npu_bridge.gradients.steps.step_report import LastStepReport, StepReport

_OWN_ATTRIBUTES = ("_optimizer", "_trackable", "_settings", "_pipeline", "_state", "_averages_over_ranks")


def make_forwarding_method(name: str):
    """Returns a method that calls the method `name` of the inner optimizer."""

    def method(self, *arguments, **keywords):
        return getattr(self._optimizer, name)(*arguments, **keywords)

    method.__name__ = name
    return method


def _current_keras_class(name: str) -> type | None:
    """Returns the current class `name` if Keras 2.15 cannot load it because no legacy class has this name."""
    is_alone = not hasattr(tf.keras.optimizers.legacy, name)
    return getattr(tf.keras.optimizers, name, None) if is_alone else None


class OptimizerMaker(abc.ABC):  # noqa: B024 - derived classes register the classes that they make
    """Base of documented classes that return an optimizer of another class, so that no one can derive from them."""

    def __init_subclass__(cls, **keywords):
        super().__init_subclass__(**keywords)
        maker = next((base for base in cls.__mro__[1:-1] if OptimizerMaker in base.__bases__), None)
        if maker is not None:
            name, own = maker.__name__, cls.__name__
            problem = f"{name}(...) returns an optimizer of another class, without the methods of {own}"
            fix = f"Derive from the Keras optimizer, and write {name}({own}(...))."
            raise TypeError(message(own, problem, "an optimizer class of Keras as base", f"{name} as base", fix))


class PipelineMixin(delegating_trackable_class()):
    """A mixin that puts a pipeline around an inner optimizer; derived classes add the optimizer class of a generation.

    All state belongs to the inner optimizer, and the constructor of the generation's class is never called. Attributes
    that neither class defines are looked up in the inner optimizer. Checkpoints, too, save this object as the inner
    optimizer, with the state of the stages added. So a checkpoint of the bare optimizer can be restored with the
    pipeline, and a checkpoint with the pipeline by the bare optimizer.

    Args:
      optimizer: the inner optimizer, of the same generation.
      settings: the settings of the pipeline.
    """

    has_stand_ins = True
    _adapt = staticmethod(adapt_optimizer)

    def __init__(self, optimizer: Any, settings: KerasSettings):
        super().__init__(optimizer)
        pipeline = settings.pipeline(self._adapt(optimizer, settings.name))
        self._optimizer = optimizer
        self._settings = settings
        self._pipeline = KerasPipeline(pipeline, settings.name)
        wire_names.set_owner(self, pipeline.transfers)
        self._state = pipeline.state()
        if settings.is_distributed:
            mark_as_distributed(self)
        for name, part in self._state.items():
            track_part(optimizer, part, name, overwrite=True)
        initialise_with_keras(self.state_variables)

    def __repr__(self) -> str:
        if "_pipeline" not in self.__dict__:  # while the object is being made or copied
            return object.__repr__(self)
        stages = list(self._pipeline.pipeline.stages)
        return f"{self._settings.documented_name}({type(self._optimizer).__name__}, stages={stages!r})"

    @property
    def inner_optimizer(self) -> Any:
        """The wrapped optimizer, which updates the variables."""
        return self._optimizer

    @property
    def backward_passes(self) -> BackwardPasses:
        """The backward passes since the last update, for custom loops."""
        return self._pipeline.backward_passes

    @property
    def state_variables(self) -> list:
        """The variables of the pipeline's stages, such as the loss scale, its counters and the skipped steps."""
        return variables_of(self._state)

    def silence_start_warning(self) -> None:
        """Turns off the warning about start values that differ between ranks, because a callback broadcasts them."""
        self._pipeline.pipeline.comparison.silence_start_warning()

    def record_reduction_times(self) -> tf.Variable:
        """Returns the variable `KerasPipeline.moments`; functions traced from now on write to it in each step."""
        if self._pipeline.moments is None:
            self._pipeline.moments = tf.Variable([0.0, 0.0], trainable=False, dtype=tf.float64)
        return self._pipeline.moments

    @property
    def variables_of_this_rank(self) -> list:
        """The state variables whose values differ between ranks, such as the sums of `Accumulate`."""
        return self._pipeline.pipeline.saved.variables_of_this_rank()

    @property
    def name(self) -> str:
        return self._settings.name

    @property
    def _name(self):  # the attribute of the legacy generation
        return self._settings.name

    @property
    def iterations(self):
        """The number of updates of the inner optimizer. By default, skipped steps do not count."""
        return self._optimizer.iterations

    def get_config(self) -> dict:
        """Returns the inner optimizer and the settings as JSON types."""
        return to_python_numbers(
            {"optimizer": tf.keras.optimizers.serialize(self._optimizer), **self._settings.to_config()}
        )

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Makes an optimizer from the result of `get_config`."""
        inner = copy.deepcopy(config["optimizer"])  # Keras changes what it reads
        # In .h5 files Keras mistakes a user's optimizer for the Keras optimizer of the same name.
        made_by = tf.keras.utils.get_registered_object(
            inner.get("registered_name") or inner["class_name"], custom_objects
        ) or _current_keras_class(inner["class_name"])
        optimizer = (
            tf.keras.optimizers.deserialize(
                inner, custom_objects=custom_objects, use_legacy_format="module" not in inner
            )
            if made_by is None
            else made_by.from_config(inner["config"])
        )
        with wire_names.mark_optimizers_as_restored():
            return cls(optimizer, KerasSettings.from_config(config))

    def set_weights(self, weights):
        """Sets the variables of the inner optimizer; further values set variables of the stages and stand-ins."""
        held = self._variables_of(weights)
        count = len(self._inner_variables())
        self._optimizer.set_weights(weights if held is None else weights[:count])
        if held is not None:
            tf.keras.backend.batch_set_value(list(zip(held[count:], weights[count:])))

    def _all_variables(self):
        """Returns the variables of the inner optimizer and of the stages, and the stand-ins for 16-bit variables."""
        return [*self._inner_variables(), *self._own_variables()]

    def _own_variables(self):
        return [*self.state_variables, *self._pipeline.inner.stand_ins.saved_variables]

    def _variables_of(self, values):
        """Returns the variables that fit a file's `values`: all, or without stages or stand-ins; None if none fit."""
        own, stages, kept = (
            self._inner_variables(),
            self.state_variables,
            self._pipeline.inner.stand_ins.saved_variables,
        )
        for held in (self._all_variables(), [*own, *stages], [*own, *kept], own):
            if len(held) == len(values) and all_shapes_fit(held, values):
                return held
        return None

    def _inner_variables(self):
        variables = self._optimizer.variables
        return list(variables() if callable(variables) else variables)

    def __getattr__(self, name):
        if name in _OWN_ATTRIBUTES or name.startswith("__"):  # missing while an object is copied
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._optimizer, name)

    def __setattr__(self, name, value):
        if training.is_loss_scaling_mark(name):
            self._reject_keras_loss_scaling()
        # Hyper-parameters are set on the inner optimizer; a replaced method is set on this object.
        is_own = name in _OWN_ATTRIBUTES
        if is_own or isinstance(inspect.getattr_static(type(self), name, None), types.FunctionType):
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    def _reject_keras_loss_scaling(self):
        """Raises ValueError if Keras adds its own loss scaling, which would skip updates behind the stages' back."""
        pipeline = self._pipeline.pipeline
        if not pipeline.stages or pipeline.only_communicates:
            return
        problem = "stages must be inside loss scaling, which Keras puts around the whole optimizer"
        expected = "npu_keras_optimizer(opt, loss_scale_manager, stages=[...])"
        got = f"{self!r} in LossScaleOptimizer, which compile adds in mixed_float16"
        fix = (
            "Pass a loss_scale_manager to npu_keras_optimizer, such as npu_bridge.amp.DynamicLossScaleManager.keras()."
        )
        raise ValueError(message(self._settings.documented_name, problem, expected, got, fix))

    def __dir__(self):
        # Keras saves all optimizers among the attributes; the inner optimizer is already saved as this object.
        names = {*object.__dir__(self), *dir(self._optimizer)}
        return sorted(names - {*_OWN_ATTRIBUTES, "inner_optimizer"})


class LossScaleMixin:
    """Adds the interface of `tf.keras.mixed_precision.LossScaleOptimizer` to an optimizer with loss scaling."""

    @property
    def _managers(self):
        return self._pipeline.pipeline.loss_scale_managers

    @property
    def loss_scale(self) -> tf.Tensor:
        """The loss scale of the next step, a float32 scalar; with several losses or groups a vector."""
        scales = [tf.convert_to_tensor(manager.get_loss_scale()) for manager in self._managers]
        return scales[0] if len(scales) == 1 else tf.stack(scales)

    @property
    def skipped_steps(self) -> tf.Tensor:
        """The number of steps skipped so far, an int64 scalar."""
        return tf.convert_to_tensor(self._state["skipped_steps"])

    @property
    def last_step_skipped(self) -> tf.Tensor:
        """Whether the last step was skipped, a boolean scalar."""
        return tf.convert_to_tensor(self._state["last_step_skipped"])

    @property
    def last_step_finite(self) -> tf.Tensor:
        """Whether the gradients of the last step were finite, a boolean scalar."""
        return tf.logical_not(self._state["last_step_skipped"])

    @property
    def last_step(self) -> StepReport:
        """The loss, overflow and loss scale of the last step: numbers, or tensors to fetch in a TF 1 graph.

        Raises:
          ValueError: there was no step, or its loss is unknown because other code computed the gradients.
        """
        records = self._pipeline.pipeline.stages_of_type(SkipRecord)
        report = records[0].report if records else LastStepReport()
        return report.read(f"{self.name}.last_step")

    @property
    def initial_scale(self) -> float:
        """The loss scale of the first step; with several losses, the scale of the first loss."""
        constants = self._managers[0].agreed_constants()
        names = ("init_loss_scale", "loss_scale", "init")
        return next((constants[name] for name in names if name in constants), None)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The number of good steps in a row after which the scale grows; None for a scale that does not grow."""
        constants = self._managers[0].agreed_constants()
        return constants.get("incr_every_n_steps", constants.get("growth_interval"))

    @property
    def dynamic_counter(self) -> tf.Tensor | None:
        """The number of good steps in a row so far, an int32 scalar; None for a scale that does not count steps."""
        counters = [each for each in getattr(self._managers[0], "variables", ()) if "good_steps" in each.name]
        return tf.convert_to_tensor(counters[0]) if counters else None

    @property
    def dynamic(self) -> bool:
        """Whether the scale can change."""
        return any(getattr(manager, "variables", ()) for manager in self._managers)

    def get_scaled_loss(self, loss):
        """Multiplies a loss for a custom tape by the loss scale.

        Args:
          loss: tensor, or a callable that returns a tensor.
        Returns:
          The scaled loss; for a callable, a callable that returns the scaled loss.
        """
        return self._pipeline.scale_loss(loss)

    def get_unscaled_gradients(self, grads):
        """Returns unscaled gradients, averaged over the ranks; clip them if needed, and pass them to `apply_gradients`.

        Args:
          grads: list of gradients of a scaled loss; elements can be None.
        Ranks: collective with several ranks.
        """
        return self._pipeline.unscale(grads)
