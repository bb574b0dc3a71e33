"""`NPUEstimator`, `NPUEstimatorSpec` and the hooks, on one process."""

from __future__ import annotations

import functools
import inspect
import os

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.estimator.npu.npu_hook import NPUBroadcastGlobalVariablesHook, NPUCheckpointSaverHook, NpuEmptyHook
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.session import ResumableLoop
from tests.goldens.two_layers import assert_same_bits
from tests.refusing import refuses

tf1 = tf.compat.v1
TRAIN, EVAL, PREDICT = tf.estimator.ModeKeys.TRAIN, tf.estimator.ModeKeys.EVAL, tf.estimator.ModeKeys.PREDICT


def input_fn():
    features = np.random.RandomState(0).randn(40, 4).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((features, features.sum(axis=1, keepdims=True))).repeat().batch(4)


def model_fn(features, labels, mode):
    kernel = tf1.get_variable("kernel", [4, 1], initializer=tf1.zeros_initializer())
    predictions = tf.matmul(features, kernel)
    if mode == PREDICT:
        return NPUEstimatorSpec(mode, predictions=predictions)
    loss = tf.reduce_mean(tf.square(predictions - labels))
    optimizer = NPUOptimizer(
        tf1.train.AdamOptimizer(0.1), ExponentialUpdateLossScaleManager(64, 4, 1, 2, 0.5), is_loss_scale=True
    )
    train_op = optimizer.minimize(loss, tf1.train.get_or_create_global_step())
    return NPUEstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops={})


def checkpoint_values(folder):
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(folder))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def test_trains_evaluates_predicts_and_saves_the_scale(tmp_path):
    values = []
    for kind in (NPUEstimator, tf.estimator.Estimator):
        config = NPURunConfig(model_dir=str(tmp_path / kind.__name__), save_checkpoints_steps=10, tf_random_seed=1)
        estimator = kind(model_fn, config=config)
        start = estimator.train(input_fn, max_steps=1).evaluate(input_fn, steps=5)["loss"]
        end = estimator.train(input_fn, max_steps=60).evaluate(input_fn, steps=5)["loss"]
        assert end < start / 10
        assert next(estimator.predict(lambda: input_fn().map(lambda features, labels: features))).shape == (1,)
        values.append(checkpoint_values(estimator.model_dir))
    assert_same_bits(*values)
    assert values[0]["global_step"] == 60
    assert values[0]["loss_scale"] == 64 * 2**15  # 60 good steps, doubled every 4
    assert {"good_steps", "bad_steps", "kernel", "kernel/Adam", "beta1_power"} <= set(values[0]) == set(values[1])


def test_a_stock_run_config_is_answered_with_the_one_to_write():
    for none in (None, "config"):
        with pytest.raises(ValueError, match="NPURunConfig"):
            NPUEstimator(model_fn, config=none)
    config = tf.estimator.RunConfig(model_dir="out", save_checkpoints_steps=50, tf_random_seed=3)
    with pytest.raises(ValueError) as refused:
        NPUEstimator(model_fn, config=config)
    assert "Write NPURunConfig(model_dir='out', tf_random_seed=3, save_checkpoints_steps=50)." in str(refused.value)


def test_model_dir_is_given_once(tmp_path):
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    assert NPUEstimator(model_fn, model_dir=one, config=NPURunConfig()).model_dir == one
    assert NPUEstimator(model_fn, model_dir=one, config=NPURunConfig(model_dir=one)).model_dir == one
    assert NPUEstimator(model_fn, config=NPURunConfig(model_dir=one)).model_dir == one
    assert NPUEstimator(model_fn, tmp_path / "one", NPURunConfig(model_dir=os.fsencode(one))).model_dir == one
    with pytest.raises(ValueError, match="two model folders"):
        NPUEstimator(model_fn, model_dir=one, config=NPURunConfig(model_dir=other))


@pytest.mark.parametrize("name", ["layers=[64,64]", "back\\slash"])
def test_a_folder_in_which_tensorflow_finds_no_checkpoint_is_refused(tmp_path, name):
    folder = str(tmp_path / name)
    tf.train.Checkpoint(weight=tf.Variable(1.0)).save(f"{folder}/ckpt")
    assert tf.train.latest_checkpoint(folder) is None
    for make in (
        lambda: NPUEstimator(model_fn, config=NPURunConfig(model_dir=folder)),
        lambda: ResumableLoop(folder, tf.Module(), tf.keras.optimizers.SGD()),
        lambda: NPUCheckpointSaverHook(folder, save_steps=1).begin(),
    ):
        with pytest.raises(ValueError, match="would not be found again"):
            make()


def test_features_need_not_be_the_first_argument(tmp_path):
    def build(mode, labels, features):
        return model_fn(features, labels, mode)

    NPUEstimator(build, config=NPURunConfig(model_dir=tmp_path)).train(input_fn, steps=1)


def test_without_a_model_dir_a_new_one_is_made_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = NPUEstimator(model_fn, config=NPURunConfig()).model_dir
    name = os.path.basename(folder)
    assert os.path.dirname(folder) == str(tmp_path) and os.path.isdir(folder)
    assert name.startswith("model_dir_") and len(set(name[len("model_dir_") :])) == 10


