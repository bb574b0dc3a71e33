"""Wraps private parts of optimizers, models and estimators. Seen in TensorFlow 2.15.1, Keras and Estimator 2.15.0."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

from npu_bridge.base.after_import import call_when_loaded, wrap_function
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.names import KERAS_LEGACY_OPTIMIZER_MODULE, KERAS_OPTIMIZER_MODULE

if TYPE_CHECKING:
    import tensorflow as tf

# Attributes for the learning rate: its tensor and its original value in TF 1 optimizers, its variable in Keras
# optimizers.
_LEARNING_RATES = ("_lr_t", "_learning_rate_tensor", "_lr", "_learning_rate")


def create_slots(optimizer: tf.compat.v1.train.Optimizer, variables: Sequence) -> None:
    """Creates a TF 1 optimizer's slots before its first update (`Optimizer._create_slots`, TF 2.15)."""
    optimizer._create_slots(variables)


def create_all_weights(optimizer: Any, variables: Sequence) -> None:
    """Creates a legacy Keras optimizer's variables before its first update (`_create_all_weights`, Keras 2.15)."""
    optimizer._create_all_weights(variables)


def scope_of_variables(optimizer: Any) -> str:
    """Returns the name scope of a legacy Keras optimizer's variables (`Optimizer._name`, Keras 2.15)."""
    return optimizer._name


def compute_legacy_gradients(optimizer: Any, loss: Any, variables: Any, grad_loss: Any, tape: Any) -> list:
    """Computes (gradient, variable) pairs by a legacy Keras optimizer (`Optimizer._compute_gradients`, Keras 2.15)."""
    return optimizer._compute_gradients(loss, variables, grad_loss, tape=tape)


def has_stock_aggregation(optimizer: Any) -> bool:
    """Returns whether a legacy optimizer has Keras's method to sum replicas' gradients (`_aggregate_gradients`)."""
    import tensorflow as tf

    stock = tf.keras.optimizers.legacy.Optimizer
    return getattr(optimizer._aggregate_gradients, "__func__", None) is stock._aggregate_gradients


def learning_rates(optimizer: Any) -> list:
    """Returns the values of an optimizer's attributes that can hold a learning rate (`_lr_t`, `_hyper`, TF 2.15)."""
    hyper = getattr(optimizer, "_hyper", None)  # exists in a Keras legacy optimizer
    found = [getattr(optimizer, name, None) for name in _LEARNING_RATES]
    return [*found, hyper.get("learning_rate") if isinstance(hyper, dict) else None]


def adam_hyperparameters(optimizer: tf.compat.v1.train.AdamOptimizer) -> dict[str, tf.Tensor]:
    """Returns the hyper-parameters of TF 1 Adam during its update, by their names in `tf.raw_ops.ApplyAdam`.

    Checked in TF 2.15: `_get_beta_accumulators`, `_lr_t`, `_beta1_t`, `_beta2_t` and `_epsilon_t`.
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


def hyperparameter_variables(optimizer: Any) -> list:
    """Returns the variables of a Keras optimizer's hyper-parameters (`_hyper`, `_learning_rate`, Keras 2.15)."""
    import tensorflow as tf

    hyper = getattr(optimizer, "_hyper", None)
    numbers = [*(hyper.values() if isinstance(hyper, dict) else ()), getattr(optimizer, "_learning_rate", None)]
    return [number for number in numbers if isinstance(number, tf.Variable)]


def scheduled_rate(optimizer: tf.keras.optimizers.Optimizer) -> Any:
    """Returns a scheduled learning rate's variable, or None (`_current_learning_rate`, Keras 2.15)."""
    return getattr(optimizer, "_current_learning_rate", None)


def scheduled_rate_at(optimizer: tf.keras.optimizers.Optimizer, step: tf.Tensor) -> tf.Tensor:
    """Returns the value of an optimizer's schedule at a step (`Optimizer._learning_rate`, Keras 2.15)."""
    return optimizer._learning_rate(step)


def initialise_in_keras_session(variable: tf.Variable) -> None:
    """Makes Keras sessions of a TF 1 graph initialise a variable (`tf.keras.__internal__.backend`, Keras 2.15)."""
    import tensorflow as tf

    tf.keras.__internal__.backend.track_variable(variable)


