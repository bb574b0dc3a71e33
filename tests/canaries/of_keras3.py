"""Canaries of `npu_bridge/base/tf_internals/keras3.py`, for where Keras 3 is."""

from __future__ import annotations

import importlib
import os
import types

import keras
import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.names import KERAS
from tests.canaries import canary_of, expect, kept

IS_BESIDE = KERAS != "keras"
REASON = "Keras 3 comes with TensorFlow 2.16 and later"
# Modules that can only be imported beside it.
LOADING = ("npu_bridge/gradients/keras/keras3.py", "npu_bridge/optimizers/keras3.py")
LOADING += ("npu_bridge/optimizers/keras3_optimizer.py",)


def built_optimizer():
    """Returns an optimizer with a variable and a slot."""
    optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
    with keras.name_scope("layer"):
        optimizer.build([keras.Variable([1.0, 2.0], name="kernel")])
    return optimizer


@canary_of(
    keras3.loaded_keras3,
    keras3.load_keras3,
    keras3.call_when_keras3_loaded,
    keras3.backend,
    keras3.check_backend,
    eagerly=True,
)
def _():
    told = []
    keras3.call_when_keras3_loaded(told.append)
    expect(keras3.loaded_keras3() is keras3.load_keras3("canary") is keras, "it is another module")
    expect(told == [keras], "it was not told")
    expect(keras3.backend() == "tensorflow", f"the backend is {keras3.backend()}")
    keras3.check_backend("canary")


@canary_of(keras3.is_optimizer, keras3.is_model, keras3.is_schedule, keras3.is_loss_scaling_optimizer, eagerly=True)
def _():
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5))
    expect(keras3.is_optimizer(optimizer) and not keras3.is_optimizer(tf.keras.optimizers.SGD()), "of Keras 2")
    expect(keras3.is_model(keras.Sequential([])) and not keras3.is_model(tf.keras.Sequential([])), "of Keras 2")
    expect(keras3.is_schedule(optimizer._learning_rate) and not keras3.is_schedule(0.5), "no schedule")
    scaling = [keras.optimizers.LossScaleOptimizer(optimizer), keras.optimizers.SGD(loss_scale_factor=2.0)]
    expect(
        [keras3.is_loss_scaling_optimizer(each) for each in (optimizer, *scaling)] == [False, True, True],
        "scales the loss",
    )


@canary_of(
    keras3.tensorflow_variable_of,
    keras3.name_of,
    keras3.variables_built_with,
    keras3.prefix_of_slots,
    eagerly=True,
)
def _():
    optimizer, own = built_optimizer(), tf.Variable(1.0, name="own/v")
    (variable,) = keras3.variables_built_with(optimizer)
    expect(
        isinstance(keras3.tensorflow_variable_of(variable), tf.Variable) and keras3.tensorflow_variable_of(own) is own,
        "of another kind",
    )
    expect(keras3.name_of(keras3.tensorflow_variable_of(variable)) == variable.path, "of another name")
    prefix, names = keras3.prefix_of_slots(variable), [each.name for each in optimizer.variables]
    expect(f"{prefix}momentum" in names, f"there is no slot {prefix}momentum among {', '.join(names)}")
    expect(not keras3.variables_built_with(keras.optimizers.SGD()), "one that is not built has variables")
    optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
    optimizer.build([own])
    expect(f"{keras3.prefix_of_slots(own)}momentum" in [each.name for each in optimizer.variables], "there is no slot")


@canary_of(keras3.batches_in_window, eagerly=True)
def _():
    optimizer, own = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2), tf.Variable(1.0)
    counts = []
    for _ in range(3):
        optimizer.apply([tf.constant(1.0)], [own])
        counts += keras3.batches_in_window(optimizer)
    expect(counts == [1, 0, 1], f"the counts of three batches are {counts}")
    expect(not keras3.batches_in_window(built_optimizer()), "an optimizer that accumulates nothing has a count")


@canary_of(keras3.reject_keras_variables, eagerly=True)
def _():
    keras3.reject_keras_variables("it", [tf.Variable(1.0)])
    try:
        keras3.reject_keras_variables("it", [keras.Variable(1.0, name="v")])
    except TypeError as error:
        expect("keras.Variable v" in str(error), "it does not name the variable")
    else:
        expect(False, "it takes a variable of Keras 3")


@canary_of(keras3.copy_constraint_and_path, eagerly=True)
def _():
    standing, variable = tf.Variable([3.0, 4.0]), keras.Variable([3.0, 4.0])
    variable.constraint = keras.constraints.MaxNorm(1.0)
    keras3.copy_constraint_and_path(standing, variable)
    optimizer = keras.optimizers.SGD(0.0)
    optimizer.apply([tf.zeros([2])], [standing])
    expect(abs(float(tf.norm(standing)) - 1.0) < 1e-5, "it is not constrained")
    expect(standing.path == variable.path, "it has another path")


@canary_of(keras3.watch_optimizers, eagerly=True)
def _():
    base = importlib.import_module("keras.src.optimizers.base_optimizer").BaseOptimizer
    told = []
    with kept(base, "__init__", "_backend_apply_gradients"):
        keras3.watch_optimizers(told.append, lambda *update: told.append(update))
        optimizer, variable, gradient = keras.optimizers.SGD(0.5), keras.Variable([1.0]), tf.constant([1.0])
        optimizer.apply([gradient], [variable])
    expect(told[0] is optimizer and told[1][0] is optimizer, "it did not get the optimizer")
    ((grad, of),) = told[1][1]
    expect(grad is gradient and of is variable and float(variable[0]) == 0.5, "it got another update")


@canary_of(keras3.is_tf_keras, eagerly=True)
def _():
    loader = importlib.import_module("tensorflow.python.util.lazy_loader").KerasLazyLoader({}, mode="v2")
    tensorflow = types.SimpleNamespace(keras=loader)
    expect(not keras3.is_tf_keras(tensorflow) and not keras3.is_tf_keras(tf), "it is Keras 3 before its first use")
    with environment.set_variables_temporarily(lambda: {"TF_USE_LEGACY_KERAS": "0"}):
        expect(loader.Model is keras.Model, "it is no Keras 3")
    expect(keras3.is_tf_keras(tensorflow), "it is not seen")


@canary_of(keras3.redirect_to_keras_2, eagerly=True)
def _():
    tensorflow = types.ModuleType("tensorflow")
    tensorflow.__path__ = ["elsewhere"]
    for _ in range(2):
        keras3.redirect_to_keras_2(tensorflow)
    first, last = tensorflow.__path__
    expect(os.path.isdir(os.path.join(first, "keras")) and last == "elsewhere", "Keras 2 has another folder")