def test_a_model_fn_must_fit_and_gets_what_it_names(tmp_path):
    config, seen = NPURunConfig(model_dir=str(tmp_path)), {}
    for bad in (None, lambda labels: None, lambda features, unknown: None):
        with pytest.raises(ValueError, match="model_fn"):
            NPUEstimator(bad, config=config)
    with pytest.raises(RuntimeError, match="EstimatorSpec"):
        NPUEstimator(lambda features: 1, config=config).train(input_fn, steps=1)

    def all_arguments(features, labels, mode, params, config, width):
        seen.update(mode=mode, params=dict(params), config=config, width=width)
        return model_fn(features, labels, mode)

    bound = functools.partial(all_arguments, width=3)
    NPUEstimator(bound, config=config, params={"depth": 4}).train(input_fn, steps=1)
    assert (seen["mode"], seen["params"]["depth"], seen["width"]) == (TRAIN, 4, 3)
    assert isinstance(seen["config"], NPURunConfig)


class Host:
    def call(self, loss):
        return loss


@pytest.mark.parametrize("function", [lambda loss: loss, Host().call], ids=["function", "method"])
def test_spec_keeps_its_host_call(function):
    spec = NPUEstimatorSpec(PREDICT, predictions=tf.constant(1.0), host_call=(function, [tf.constant(1.0)]))
    assert isinstance(spec, tf.estimator.EstimatorSpec)
    assert spec._host_call[0] is function
    assert spec._replace(predictions=tf.constant(2.0))._host_call[0] is function
    expected = [*inspect.signature(tf.estimator.EstimatorSpec.__new__).parameters, "host_call"]
    assert list(inspect.signature(NPUEstimatorSpec.__new__).parameters) == expected


@refuses(
    (1, ValueError),
    ((print,), ValueError),
    ((1, []), TypeError),
    ((print, 1), ValueError),
    ((lambda a, b: None, [1]), RuntimeError),
    says=["host_call"],
)
def test_bad_host_calls_are_refused(host_call):
    NPUEstimatorSpec(PREDICT, predictions=1, host_call=host_call)


def test_hooks_do_nothing_on_one_rank(tmp_path):
    hooks = [NPUBroadcastGlobalVariablesHook(0, 0), NPUBroadcastGlobalVariablesHook(), NpuEmptyHook()]
    config = NPURunConfig(model_dir=str(tmp_path))
    NPUEstimator(model_fn, config=config).train(input_fn, steps=1, hooks=hooks)
    NPUEstimator(model_fn, config=config).train(input_fn, steps=1, hooks=hooks)  # on a new graph


def minimized_by_keras(optimizer, loss, kernel):
    return optimizer.minimize(loss, [kernel])


def applied_by_keras(optimizer, loss, kernel):
    return optimizer.apply_gradients([(tf.gradients(loss, kernel)[0], kernel)])


@pytest.mark.parametrize("generation", ["", "legacy."])
@pytest.mark.parametrize("train", [minimized_by_keras, applied_by_keras])
def test_a_keras_optimizer_alone_says_how_to_train_with_it(train, generation, tmp_path):
    def keras_model_fn(features, labels, mode):
        kernel = tf1.get_variable("kernel", [4, 1], initializer=tf1.zeros_initializer())
        loss = tf.reduce_mean(tf.square(tf.matmul(features, kernel) - labels))
        optimizer = (tf.keras.optimizers.legacy if generation else tf.keras.optimizers).SGD(0.1)
        counted = tf1.assign_add(tf1.train.get_or_create_global_step(), 1)
        train_op = tf.group(train(optimizer, loss, kernel), counted)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    estimator = NPUEstimator(keras_model_fn, config=NPURunConfig(model_dir=str(tmp_path)))
    if generation and train is applied_by_keras:  # which does train in a graph
        estimator.train(input_fn, max_steps=2)
        assert np.any(estimator.get_variable_value("kernel"))
        return
    with pytest.raises(ValueError) as caught:
        estimator.train(input_fn, max_steps=2)
    for part in ("NPUEstimator: ", "Keras", "NPUOptimizer", "minimize(loss, global_step)", "tf.compat.v1.train"):
        assert part in str(caught.value)


def test_arguments_of_a_tpu_estimator_are_accepted_with_a_warning(tmp_path, caplog):
    config = NPURunConfig(model_dir=str(tmp_path))
    NPUEstimator(model_fn, config=config, use_tpu=True, train_batch_size=8)
    assert sum("train_batch_size, use_tpu" in line for line in caplog.messages) == 1
    with pytest.raises(TypeError, match="use_tpu"):
        NPUEstimator(model_fn, config=config, use_tpus=True)


STRATEGY = """
import sys
import numpy as np, tensorflow as tf
from npu_bridge.npu_init import *
from tests.documented.test_npu_estimator import input_fn
cpus = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)

def model_fn(features, labels, mode):
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(features, 1, kernel_initializer=tf.zeros_initializer()))
    train_op = tf.train.AdamOptimizer(0.1).minimize(loss, tf.train.get_or_create_global_step())
    return NPUEstimatorSpec(mode, loss=loss, train_op=train_op)

strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
config = NPURunConfig(model_dir=sys.argv[1], tf_random_seed=1, train_distribute=strategy)
estimator = NPUEstimator(model_fn, config=config)
start = estimator.train(input_fn, max_steps=1).evaluate(input_fn, steps=5)["loss"]
assert estimator.train(input_fn, max_steps=30).evaluate(input_fn, steps=5)["loss"] < start
"""


@pytest.mark.slow("a training on two devices of TensorFlow")
def test_a_strategy_of_two_devices_trains(warm_python, tmp_path):
    """Without a second device in its settings, a session would wait for ever."""
    (tmp_path / "script.py").write_text(STRATEGY)
    done = warm_python.run([tmp_path / "script.py", tmp_path / "model"], tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
