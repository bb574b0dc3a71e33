"""Wraps private parts of optimizers, models and estimators. TensorFlow 2.15.1, Keras and Estimator 2.15.0."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

from npu_bridge.base.after_import import put_around, when_loaded
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.names import KERAS_LEGACY_OPTIMIZER_MODULE, KERAS_OPTIMIZER_MODULE

if TYPE_CHECKING:
    import tensorflow as tf

# Attributes for the learning rate: its tensor and its original value in TF 1 optimizers, its variable in Keras
# optimizers.
_LEARNING_RATES = ("_lr_t", "_learning_rate_tensor", "_lr", "_learning_rate")


def create_slots(optimizer: tf.compat.v1.train.Optimizer, variables: Sequence) -> None:
    """Makes a TF 1 optimizer's slots before its update (`Optimizer._create_slots`, TF 2.15)."""
    optimizer._create_slots(variables)


def create_all_weights(optimizer: Any, variables: Sequence) -> None:
    """Makes a legacy Keras optimizer's variables before its update (`_create_all_weights`, Keras 2.15)."""
    optimizer._create_all_weights(variables)


def scope_of_variables(optimizer: Any) -> str:
    """Returns the scope of a legacy Keras optimizer's variables (`Optimizer._name`, Keras 2.15)."""
    return optimizer._name


def compute_legacy_gradients(optimizer: Any, loss: Any, variables: Any, grad_loss: Any, tape: Any) -> list:
    """Returns a legacy Keras optimizer's (gradient, variable) pairs (`Optimizer._compute_gradients`, Keras 2.15)."""
    return optimizer._compute_gradients(loss, variables, grad_loss, tape=tape)


def aggregates_as_stock(optimizer: Any) -> bool:
    """Returns whether a legacy optimizer sums replicas' gradients like Keras (`_aggregate_gradients`, Keras 2.15)."""
    import tensorflow as tf

    stock = tf.keras.optimizers.legacy.Optimizer
    return getattr(optimizer._aggregate_gradients, "__func__", None) is stock._aggregate_gradients


def learning_rates(optimizer: Any) -> list:
    """Returns an optimizer's possible learning rates, most of them None (`_lr_t`, `_hyper`, TF 2.15)."""
    hyper = getattr(optimizer, "_hyper", None)  # exists in a Keras legacy optimizer
    found = [getattr(optimizer, name, None) for name in _LEARNING_RATES]
    return [*found, hyper.get("learning_rate") if isinstance(hyper, dict) else None]


def adam_numbers(optimizer: tf.compat.v1.train.AdamOptimizer) -> dict[str, tf.Tensor]:
    """Returns the hyper-parameters of TF 1 Adam during its update, by their names in `tf.raw_ops.ApplyAdam`.

    Seen in TF 2.15: `_get_beta_accumulators`, `_lr_t`, `_beta1_t`, `_beta2_t` and `_epsilon_t`.
    """
    beta1_power, beta2_power = optimizer._get_beta_accumulators()
    return {
        "beta1_power": beta1_power,
        "beta2_power": beta2_power,
        "lr": optimizer._lr_t,
        "beta1": optimizer._beta1_t,
        "beta2": optimizer._beta2_t,
        "epsilon": optimizer._epsilon_t,
    }


def hyper_variables(optimizer: Any) -> list:
    """Returns the variables of a Keras optimizer's hyper-parameters (`_hyper`, `_learning_rate`, Keras 2.15)."""
    import tensorflow as tf

    hyper = getattr(optimizer, "_hyper", None)
    numbers = [*(hyper.values() if isinstance(hyper, dict) else ()), getattr(optimizer, "_learning_rate", None)]
    return [number for number in numbers if isinstance(number, tf.Variable)]


def scheduled_rate(optimizer: tf.keras.optimizers.Optimizer) -> Any:
    """Returns a scheduled learning rate's variable; None without a schedule (`_current_learning_rate`, Keras 2.15)."""
    return getattr(optimizer, "_current_learning_rate", None)


def rate_at(optimizer: tf.keras.optimizers.Optimizer, step: tf.Tensor) -> tf.Tensor:
    """Returns the value of an optimizer's schedule at a step (`Optimizer._learning_rate`, Keras 2.15)."""
    return optimizer._learning_rate(step)


def initialise_in_keras_session(variable: tf.Variable) -> None:
    """Makes Keras sessions of a TF 1 graph initialise a variable (`tf.keras.__internal__.backend`, Keras 2.15)."""
    import tensorflow as tf

    tf.keras.__internal__.backend.track_variable(variable)


