"""Adds attributes that tensors, graphs and models had in older versions of TensorFlow and Keras.

The attributes are set on the real classes, so all code sees them. Existing attributes of a class are kept, except for
one check in Keras.
"""

from __future__ import annotations

import contextlib
import re
import sys
import types
from typing import Any, Callable

from npu_bridge.base.after_import import call_when_loaded, wrap_function
from npu_bridge.base.tf_internals.contrib import take_logits_of_same_activation
from npu_bridge.base.tf_internals.names import KERAS

__all__ = ["add_attributes_of_1", "add_attributes_of_2"]

_SWAPPED = [1, 0, 2]  # the order of rows and columns in a matrix that transforms images


def add_attributes_of_1() -> None:
    """Adds the attributes of TensorFlow 1.15; adds attributes of Keras once Keras is loaded."""
    import tensorflow.compat.v1 as tf

    add_attributes_of_2()
    _set_if_missing(tf.Tensor, "_keras_shape", property(_shape_of, _set_shape))
    _set_if_missing(tf.Tensor, "_uses_learning_phase", False)
    call_when_loaded(f"{KERAS}.src.engine.base_layer_v1", lambda module: _set_if_missing(module.Layer, "apply", _apply))
    for name in ("keras.backend", f"{KERAS}.api._v2.keras.backend"):  # Horovod's callbacks look for the session here
        call_when_loaded(name, _add_session_functions)
    for name in ("base_rnn", "stacked_rnn_cells"):
        call_when_loaded(f"{KERAS}.src.layers.rnn.{name}", _name_variables_without_cells)
    for name in ("utils.generic_utils", "engine.base_layer_v1"):
        call_when_loaded(f"{KERAS}.src.{name}", _name_layers_as_in_1)
    call_when_loaded(f"{KERAS}.src.utils.losses_utils", _average_losses_over_masked_elements)
    call_when_loaded(f"{KERAS}.src.losses", _reverse_cosine_loss)
    call_when_loaded(f"{KERAS}.src.metrics.regression_metrics", _name_cosine_metric)
    call_when_loaded(f"{KERAS}.src.optimizers.legacy.adagrad", _start_adagrad_of_texts_at_zero)
    call_when_loaded(f"{KERAS}.src.backend", take_logits_of_same_activation)
    call_when_loaded(f"{KERAS}.src.backend", _shorten_decoded_sequences)
    call_when_loaded(f"{KERAS}.src.preprocessing.image", _transform_images_as_in_1)
    convolutions = f"{KERAS}.src.layers.convolutional.base"
    call_when_loaded(f"{convolutions}_separable_conv", lambda module: _allow_dilated_strides(module.SeparableConv))
    call_when_loaded(f"{convolutions}_depthwise_conv", lambda module: _allow_dilated_strides(module.DepthwiseConv))


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


def _allow_dilated_strides(layer_class: type) -> None:
    """Lets a layer class have strides and dilation above 1 at once; 1.15 refused this only in plain convolutions."""

    def check(self: Any) -> None:
        dilation, self.dilation_rate = self.dilation_rate, (1,)
        try:
            super(layer_class, self)._validate_init()
        finally:
            self.dilation_rate = dilation

    layer_class._validate_init = check


def _name_variables_without_cells(module: types.ModuleType) -> None:
    """Lets recurrent layers name variables `lstm/kernel`, as in 1.15; newer ones insert the name of the cell."""
    stock = module.backend
    module.backend = types.ModuleType(stock.__name__, stock.__doc__)
    module.backend.__dict__.update(vars(stock), name_scope=lambda name: contextlib.nullcontext())


def _name_layers_as_in_1(module: types.ModuleType) -> None:
    """Makes the default name of a layer `VGG16` or `ConvLSTM2D` `vg_g16` or `conv_lst_m2d`, as in 1.15."""

    def take_digits_for_small_letters(to_snake_case: Callable, name: str) -> str:
        words = re.sub("(.)([A-Z][a-z0-9]+)", r"\1_\2", name)
        return to_snake_case(re.sub("([a-z])([A-Z])", r"\1_\2", words).lower())

    wrap_function(module, "to_snake_case", take_digits_for_small_letters)


def _average_losses_over_masked_elements(module: types.ModuleType) -> None:
    """Makes the loss of masked sequences a mean over all elements, as in 1.15; newer ones leave out masked elements."""
    module.apply_valid_mask = lambda losses, weights, mask, reduction: module.apply_mask(losses, weights, mask)


def _reverse_cosine_loss(module: types.ModuleType) -> None:
    """Gives the loss `cosine_similarity` its name and its sign in 1.15."""
    if hasattr(module, "cosine_proximity"):
        return
    stock = module.cosine_similarity

    def cosine_proximity(y_true: Any, y_pred: Any, axis: int = -1) -> Any:
        return -stock(y_true, y_pred, axis)

    module.cosine_proximity = module.cosine_similarity = cosine_proximity


def _name_cosine_metric(module: types.ModuleType) -> None:
    """Gives the metric `cosine_similarity` its name in 1.15, which is a key in the history of `fit`."""
    module.cosine_similarity.__name__ = "cosine_proximity"


def _start_adagrad_of_texts_at_zero(module: types.ModuleType) -> None:
    """Makes the optimizer "adagrad" start its sums at 0, as in 1.15; `Adagrad()` starts them at 0.1 in both."""

    def from_config(kind: type, config: dict, custom_objects: dict | None = None) -> Any:
        return stock(kind, {"initial_accumulator_value": 0.0, **config}, custom_objects)

    stock = module.Adagrad.from_config.__func__
    module.Adagrad.from_config = classmethod(from_config)


def _shorten_decoded_sequences(module: types.ModuleType) -> None:
    """Makes `ctc_decode` pad sequences with -1 to the longest one, as in 1.15; newer ones pad to the input's length."""
    import tensorflow.compat.v1 as tf

    def shorten(ctc_decode: Callable, *arguments: Any, **options: Any) -> Any:
        sequences, scores = ctc_decode(*arguments, **options)
        lengths = [tf.reduce_max(tf.count_nonzero(tf.not_equal(each, -1), 1)) for each in sequences]
        return [each[:, :length] for each, length in zip(sequences, lengths)], scores

    wrap_function(module, "ctc_decode", shorten)


def _transform_images_as_in_1(module: types.ModuleType) -> None:
    """Makes a `height_shift_range` of images move their rows, as in 1.15; Keras 2.15 swaps rows and columns afterwards.

    The centre of a rotation is that of 1.15, too.
    """

    def offset_centre(offset: Callable, matrix: Any, rows: int, columns: int) -> Any:
        return offset(matrix, rows + 2, columns + 2)[_SWAPPED][:, _SWAPPED]

    if not hasattr(module.transform_matrix_offset_center, "__wrapped__"):
        wrap_function(module, "transform_matrix_offset_center", offset_centre)


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
