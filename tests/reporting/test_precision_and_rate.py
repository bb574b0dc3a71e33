"""The precision and the learning rate in a progress line, and the scalar for TensorBoard."""

from __future__ import annotations

import io

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_config import ExperimentalConfig, NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.gradients.collections import LEARNING_RATE
from npu_bridge.reporting import ProgressHook
from npu_bridge.session.precision import PrecisionSummaryHook
from tests.goldens.two_layers import OPTIMIZERS, TwoLayers, tf1, token_batches
from tests.reporting.stepping import Clock
from tests.reporting.test_tensorboard import curves

TAG = PrecisionSummaryHook.TAG


def model_fn(features, labels, mode, params):
    kernel = tf1.get_variable("kernel", [8, 4], initializer=tf1.random_normal_initializer(stddev=0.5, seed=1))
    loss = tf.reduce_mean(tf.square(tf.matmul(features, kernel) - labels))
    step = tf1.train.get_global_step()
    rate = tf1.train.piecewise_constant(step, [3], [0.25, 0.125]) if params["steps_down"] else 0.5
    optimizer = NPUOptimizer(tf1.train.MomentumOptimizer(rate, 0.9), FixedLossScaleManager(1024), is_loss_scale=True)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, step))


def input_fn():
    random = np.random.RandomState(0)
    return tf.data.Dataset.from_tensors((random.randn(8, 8).astype("f"), random.randn(8, 4).astype("f"))).repeat()


def train(folder, save_summary_steps=2, plan="fast|step|0.5", **options):
    out = io.StringIO()
    config = NPURunConfig(
        model_dir=str(folder),
        save_summary_steps=save_summary_steps,
        experimental_config=ExperimentalConfig(accelerate_train_mode=plan),
        **options,
    )
    hook = ProgressHook(total_steps=8, every_n_steps=1, stream=out, clock=Clock(per_look=1.0))
    params = {"steps_down": plan is not None}
    NPUEstimator(model_fn, config=config, params=params).train(input_fn, hooks=[hook], max_steps=8)
    return out.getvalue().splitlines()


def test_an_accelerated_training(tmp_path):
    lines = train(tmp_path)
    assert [line.split(" | ")[1] for line in lines] == ["float16"] * 4 + ["float32"] * 4
    rates = [part for line in lines for part in line.split(" | ") if part.startswith("learning rate")]
    assert rates == ["learning rate 0.25"] * 4 + ["learning rate 0.125"] * 4
    assert " | loss scale 2^10 | " in lines[0]
    # Every second step, and where it changes.
    assert curves(tmp_path)[TAG] == {1: 1.0, 3: 1.0, 5: 0.0, 7: 0.0}


def test_the_change_is_written_when_it_comes(tmp_path):
    train(tmp_path, save_summary_steps=100)
    assert curves(tmp_path)[TAG] == {1: 1.0, 5: 0.0}


def test_a_training_without_a_switch_writes_no_scalar(tmp_path):
    lines = train(tmp_path / "plain", plan=None)
    assert lines[0].startswith("step 1/8 (12 %) | loss ") and " | learning rate 0.5 | " in lines[0]
    lines = train(tmp_path / "mixed", plan=None, precision_mode_v2="mixed_float16")
    assert lines[0].startswith("step 1/8 (12 %) | float16 | loss ")
    assert TAG not in curves(tmp_path / "plain") and TAG not in curves(tmp_path / "mixed")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_family_tells_its_rate(name, graph):
    model = TwoLayers()
    optimizer = NPUOptimizer(OPTIMIZERS[name](), FixedLossScaleManager(8.0), is_loss_scale=True)
    train_op = optimizer.apply_gradients(optimizer.compute_gradients(model.loss))
    (rate,) = tf1.get_collection(LEARNING_RATE)
    if isinstance(rate, float):
        assert rate == 0.1
        return
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        feed = {model.tokens: token_batches(1)[0]}
        assert session.run([train_op, rate], feed)[1] == np.float32(0.1)