def is_graph_network(model: tf.keras.Model) -> bool:
    """Returns whether a model is a graph of layers from its inputs on (`Model._is_graph_network`, Keras 2.15)."""
    return bool(model._is_graph_network)


def set_dtype_policy(layer: tf.keras.layers.Layer, policy: str) -> None:
    """Gives a layer without variables another policy (`Layer._set_dtype_policy`, Keras 2.15)."""
    layer._set_dtype_policy(policy)


def steps_per_execution(model: tf.keras.Model) -> int:
    """Returns the steps in one call of a model's training function (`Model._steps_per_execution`, Keras 2.15)."""
    return model.steps_per_execution if keras3.is_model(model) else int(model._steps_per_execution or 1)


def warm_start_settings(estimator: tf.estimator.Estimator) -> Any:
    """Returns an Estimator's warm start, or None (`Estimator._warm_start_settings`, Estimator 2.15)."""
    return estimator._warm_start_settings


def model_function(estimator: tf.estimator.Estimator) -> Any:
    """Returns an Estimator's model function (`Estimator._model_fn`, Estimator 2.15)."""
    return estimator._model_fn


def session_config(run_config: tf.estimator.RunConfig) -> Any:
    """Returns the session settings that a RunConfig was given (`RunConfig._session_config`, Estimator 2.15)."""
    return run_config._session_config


def set_session_config(run_config: tf.estimator.RunConfig, config: tf.compat.v1.ConfigProto) -> None:
    """Changes the session settings of a RunConfig (`RunConfig._session_config`, Estimator 2.15)."""
    run_config._session_config = config


def distribute_config(strategy: tf.distribute.Strategy) -> Any:
    """Returns the part of a RunConfig for training and evaluating under a strategy (`DistributeConfig`, TF 2.15)."""
    from tensorflow.python.distribute.distribute_config import DistributeConfig

    return DistributeConfig(strategy, strategy)


def compile_arguments(model: tf.keras.Model) -> dict:
    """Returns the arguments a model was compiled with, as objects; empty before (`_compile_config`, Keras 2.15)."""
    config = getattr(model, "_compile_config", None)
    return dict(config.config) if config is not None else {}


def watch_gradients(note: Callable[[Any, Any], None]) -> None:
    """Calls `note` from now on with the targets of gradients in TF 1 graphs, and the gradients.

    Seen in TF 2.15: `gradients_util._GradientsHelper`.
    """
    from tensorflow.python.ops import gradients_util

    def noted(take, ys, *arguments, **keywords):
        gradients = take(ys, *arguments, **keywords)
        note(ys, gradients)
        return gradients

    put_around(gradients_util, "_GradientsHelper", noted)


def watch_keras_optimizers(made: Callable[[Any], Any], updating: Callable[[Any, list], Any]) -> None:
    """Reports Keras optimizers when they are made and when they update, from now on, as soon as Keras is loaded.

    Seen in Keras 2.15: `Optimizer._internal_apply_gradients`, and `OptimizerV2._distributed_apply` of legacy ones. Both
    run after an optimizer has combined its gradients.

    Args:
      made: called with each optimizer that was constructed.
      updating: called with the optimizer and its (gradient, variable) pairs, right before they are applied.
    """

    def init(method, optimizer, *arguments, **keywords):
        method(optimizer, *arguments, **keywords)
        made(optimizer)

    def apply_current(apply, optimizer, grads_and_vars):
        pairs = list(grads_and_vars)
        updating(optimizer, pairs)
        return apply(optimizer, pairs)

    def apply_legacy(apply, optimizer, distribution, grads_and_vars, *arguments, **keywords):
        pairs = list(grads_and_vars)
        updating(optimizer, pairs)
        return apply(optimizer, distribution, pairs, *arguments, **keywords)

    def change_current(module):
        put_around(module._BaseOptimizer, "__init__", init)
        put_around(module.Optimizer, "_internal_apply_gradients", apply_current)

    def change_legacy(module):
        put_around(module.OptimizerV2, "__init__", init)
        put_around(module.OptimizerV2, "_distributed_apply", apply_legacy)

    when_loaded(KERAS_OPTIMIZER_MODULE, change_current)
    when_loaded(KERAS_LEGACY_OPTIMIZER_MODULE, change_legacy)


def change_seeds(change: Callable[[Callable, Any], Any]) -> None:
    """Lets `change` choose the seeds of random operators from now on (`framework.random_seed.get_seed`, TF 2.15).

    Args:
      change: gets TensorFlow's own function and the operator's seed, or None; returns the pair of seeds.
    """
    from tensorflow.python.framework import random_seed

    random_seed.get_seed = functools.partial(change, random_seed.get_seed)


