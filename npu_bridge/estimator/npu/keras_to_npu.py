"""Defines `model_to_npu_estimator`, which makes an `NPUEstimator` from a Keras model."""

from __future__ import annotations

import re

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.errors import message, shown
from npu_bridge.base.files import temporary_folder
from npu_bridge.base.tf_internals.savers import keys_in_object_checkpoint
from npu_bridge.base.tf_internals.training import is_graph_network, model_function, warm_start_settings
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, resolve_model_dir

__all__ = ["model_to_npu_estimator"]

_OWNER = "model_to_npu_estimator"
_FORMATS = ("saver", "checkpoint")
_OF_OPTIMIZERS = (tf.compat.v1.GraphKeys.GLOBAL_STEP, "training/")  # Keras' scope of slots and hyperparameters


def model_to_npu_estimator(
    keras_model=None,
    keras_model_path=None,
    custom_objects=None,
    model_dir=None,
    checkpoint_format="saver",
    config=None,
    job_start_file="",
):
    """Makes an `NPUEstimator` that trains a compiled Keras model.

    The first call for a `model_dir` keeps the model's current weights there. Training begins with the newest checkpoint
    or, without one, with these weights. The estimator trains the model with `iterations_per_loop`, with hooks, and from
    checkpoints; it uses no callbacks.

    Args:
      keras_model: a compiled Sequential or functional model.
      keras_model_path: the file of a saved model, in place of `keras_model`.
      custom_objects: dict of the classes and functions needed to load the saved model, by name.
      model_dir: folder of checkpoints, as in `NPUEstimator`; the weights are kept in its subfolder `keras`.
      checkpoint_format: the format of the saved weights, "saver" or "checkpoint".
      config: an `NPURunConfig`.
      job_start_file: accepted for compatibility.
    Returns:
      The estimator. Its `input_fn` returns features as a dict by the names of the model's inputs, or the single input.
    Raises:
      ValueError: both or none of `keras_model` and `keras_model_path` are given, the model has no declared inputs or is
        not compiled, `checkpoint_format` is unknown, or `config` is not an `NPURunConfig`.
    Ranks: local. In training, all ranks get the weights of rank 0; only rank 0 writes files.
    """
    if not isinstance(config, NPURunConfig):
        raise _error("config is not an NPURunConfig", "an NPURunConfig", config, "Pass config=NPURunConfig(...).")
    if checkpoint_format not in _FORMATS:
        expected = " or ".join(repr(name) for name in _FORMATS)
        raise _error("checkpoint_format is unknown", expected, checkpoint_format, "Leave it out.")
    if (keras_model is None) == (keras_model_path is None):
        problem, got = ("no model is given", "neither") if keras_model is None else ("the model is ambiguous", "both")
        raise ValueError(message(_OWNER, problem, "keras_model or keras_model_path", got, "Pass one of them."))
    if keras_model is None:
        keras_model = tf.keras.models.load_model(keras_model_path, custom_objects=custom_objects)
    _check_model_class(keras_model)
    model_dir = resolve_model_dir(model_dir, config)
    # Ranks can share the folder. On ranks above 0, weights go to a temporary folder, which lasts as long as the
    # estimator.
    own_folder = temporary_folder() if collective.current().rank > 0 else None
    weights_dir = model_dir if own_folder is None else own_folder.name
    stock = tf.compat.v1.keras.estimator.model_to_estimator(
        keras_model,
        custom_objects=custom_objects,
        model_dir=weights_dir,
        config=config.replace(model_dir=weights_dir),
        checkpoint_format=checkpoint_format,
    )
    warm_start = _start_from_all_weights(warm_start_settings(stock))
    estimator = NPUEstimator(model_function(stock), model_dir, config, None, job_start_file, warm_start_from=warm_start)
    estimator._keras_weights = own_folder
    return estimator


def _start_from_all_weights(settings):
    """Adds weights that are not trained: a pattern selects only trained variables, and a list selects any."""
    if settings is None:
        return None
    reader = tf.train.load_checkpoint(settings.ckpt_to_initialize_from)
    names = keys_in_object_checkpoint(reader) or reader.get_variable_to_shape_map()
    weights = [f"{re.escape(name)}:" for name in names if not name.startswith(_OF_OPTIMIZERS)]
    return settings._replace(vars_to_warm_start=weights)


def _check_model_class(model):
    # A Sequential model without an input shape has no weights to begin from.
    if not isinstance(model, tf.keras.Model) or not is_graph_network(model):
        fix = "Build it from tf.keras.Input, or give a Sequential model an input shape."
        raise _error("keras_model has no declared inputs", "a Sequential or functional model", model, fix)
    if not model.optimizer:
        raise _error("keras_model is not compiled", "a model with an optimizer", model, "Call compile first.")


def _error(problem, expected, got, fix):
    return ValueError(message(_OWNER, problem, expected, shown(got), fix))
