"""Adds attributes that tensors, graphs and models had in older versions of TensorFlow and Keras.

The attributes are set on the real classes, so all code sees them. Existing attributes of a class are kept.
"""

from __future__ import annotations

import sys
import types
from typing import Any, Callable

from npu_bridge.base.after_import import call_when_loaded, wrap_function
from npu_bridge.base.tf_internals.names import KERAS

__all__ = ["add_attributes_of_1", "add_attributes_of_2"]


def add_attributes_of_1() -> None:
    """Adds the attributes of TensorFlow 1.15; adds attributes of Keras once Keras is loaded."""
    import tensorflow.compat.v1 as tf

    add_attributes_of_2()
    _set_if_missing(tf.Tensor, "_keras_shape", property(_shape_of, _set_shape))
    _set_if_missing(tf.Tensor, "_uses_learning_phase", False)
    call_when_loaded(f"{KERAS}.src.engine.base_layer_v1", lambda module: _set_if_missing(module.Layer, "apply", _apply))
    for name in ("keras.backend", f"{KERAS}.api._v2.keras.backend"):  # Horovod's callbacks look for the session here
        call_when_loaded(name, _add_session_functions)


def add_attributes_of_2() -> None:
    """Adds attributes of earlier versions of TensorFlow 2, each as soon as its module is loaded."""
    call_when_loaded("tensorflow.python.framework.ops", _add_last_id_to_graphs)
    call_when_loaded("tensorflow.python.data.ops.options", _accept_old_options_of_data)
    call_when_loaded("tensorflow.python.distribute.distribute_lib", _add_run_v2_to_strategies)
    for name in ("base_layer", "base_layer_v1"):
        call_when_loaded(f"{KERAS}.src.engine.{name}", _take_inputs_of_updates)
    call_when_loaded(f"{KERAS}.src.engine.sequential", _add_predict_methods_to_models)
    call_when_loaded(f"{KERAS}.src.optimizers.optimizer", _accept_old_keywords)


def _add_session_functions(module: types.ModuleType) -> None:
    def add_from(backend: types.ModuleType) -> None:
        module.get_session, module.set_session = backend.get_session, backend.set_session

    call_when_loaded(f"{KERAS}.api._v1.keras.backend", add_from)


def _set_if_missing(kind: type, name: str, value: Any) -> None:
    if not hasattr(kind, name):
        setattr(kind, name, value)


def _add_last_id_to_graphs(module: types.ModuleType) -> None:
    # The number of operators; copies of TensorFlow's seed function compute an operator's seed from it.
    _set_if_missing(module.Graph, "_last_id", property(lambda graph: graph.num_operations()))


def _accept_old_options_of_data(module: types.ModuleType) -> None:
    """Lets scripts set options of input pipelines that TensorFlow no longer has; they changed only speed."""
    _set_if_missing(module.DistributeOptions, "auto_shard", property(_is_sharded, _set_sharded))
    _set_if_missing(module.Options, "experimental_stateful_whitelist", None)
    _set_if_missing(module.Options, "experimental_stats", types.SimpleNamespace())
    _set_if_missing(module.OptimizationOptions, "map_vectorization", types.SimpleNamespace())
    for name in ("algorithm", "buffers", "cpu_budget"):
        _set_if_missing(module.OptimizationOptions, f"autotune_{name}", None)
    for name in ("autotune", "filter_with_random_uniform_fusion", "hoist_random_uniform"):
        _set_if_missing(module.OptimizationOptions, name, None)


def _is_sharded(options: Any) -> bool:
    """Returns whether input is divided among workers; `auto_shard_policy` was a bool with this name."""
    return options.auto_shard_policy != type(options.auto_shard_policy).OFF


def _set_sharded(options: Any, is_sharded: bool) -> None:
    policy = type(options.auto_shard_policy)
    options.auto_shard_policy = policy.AUTO if is_sharded else policy.OFF


def _add_run_v2_to_strategies(module: types.ModuleType) -> None:
    _set_if_missing(module.StrategyBase, "experimental_run_v2", lambda self, *args, **named: self.run(*args, **named))


def _take_inputs_of_updates(module: types.ModuleType) -> None:
    """Lets layers call `add_update(updates, inputs)`; newer versions of Keras need no inputs."""

    def add_update(add: Callable, layer: Any, updates: Any, inputs: Any = None) -> None:
        add(layer, updates)

    wrap_function(module.Layer, "add_update", add_update)


def _add_predict_methods_to_models(module: types.ModuleType) -> None:
    _set_if_missing(module.Sequential, "predict_classes", _predict_classes)
    _set_if_missing(module.Sequential, "predict_proba", _predict_proba)


def _accept_old_keywords(module: types.ModuleType) -> None:
    """Makes Keras optimizers accept `decay`, which they refuse, and `lr`, which they ignore.

    Calls with these keywords return the legacy optimizer. This is for scripts under plain Python: under `npu-run` the
    names of optimizers already mean the legacy optimizers (`LEGACY_OPTIMIZERS`).
    """

    def make(kind: type, *arguments: Any, **options: Any) -> Any:
        if {"decay", "lr"} & options.keys() and kind.__module__.startswith(f"{KERAS}."):
            legacy = sys.modules["tensorflow"].keras.optimizers.legacy

            if hasattr(legacy, kind.__name__):
                return getattr(legacy, kind.__name__)(*arguments, **options)
        return object.__new__(kind)

    module.Optimizer.__new__ = make


def _shape_of(tensor: Any) -> tuple:
    """Returns the static shape in the form of Keras 2.2: a tuple with None for unknown dimensions."""
    return vars(tensor).get("_own_keras_shape") or tuple(tensor.shape.as_list())


def _set_shape(tensor: Any, shape: Any) -> None:
    vars(tensor)["_own_keras_shape"] = tuple(shape)


def _apply(self: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
    """Returns the layer's outputs."""
    return self(inputs, *arguments, **options)


def _predict_proba(self: Any, x: Any, batch_size: int | None = None, verbose: int = 0, steps: int | None = None) -> Any:
    """Returns the model's outputs."""
    return self.predict(x, batch_size=batch_size, verbose=verbose, steps=steps)


def _predict_classes(
    self: Any, x: Any, batch_size: int | None = None, verbose: int = 0, steps: int | None = None
) -> Any:
    """Returns the index of the largest output; for a single output, 1 if it is above 0.5, else 0."""
    found = self.predict(x, batch_size=batch_size, verbose=verbose, steps=steps)
    return found.argmax(-1) if found.shape[-1] > 1 else (found > 0.5).astype("int32")