def is_graph_network(model: tf.keras.Model) -> bool:
    """Returns whether a model is functional, or a built Sequential (`Model._is_graph_network`, Keras 2.15)."""
    return bool(model._is_graph_network)


def set_dtype_policy(layer: tf.keras.layers.Layer, policy: str) -> None:
    """Sets the dtype policy of a layer without variables (`Layer._set_dtype_policy`, Keras 2.15)."""
    layer._set_dtype_policy(policy)


def steps_per_execution(model: tf.keras.Model) -> int:
    """Returns a model's number of steps per training call (`Model._steps_per_execution`, Keras 2.15)."""
    if keras3.is_model(model):
        return model.steps_per_execution
    steps = model._steps_per_execution  # a variable, which `int` does not take under a strategy
    return 1 if steps is None else int(steps.numpy())


def warm_start_settings(estimator: tf.estimator.Estimator) -> Any:
    """Returns an Estimator's warm-start settings, or None (`Estimator._warm_start_settings`, Estimator 2.15)."""
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
    """Returns the RunConfig argument for a strategy in training and evaluation (`DistributeConfig`, TF 2.15)."""
    from tensorflow.python.distribute.distribute_config import DistributeConfig

    return DistributeConfig(strategy, strategy)


def compile_arguments(model: tf.keras.Model) -> dict:
    """Returns the arguments of a model's `compile`, as objects; empty before it (`_compile_config`, Keras 2.15)."""
    config = getattr(model, "_compile_config", None)
    return dict(config.config) if config is not None else {}


def call_after_gradients(callback: Callable[[Any, Any], None]) -> None:
    """Calls `callback(targets, gradients)` whenever gradients are built in a TF 1 graph, from now on.

    Checked in TF 2.15: `gradients_util._GradientsHelper`.
    """
    from tensorflow.python.ops import gradients_util

    def compute_and_note(compute, ys, *arguments, **keywords):
        gradients = compute(ys, *arguments, **keywords)
        callback(ys, gradients)
        return gradients

    wrap_function(gradients_util, "_GradientsHelper", compute_and_note)


def watch_keras_optimizers(after_creation: Callable[[Any], Any], before_update: Callable[[Any, list], Any]) -> None:
    """Calls functions when a Keras optimizer is made and when it updates; does not load Keras.

    Seen in Keras 2.15: `Optimizer._internal_apply_gradients`, and `OptimizerV2._distributed_apply` of legacy
    optimizers. Both run after an optimizer has combined its gradients over the ranks.

    Args:
      after_creation: called with each new optimizer.
      before_update: called with an optimizer and its (gradient, variable) pairs, right before the optimizer applies
        them.
    """

    def init_and_report(method, optimizer, *arguments, **keywords):
        method(optimizer, *arguments, **keywords)
        after_creation(optimizer)

    def report_and_apply(apply, optimizer, grads_and_vars):
        pairs = list(grads_and_vars)
        before_update(optimizer, pairs)
        return apply(optimizer, pairs)

    def report_and_apply_legacy(apply, optimizer, distribution, grads_and_vars, *arguments, **keywords):
        pairs = list(grads_and_vars)
        before_update(optimizer, pairs)
        return apply(optimizer, distribution, pairs, *arguments, **keywords)

    def wrap_current_optimizer(module):
        wrap_function(module._BaseOptimizer, "__init__", init_and_report)
        wrap_function(module.Optimizer, "_internal_apply_gradients", report_and_apply)

    def wrap_legacy_optimizer(module):
        wrap_function(module.OptimizerV2, "__init__", init_and_report)
        wrap_function(module.OptimizerV2, "_distributed_apply", report_and_apply_legacy)

    call_when_loaded(KERAS_OPTIMIZER_MODULE, wrap_current_optimizer)
    call_when_loaded(KERAS_LEGACY_OPTIMIZER_MODULE, wrap_legacy_optimizer)


def replace_seed_choice(choose: Callable[[Callable, Any], Any]) -> None:
    """Lets `choose` choose the seeds of random operators from now on (`framework.random_seed.get_seed`, TF 2.15).

    Args:
      choose: gets TensorFlow's own `get_seed`, and the operator's seed or None; returns the pair of seeds.
    """
    from tensorflow.python.framework import random_seed

    random_seed.get_seed = functools.partial(choose, random_seed.get_seed)


