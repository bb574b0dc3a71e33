"""`model_to_npu_estimator`: a Keras model as an estimator."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.npu_init import FixedLossScaleManager, NPUEstimator, keras_to_npu, npu_keras_optimizer
from tests.documented.signatures import signature_of
from tests.rank_pool import on_each_rank

convert = keras_to_npu.model_to_npu_estimator


def input_fn():
    x = np.random.RandomState(0).randn(64, 4).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).repeat().batch(8)


def make_model(optimizer="sgd", first=()):
    tf.keras.utils.set_random_seed(1)
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Input([4]), *first, layers.Dense(3), layers.Dense(1)])
    model.compile(optimizer, loss="mse", metrics=["mae"])
    return model


def test_signature():
    assert signature_of(convert) == (
        "(keras_model=None, keras_model_path=None, custom_objects=None, model_dir=None, checkpoint_format='saver', "
        "config=None, job_start_file='')"
    )


def make_optimizer(kind):
    inner = tf.keras.optimizers.legacy.SGD(0.05)
    return {"stock": inner, "wrapped": npu_keras_optimizer(inner)}.get(kind) or npu_keras_optimizer(
        inner, FixedLossScaleManager(64)
    )


def test_it_trains_as_the_stock_keras_estimator_with_every_optimizer(tmp_path):
    """A power of two as the scale changes no bit of these gradients."""
    kernels = []
    for kind in ("stock", "wrapped", "scaled", "stock estimator"):
        config = NPURunConfig(model_dir=str(tmp_path / kind), tf_random_seed=1)
        model = make_model(make_optimizer(kind.split()[0]))
        first = [layer.kernel.name for layer in model.layers][0].split(":")[0]
        make = tf.compat.v1.keras.estimator.model_to_estimator if "estimator" in kind else convert
        estimator = make(model, config=config)
        assert isinstance(estimator, NPUEstimator) == ("estimator" not in kind)
        before = estimator.train(input_fn, steps=1).evaluate(input_fn, steps=4)
        after = estimator.train(input_fn, max_steps=40).evaluate(input_fn, steps=4)
        assert set(after) == {"loss", "mae", "global_step"} and after["loss"] < before["loss"] / 10
        kernels.append(tf.train.load_variable(estimator.model_dir, first))
        predicted = next(estimator.predict(lambda: input_fn().map(lambda x, y: x)))
        assert [value.shape for value in predicted.values()] == [(1,)]
    for kernel in kernels[:-1]:
        np.testing.assert_array_equal(kernel, kernels[-1])


@on_each_rank(2, by_rank=[True, False])
def test_rank_0_alone_writes_weights(tmp_path):
    own = os.path.join(tmp_path, str(collective.current().rank))
    convert(make_model(), model_dir=own, config=NPURunConfig())
    return os.path.exists(os.path.join(own, "keras"))


@pytest.mark.few_fast(1, "other generations of Keras")
@pytest.mark.parametrize("checkpoint_format", ["saver", "checkpoint"])
def test_it_starts_from_the_model_s_weights(checkpoint_format, tmp_path):
    statistics = [tf.keras.layers.Normalization(name=name) for name in "ab"] + [tf.keras.layers.BatchNormalization()]
    for layer in statistics[:2]:
        layer.adapt(np.random.rand(9, 4))
    model = make_model(first=statistics)
    model.fit(*next(iter(input_fn())), verbose=0)
    weights = model.get_weights()
    if checkpoint_format == "saver":
        path = str(tmp_path / "model.h5")
        model.save(path)
        given = {"keras_model_path": path}
    else:
        given = {"keras_model": model}
    config = NPURunConfig(save_checkpoints_steps=10, iterations_per_loop=5)
    folder = str(tmp_path / "out")
    estimator = convert(**given, model_dir=folder, checkpoint_format=checkpoint_format, config=config)
    assert estimator.model_dir == folder and os.path.isdir(os.path.join(folder, "keras"))
    estimator.train(input_fn, steps=10)
    start = os.path.join(folder, "model.ckpt-0")
    saved = [np.asarray(tf.train.load_variable(start, name)).tobytes() for name, _ in tf.train.list_variables(start)]
    assert {weight.tobytes() for weight in weights} <= {*saved}
    assert os.path.basename(tf.train.latest_checkpoint(folder)) == "model.ckpt-10"
    assert estimator._reached_step_of_rank_0() == 10, "what several ranks count max_steps from"


class Own(tf.keras.Model):
    def call(self, inputs):
        return inputs


@pytest.mark.parametrize(
    "arguments, word",
    [
        (lambda: {"keras_model": make_model(), "config": tf.estimator.RunConfig()}, "NPURunConfig"),
        (lambda: {"config": NPURunConfig()}, "neither"),
        (lambda: {"keras_model": make_model(), "keras_model_path": "m.h5", "config": NPURunConfig()}, "both"),
        (lambda: {"keras_model": Own(), "config": NPURunConfig()}, "functional"),
        (lambda: {"keras_model": tf.keras.models.clone_model(make_model()), "config": NPURunConfig()}, "compile"),
        (lambda: {"keras_model": make_model(), "config": NPURunConfig(), "checkpoint_format": "h5"}, "'checkpoint'"),
    ],
)
def test_illegal_arguments(arguments, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"model_to_npu_estimator: .*{word}"):
        convert(**arguments())
    assert os.listdir(tmp_path) == []
