"""Implements `apply`, which turns a level and a dictionary into optimizer stages and a rewritten model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.arguments import check_instance
from npu_bridge.base.errors import message, shown
from npu_bridge.base.terminal import echo
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.training import compile_arguments
from npu_bridge.boost.config import FEATURES, BoostConfig
from npu_bridge.boost.subspace_model import make_basis, train_as_compiled, train_in_subspace
from npu_bridge.boost.thinning import less_batch_norm, with_cosine_head
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.optimizers.subspace.newton import SubspaceNewton
from npu_bridge.stages import Accumulate, Adasum, CentralizeGradients, Freeze, FreezeSchedule

_FEATURES_OF_KEYS = {"common.device_number": "adasum"}  # all other keys of a feature are in its section
_FREEZE_KINDS = ("continuous", "interval")
# Features that dim_reduce excludes: they need the gradients of each step, or losses of other batches or weights.
_EXCLUDED_BY_DIM_REDUCE = ("grad_freeze", "adasum", "grad_accumulation", "loss_scale_group")


def apply(
    model_or_optimizer: Any,
    level: str = "O1",
    config: BoostConfig | Mapping[str, Any] | None = None,
    *,
    loss_scale_manager: Any = None,
    is_distributed: bool = True,
) -> Any:
    """Adds features for faster training to a model or an optimizer; rank 0 prints a line for each feature.

    Args:
      model_or_optimizer: a compiled model of Keras 2; an optimizer of Keras, also a legacy one; a TF 1 optimizer. For
        an optimizer, a printed line asks you to change the model yourself, by `less_batch_norm` and `CosineHead`.
      level: "O1" for fewer batch normalisations and frozen layers, "O2" also for Adasum, "O0" only for averaging
        over the ranks. In the mode "manual" the dictionary chooses the features.
      config: a `BoostConfig`, or the argument of `BoostConfig.from_dict`.
      loss_scale_manager: scales the loss; a model in mixed_float16 needs one, and `loss_scale_group` a
        `GroupLossScaleManager`.
      is_distributed: whether to average gradients over the ranks.
    Returns:
      For an optimizer, the optimizer to train with. For a model, the same model, compiled again. If its layers change,
      a new compiled model with the same weights, whose optimizer has no state.
    Raises:
      TypeError: the argument is neither a model nor an optimizer, or the configuration has another type.
      ValueError: the level is unknown, the configuration is not valid, features exclude each other, the model is not
        compiled, or the optimizer averages gradients or scales the loss itself.
    """
    if not isinstance(config, BoostConfig):
        config = BoostConfig.from_dict(config)
    choice = _BoostChoice(config, list(config.chosen_features(level)))
    choice.report_ignored_keys(level)
    choice.resolve_feature_conflicts(loss_scale_manager)
    is_model = isinstance(model_or_optimizer, tf.keras.Model)
    if is_model and model_or_optimizer.optimizer is None:
        problem, expected = "the model has no optimizer", "a compiled model"
        fix = "Call model.compile first, or pass the optimizer to boost.apply and the model to less_batch_norm."
        raise ValueError(
            message("boost.apply", problem, expected, f"{model_or_optimizer.name} without an optimizer", fix)
        )
    if "dim_reduce" in choice.features and not is_model:
        problem, expected = "dim_reduce evaluates the loss of a model", "a compiled Keras model"
        fix = "Replace an optimizer of TensorFlow 1 by SubspaceNewton(basis)."
        raise ValueError(message("boost.apply", problem, expected, type(model_or_optimizer).__name__, fix))
    made = model_or_optimizer
    if "less_bn" in choice.features:
        made = choice.reduce_batch_norms(made, is_model)
    variables = None if not is_model else made.trainable_variables if made.built else []
    stages = choice.make_stages(is_distributed, variables)
    starts = choice.fragment_starts()
    if not is_model:
        made = _wrap_optimizer(made, loss_scale_manager, is_distributed, stages, starts)
    else:
        arguments, optimizer = compile_arguments(model_or_optimizer), model_or_optimizer.optimizer
        if made is not model_or_optimizer:  # a used optimizer has variables of the old model
            optimizer = type(optimizer).from_config(optimizer.get_config())
        is_in_subspace = "dim_reduce" in choice.features
        if not is_in_subspace:
            optimizer = _without_scaling_of_compile(optimizer, arguments.get("optimizer"), loss_scale_manager)
            optimizer = _wrap_optimizer(optimizer, loss_scale_manager, is_distributed, stages, starts)
        train_as_compiled(made)
        made.compile(**{**arguments, "optimizer": optimizer})
        if is_in_subspace:
            train_in_subspace(made, choice.make_subspace_newton(made), loss_scale_manager, is_distributed, starts)
    if collective.current().rank == 0:
        echo("\n".join(f"boost {level}: {line}" for line in choice.lines or ["nothing chosen"]))
    return made


def _without_scaling_of_compile(optimizer, given, manager):
    """Returns the optimizer inside the loss scaling that `compile` puts around a `given` one in mixed_float16."""
    scaling = tf.keras.mixed_precision.LossScaleOptimizer
    if not isinstance(optimizer, scaling) or isinstance(given, scaling):
        return optimizer
    if manager is None:
        problem = "the model is in mixed_float16, whose loss scaling must be outside of the features"
        fix = "Pass a manager, such as npu_bridge.amp.DynamicLossScaleManager.keras()."
        raise ValueError(message("boost.apply", problem, "a loss_scale_manager", "None", fix))
    return optimizer.inner_optimizer


def _wrap_optimizer(optimizer, manager, is_distributed, stages, starts):
    options = {"stages": stages, "gradient_split_groups": starts}
    if isinstance(optimizer, (tf.keras.optimizers.Optimizer, tf.keras.optimizers.legacy.Optimizer)) or (
        keras3.is_optimizer(optimizer)
    ):
        return npu_keras_optimizer(optimizer, manager, is_distributed, **options)
    kind, what = tf.compat.v1.train.Optimizer, "a model of Keras 2 or an optimizer"
    fix = "Pass the optimizer of the model." if keras3.is_model(optimizer) else "Pass the object itself."
    check_instance("boost.apply", "model_or_optimizer", optimizer, kind, what, fix)
    return NPUOptimizer(optimizer, manager, is_distributed, manager is not None, **options)


@dataclasses.dataclass
class _BoostChoice:
    """The requested configuration, the names of the features that are on, and the lines printed about them."""

    config: BoostConfig
    features: list
    lines: list = dataclasses.field(default_factory=list)

    def report_feature(self, feature, text):
        self.lines.append(f"{feature}: {text}")

    def turn_off_feature(self, feature, reason):
        self.features.remove(feature)
        self.report_feature(feature, f"left out, because {reason}")

    def report_ignored_keys(self, level):
        """Adds a line for each given key of the dictionary that has no effect."""
        mode = self.config["boost"]["mode"]
        for place in sorted(self.config.given):
            section, _, key = place.partition(".")
            value, feature = self.config[section][key], _FEATURES_OF_KEYS.get(place, section)
            if section == "boost" and key != "mode" and value is not (key in self.features):
                because = f"the mode is {mode!r}" if mode != "manual" else f"the level is {level}"
                self.lines.append(f"{place} = {value} has no effect, because {because}")
            elif feature in FEATURES and feature not in self.features:
                self.lines.append(f"{place} = {value} has no effect, because {feature} is off")

    def resolve_feature_conflicts(self, manager):
        """Raises ValueError for features that exclude each other; the mode "enable_all" leaves out one side instead."""
        is_requested = self.config["boost"]["mode"] != "enable_all"
        others = [name for name in _EXCLUDED_BY_DIM_REDUCE if name in self.features]
        if "dim_reduce" in self.features and others:
            if is_requested:
                problem = "dim_reduce compares losses of one batch, so it excludes features that change gradients"
                got, fix = f"dim_reduce and {', '.join(others)}", f"Turn off dim_reduce, or {' and '.join(others)}."
                raise ValueError(message("boost.apply", problem, f"dim_reduce without {', '.join(others)}", got, fix))
            if self.config["dim_reduce"]["pca_mat_path"] or self.config["dim_reduce"]["weight_load_dir"]:
                for name in others:
                    self.turn_off_feature(name, "dim_reduce excludes it")
            else:
                self.turn_off_feature("dim_reduce", "neither pca_mat_path nor weight_load_dir is given")
        if "loss_scale_group" in self.features:
            self._check_loss_scale_groups(manager, is_requested)

    def _check_loss_scale_groups(self, manager, is_requested):
        if getattr(manager, "is_for_groups", False):
            self.report_feature("loss_scale_group", f"a loss scale for each group, by {type(manager).__name__}")
        elif is_requested:
            problem, expected = (
                "loss_scale_group needs the groups of a manager",
                "loss_scale_manager=GroupLossScaleManager(...)",
            )
            raise ValueError(message("boost.apply", problem, expected, shown(manager), "Pass a GroupLossScaleManager."))
        else:
            self.turn_off_feature("loss_scale_group", "no GroupLossScaleManager is given")

    def reduce_batch_norms(self, model_or_optimizer, is_model):
        """Replaces batch normalisations of a model and, if configured, its head; returns an optimizer unchanged."""
        if not is_model:
            self.report_feature(
                "less_bn", "the model is not known here; call boost.less_batch_norm on it, or on the graph"
            )
            return model_or_optimizer
        model_or_optimizer, report = less_batch_norm(model_or_optimizer)
        self.report_feature("less_bn", report.text().partition("\n")[0].partition(": ")[2])
        if self.config["less_bn"]["fn_flag"]:
            model_or_optimizer, said = with_cosine_head(model_or_optimizer)
            self.report_feature("less_bn, fn_flag", said)
        return model_or_optimizer

    def make_stages(self, is_distributed, variables):
        """Returns the stages for the optimizer; `variables` are its trained variables, or None if unknown."""
        config, made = self.config, []
        if "less_bn" in self.features and config["less_bn"]["gc_flag"] and "dim_reduce" in self.features:
            self.report_feature("less_bn, gc_flag", "left out, because dim_reduce makes the updates")
        elif "less_bn" in self.features and config["less_bn"]["gc_flag"]:
            # Weights of a cosine head are normalised, so their mean is not free.
            made.append(CentralizeGradients(skip=("beta", "gamma", "bias", "depthwise", "cosine_kernel")))
            self.report_feature("less_bn, gc_flag", "gradients of kernels are centralised")
        if "grad_freeze" in self.features:
            made += self._make_freeze_stages(variables)
        if "grad_accumulation" in self.features:
            steps = config["grad_accumulation"]["grad_accumulation_step"]
            if steps > 1:
                made.append(Accumulate(steps))
                self.report_feature(
                    "grad_accumulation", f"one update for every {steps} batches, with their mean gradient"
                )
            else:
                self.turn_off_feature("grad_accumulation", "grad_accumulation_step is 1")
        if "adasum" in self.features:
            made += self._make_adasum_stages(is_distributed)
        return made

    def _make_freeze_stages(self, variables):
        freeze = self.config["grad_freeze"]
        kind = _FREEZE_KINDS[freeze["freeze_type"]]
        schedule = FreezeSchedule(
            groups=freeze["param_groups"], kind=kind, full_share=freeze["freeze_p"], total_steps=freeze["total_steps"]
        )
        is_given = "grad_freeze.param_groups" in self.config.given
        if variables == [] and not is_given:
            self.turn_off_feature("grad_freeze", "the layers of a model that is not built are unknown; build it first")
            return []
        try:
            if variables:
                schedule.last_group_of_each(list(map(keras3.name_of, variables)))
        except ValueError as error:
            if is_given:
                raise
            because = str(error).partition(": ")[2].partition(". ")[0]
            self.turn_off_feature("grad_freeze", f"{because}; set param_groups")
            return []
        share = f"{freeze['freeze_p']:.0%} of the updates train all layers"
        self.report_feature("grad_freeze", f"{freeze['param_groups']} groups, {kind}; {share}")
        return [Freeze(schedule)]

    def _make_adasum_stages(self, is_distributed):
        size, averaged = collective.current().size, self.config["common"]["device_number"]
        servers, left = divmod(size, averaged)
        if not is_distributed:
            self.turn_off_feature("adasum", "is_distributed is False")
        elif left or servers < 2 or servers & (servers - 1):
            wanted = f"2, 4, 8... times device_number={averaged} ranks"
            self.turn_off_feature("adasum", f"it needs {wanted}, and there {'is 1' if size == 1 else f'are {size}'}")
        else:
            self.report_feature("adasum", f"updates of {servers} groups of {averaged} ranks are combined")
            return [Adasum(averaged_ranks=averaged, on="weights")]
        return []

    def fragment_starts(self):
        """Returns the configured positions of parameters at which fragments of gradients begin, or None."""
        starts = self.config["common"]["gradient_split_groups"]
        if starts is not None:
            self.report_feature(
                "gradient_split_groups", f"fragments begin at the parameters {', '.join(map(str, starts))}"
            )
        return starts

    def make_subspace_newton(self, model):
        """Returns the `SubspaceNewton` that the section `dim_reduce` configures."""
        settings = self.config["dim_reduce"]
        basis = make_basis(settings, model.trainable_variables)
        numbers = {key: settings[key] for key in ("rho", "gamma", "alpha", "sigma")}
        source = os.fspath(settings["pca_mat_path"] or settings["weight_load_dir"])
        what = f"steps along {len(basis.rows)} directions from {source}; the optimizer only counts them"
        self.report_feature("dim_reduce", what)
        return SubspaceNewton(basis, **numbers)