def seed_all_operators(seed: int) -> None:
    """Gives each random operator without a seed a different one from now on, because determinism requires seeds.

    Seen in TF 2.15: `Graph._create_op_internal`; and `config` in the two modules that refuse by themselves, its only
    use there.
    """
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import image_ops_impl, stateful_random_ops

    def made(make, graph, op_type, inputs, dtypes=None, input_types=None, name=None, attrs=None, *others, **keywords):
        seeds = [attrs[key] for key in ("seed", "seed2") if attrs and key in attrs]
        if len(seeds) == 2 and not any(each.i for each in seeds):
            seeds[0].i, seeds[1].i = seed, len(graph.get_operations()) + 1
        return make(graph, op_type, inputs, dtypes, input_types, name, attrs, *others, **keywords)

    put_around(ops.Graph, "_create_op_internal", made)
    for module in (image_ops_impl, stateful_random_ops):
        module.config = types.SimpleNamespace(is_op_determinism_enabled=lambda: False)


def change_folders_of_estimators(module: types.ModuleType, choose: Callable[[str], str]) -> None:
    """Makes Estimators write to the folder that `choose` returns, from now on.

    Seen in Estimator 2.15: `maybe_overwrite_model_dir_and_session_config`.

    Args:
      module: the one that defines Estimators (`names.ESTIMATOR_MODULE`).
      choose: returns the folder for an Estimator's own folder.
    """

    def settled(settle, config, model_dir):
        config = settle(config, model_dir)
        return module.run_config.RunConfig.replace(config, model_dir=choose(config.model_dir))

    put_around(module, "maybe_overwrite_model_dir_and_session_config", settled)


def converts_optimizers() -> bool:
    """Returns whether Keras compiles models only with legacy optimizers (`tf2.enabled`, as `keras.optimizers.get`)."""
    from tensorflow.python import tf2

    return not tf2.enabled()


def config_before_training(optimizer: Any) -> dict:
    """Returns an optimizer's configuration in a graph, where Keras 2.15 cannot read the learning rate's variable.

    Seen in Keras 2.15: `Optimizer._serialize_hyperparameter`. Uses a variable's initial value.
    """
    import tensorflow as tf

    read = optimizer._serialize_hyperparameter

    def begun(value):
        return tf.get_static_value(value.initial_value).item() if isinstance(value, tf.Variable) else read(value)

    object.__setattr__(optimizer, "_serialize_hyperparameter", begun)
    try:
        return optimizer.get_config()
    finally:
        object.__delattr__(optimizer, "_serialize_hyperparameter")


def let_write(kind: type, may_write: Callable[[], bool], leave: Callable[[], None]) -> None:
    """Lets Estimators with configurations of a class train without writing while `may_write()` is false.

    Only the Estimator's own configuration then says that nothing is written; scripts still read their settings in the
    copies that an Estimator hands out. Leaves out listeners, for which Estimator 2.15 would raise without a saver. Seen
    in Estimator 2.15: `_train_with_estimator_spec`, which reads all intervals of `_config`.

    Args:
      kind: the class of the configurations.
      may_write: called when a training begins.
      leave: called in the graph of a training that has come to its end, after the last checkpoint.
    """
    import tensorflow as tf

    base = tf.compat.v1.estimator.Estimator  # the base of tf.estimator.Estimator, too
    if hasattr(base._train_with_estimator_spec, "__wrapped__"):
        return

    def trained(train, self, estimator_spec, worker_hooks, hooks, global_step_tensor, saving_listeners):
        arguments = self, estimator_spec, worker_hooks, hooks, global_step_tensor
        config = self._config
        if not isinstance(config, kind):
            return train(*arguments, saving_listeners)
        if may_write():
            loss = train(*arguments, saving_listeners)
            leave()
            return loss
        self._config = copy.copy(config)
        vars(self._config).update(
            _save_checkpoints_secs=None, _save_checkpoints_steps=None, _save_summary_steps=0,
            _log_step_count_steps=None, __deepcopy__=lambda memo: copy.deepcopy(config, memo),
        )  # fmt: skip
        given = (*worker_hooks, *hooks, *estimator_spec.training_hooks, *estimator_spec.training_chief_hooks)
        has_saver = any(isinstance(hook, tf.estimator.CheckpointSaverHook) for hook in given)
        listeners = saving_listeners if has_saver else None
        try:
            loss = train(*arguments, listeners)
        finally:
            self._config = config
        leave()
        return loss

    put_around(base, "_train_with_estimator_spec", trained)


def marks_loss_scaling(name: str) -> bool:
    """Returns whether Keras 2 sets this attribute on an optimizer around which it puts its own loss scaling."""
    return name == "_is_wrapped_by_loss_scale_optimizer"