def seed_unseeded_operators(seed: int) -> None:
    """Gives each new random operator without a seed its own seed, because determinism requires seeds.

    Checked in TF 2.15: `Graph._create_op_internal`. Two modules themselves refuse operators without seeds; their
    name `config`, which they use only for this, is replaced.
    """
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import image_ops_impl, stateful_random_ops

    def create_seeded(
        create_op, graph, op_type, inputs, dtypes=None, input_types=None, name=None, attrs=None, *others, **keywords
    ):
        seeds = [attrs[key] for key in ("seed", "seed2") if attrs and key in attrs]
        if len(seeds) == 2 and not any(each.i for each in seeds):
            seeds[0].i, seeds[1].i = seed, len(graph.get_operations()) + 1
        return create_op(graph, op_type, inputs, dtypes, input_types, name, attrs, *others, **keywords)

    wrap_function(ops.Graph, "_create_op_internal", create_seeded)
    for module in (image_ops_impl, stateful_random_ops):
        module.config = types.SimpleNamespace(is_op_determinism_enabled=lambda: False)


def redirect_estimator_folders(module: types.ModuleType, choose: Callable[[str], str]) -> None:
    """Makes Estimators write to the folder that `choose` returns, from now on.

    Seen in Estimator 2.15: `maybe_overwrite_model_dir_and_session_config`.

    Args:
      module: the module that defines Estimators (`names.ESTIMATOR_MODULE`).
      choose: gets the folder that an Estimator would use, and returns the folder to use instead.
    """

    def redirect_folder(stock, config, model_dir):
        config = stock(config, model_dir)
        return module.run_config.RunConfig.replace(config, model_dir=choose(config.model_dir))

    wrap_function(module, "maybe_overwrite_model_dir_and_session_config", redirect_folder)


def compile_converts_optimizers() -> bool:
    """Returns whether `compile` converts optimizers to legacy ones (`tf2.enabled`, in `keras.optimizers.get`)."""
    from tensorflow.python import tf2

    return not tf2.enabled()


def config_before_training(optimizer: Any) -> dict:
    """Returns an optimizer's configuration in a graph, with the initial values of hyper-parameters that are variables.

    Keras 2.15 cannot read such variables in a graph. Seen in Keras 2.15: `Optimizer._serialize_hyperparameter`.
    """
    import tensorflow as tf

    read = optimizer._serialize_hyperparameter

    def initial_value_of(value):
        return tf.get_static_value(value.initial_value).item() if isinstance(value, tf.Variable) else read(value)

    object.__setattr__(optimizer, "_serialize_hyperparameter", initial_value_of)
    try:
        return optimizer.get_config()
    finally:
        object.__delattr__(optimizer, "_serialize_hyperparameter")


def restrict_file_writing(
    config_class: type, may_write: Callable[[], bool], at_training_end: Callable[[], None]
) -> None:
    """Makes Estimators with a configuration of this class train without writing files while `may_write()` is false.

    Changes only the Estimator's internal configuration; the copies that scripts get keep their intervals.
    Without a saver, leaves out checkpoint listeners, for which Estimator 2.15 would raise an error. Seen in Estimator
    2.15: `_train_with_estimator_spec`, which reads all intervals from `_config`.

    Args:
      config_class: the class of the configurations.
      may_write: called when a training begins.
      at_training_end: called at the end of a training, in its graph, after the last checkpoint.
    """
    import tensorflow as tf

    base = tf.compat.v1.estimator.Estimator  # the base of tf.estimator.Estimator, too
    if hasattr(base._train_with_estimator_spec, "__wrapped__"):
        return

    def train_without_writing(train, self, estimator_spec, worker_hooks, hooks, global_step_tensor, saving_listeners):
        arguments = self, estimator_spec, worker_hooks, hooks, global_step_tensor
        config = self._config
        if not isinstance(config, config_class):
            return train(*arguments, saving_listeners)
        if may_write():
            loss = train(*arguments, saving_listeners)
            at_training_end()
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
        at_training_end()
        return loss

    wrap_function(base, "_train_with_estimator_spec", train_without_writing)


def is_loss_scaling_mark(name: str) -> bool:
    """Returns whether `name` is the attribute that Keras 2 sets on an optimizer inside its own `LossScaleOptimizer`."""
    return name == "_is_wrapped_by_loss_scale_optimizer"
