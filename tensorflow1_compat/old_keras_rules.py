"""Restores what Keras of TensorFlow 1.15 computed, and how it named layers and variables.

The rules are set on the real modules, so all code sees them.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
from typing import Any, Callable

from npu_bridge.base.after_import import call_when_loaded, wrap_function
from npu_bridge.base.tf_internals.contrib import take_logits_of_same_activation
from npu_bridge.base.tf_internals.names import KERAS

__all__ = ["restore_keras_of_1", "restore_standalone_keras"]

_SWAPPED = [1, 0, 2]  # the order of rows and columns in a matrix that transforms images


def restore_keras_of_1() -> None:
    """Sets the rules of TensorFlow 1.15 in Keras, each as soon as its module is loaded."""
    for name in ("base_rnn", "stacked_rnn_cells"):
        call_when_loaded(f"{KERAS}.src.layers.rnn.{name}", _name_variables_without_cells)
    for name in ("utils.generic_utils", "engine.base_layer_v1"):
        call_when_loaded(f"{KERAS}.src.{name}", _name_layers_as_in_1)
    call_when_loaded(f"{KERAS}.src.utils.losses_utils", _average_losses_over_masked_elements)
    call_when_loaded(f"{KERAS}.src.losses", _reverse_cosine_loss)
    call_when_loaded(f"{KERAS}.src.metrics.regression_metrics", _name_cosine_metric)
    call_when_loaded(f"{KERAS}.src.optimizers.legacy.adagrad", _start_adagrad_of_texts_at_zero)
    call_when_loaded(f"{KERAS}.src.backend", take_logits_of_same_activation)
    call_when_loaded(f"{KERAS}.src.activations", _divide_in_softmax)
    call_when_loaded(f"{KERAS}.src.backend", _shorten_decoded_sequences)
    call_when_loaded(f"{KERAS}.src.preprocessing.image", _transform_images_as_in_1)
    call_when_loaded(f"{KERAS}.src.saving.saving_api", _save_hdf5)
    call_when_loaded(f"{KERAS}.src.saving.legacy.hdf5_format", _take_lists_of_layers)
    convolutions = f"{KERAS}.src.layers.convolutional.base"
    call_when_loaded(f"{convolutions}_separable_conv", lambda module: _allow_dilated_strides(module.SeparableConv))
    call_when_loaded(f"{convolutions}_depthwise_conv", lambda module: _allow_dilated_strides(module.DepthwiseConv))


@functools.cache
def restore_standalone_keras() -> None:
    """Sets the rules of stand-alone Keras 2.3.1 where they differ from those of `tf.keras`."""
    from tensorflow1_compat import old_optimizers

    for rule in (old_optimizers.get, old_optimizers.deserialize):
        call_when_loaded(f"{KERAS}.src.optimizers", functools.partial(wrap_function, name=rule.__name__, function=rule))
    call_when_loaded(f"{KERAS}.src.callbacks", _log_accuracy_by_both_names)
    call_when_loaded(f"{KERAS}.src.engine.training_arrays_v1", lambda module: _pass_validation_data(module, "fit_loop"))
    call_when_loaded(
        f"{KERAS}.src.engine.training_generator_v1", lambda module: _pass_validation_data(module, "fit_generator")
    )


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


def _divide_in_softmax(module: types.ModuleType) -> None:
    """Makes the activation "softmax" of images and sequences divide, as in 1.15, so cross-entropies find no logits."""
    import tensorflow.compat.v1 as tf

    def softmax(stock: Callable, x: Any, axis: Any = -1) -> Any:
        if x.shape.rank is None or x.shape.rank <= 2:
            return stock(x, axis)
        powers = tf.exp(x - tf.reduce_max(x, axis, keepdims=True))
        return powers / tf.reduce_sum(powers, axis, keepdims=True)

    wrap_function(module, "softmax", softmax)


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


def _save_hdf5(module: types.ModuleType) -> None:
    """Makes `.keras` and `.weights.h5` HDF5 files, as in 1.15; newer formats cannot be written in graphs."""

    def format_in_1(stock: Callable, *arguments: Any, **options: Any) -> str:
        found = stock(*arguments, **options)
        return "h5" if found == "keras" else found

    def weights_in_1(stock: Callable, model: Any, filepath: Any, **options: Any) -> Any:
        function = getattr(legacy, stock.__name__) if str(filepath).endswith(".weights.h5") else stock
        return function(model, filepath, **options)

    legacy = module.legacy_sm_saving_lib
    wrap_function(module, "get_save_format", format_in_1)
    for name in ("save_weights", "load_weights"):
        wrap_function(module, name, weights_in_1)


def _take_lists_of_layers(module: types.ModuleType) -> None:
    """Lets functions for weights in HDF5 files take layers, as in 1.15; newer ones take a model."""

    def in_1(stock: Callable, file: Any, model: Any, *arguments: Any, **options: Any) -> Any:
        if not hasattr(model, "layers"):
            layers = list(model)
            own: dict = {"_trainable_weights": [], "_non_trainable_weights": []}
            model = types.SimpleNamespace(layers=layers, _flatten_layers=lambda: layers, **own)
        return stock(file, model, *arguments, **options)

    for name in ("save_weights_to_hdf5_group", "load_weights_from_hdf5_group", "load_weights_from_hdf5_group_by_name"):
        wrap_function(module, name, in_1)


def _log_accuracy_by_both_names(module: types.ModuleType) -> None:
    """Adds `accuracy`, its name since Keras 2.3, to the numbers of an epoch that have `acc`, its name before."""

    def add_names(stock: Callable, self: Any, epoch: int, logs: dict | None = None) -> None:
        stock(self, epoch, logs)
        for name in list(logs or ()):
            if name == "acc" or name.endswith("_acc"):
                logs.setdefault(f"{name[:-3]}accuracy", logs[name])

    wrap_function(module.BaseLogger, "on_epoch_end", add_names)  # the first of all callbacks


def _pass_validation_data(module: types.ModuleType, name: str) -> None:
    """Gives callbacks the attribute `validation_data`: inputs, targets and weights, if these are arrays."""
    import numpy as np

    def fit(stock: Callable, *arguments: Any, callbacks: Any = None, **options: Any) -> Any:
        names = ("val_inputs", "val_targets", "val_sample_weights")
        given = options.get("validation_data") or [options.get(each) for each in names]
        if isinstance(given, (list, tuple)):
            x, y, weights = (each if isinstance(each, list) else [each] for each in (*given, None)[:3])
            if all(isinstance(each, np.ndarray) for each in (*x, *y)):
                pairs = zip(y, [*weights, *[None] * len(y)])
                found = [*x, *y, *(np.ones(len(each)) if weight is None else weight for each, weight in pairs)]
                for callback in getattr(callbacks, "callbacks", callbacks) or ():
                    callback.validation_data = found
        return stock(*arguments, callbacks=callbacks, **options)

    wrap_function(module, name, fit)
