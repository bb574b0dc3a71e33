"""The same training under two versions of TensorFlow: its numbers, and checkpoints that go on under the other one.

Runs where the environments of two versions are there, as after `make venv` and `make venv TF=2.21`.
"""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
OTHERS = [
    python
    for python in sorted(REPOSITORY.glob(".venv*/bin/python"))
    if python.parent.parent.name != ".venv-tf115" and python.parent.parent != pathlib.Path(sys.prefix)
]
STEPS = 32  # two epochs: a training that goes on begins with the first batch
BOUND = 1e-5  # of the largest number of an array
pytestmark = pytest.mark.skipif(not OTHERS, reason="no environment with another TensorFlow is here")

OF_SESSIONS = """
import sys
import numpy as np
from npu_bridge.npu_init import *
from npu_bridge.optimizers import LAMB

folder, steps = sys.argv[1], int(sys.argv[2])


def input_fn():
    random = np.random.RandomState(0)
    features = random.randn(256, 12).astype("f")
    return tf.data.Dataset.from_tensor_slices((features, np.sin(features).sum(1))).repeat().batch(16)


def model_fn(features, labels, mode):
    hidden = features
    for seed, width in enumerate((32, 16)):
        start = tf.glorot_uniform_initializer(seed=seed)
        hidden = tf.layers.dense(hidden, width, tf.nn.relu, kernel_initializer=start)
    hidden = tf.layers.batch_normalization(hidden, training=True)
    predictions = tf.layers.dense(hidden, 1, kernel_initializer=tf.glorot_uniform_initializer(seed=2))
    loss = tf.losses.mean_squared_error(labels, tf.squeeze(predictions, 1))
    manager = ExponentialUpdateLossScaleManager(2.0**16, 4, 2, 2.0, 0.5)
    optimizer = NPUOptimizer(LAMB(0.02, weight_decay=0.01), manager, is_loss_scale=True)
    train_op = optimizer.minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.group(train_op, *tf.get_collection("update_ops")))


config = NPURunConfig(model_dir=folder, save_checkpoints_steps=100)
NPUEstimator(model_fn, config=config).train(input_fn, max_steps=steps)
reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(folder))
np.savez(sys.argv[3], **{name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()})
"""

OF_KERAS = """
import os, sys
import numpy as np
from npu_bridge.npu_init import *
import tensorflow as tf

folder, steps = sys.argv[1], int(sys.argv[2])
random = np.random.RandomState(0)
features = random.randn(16, 12).astype("f")
tf.keras.utils.set_random_seed(1)
layers = [tf.keras.layers.Dense(32, "relu"), tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)]
model = tf.keras.Sequential(layers)
manager = ExponentialUpdateLossScaleManager(2.0**16, 4, 2, 2.0, 0.5)
model.compile(npu_keras_optimizer(tf.keras.optimizers.Adam(0.01), manager), loss="mse")
model.build((None, 12))
model.optimizer.build(model.trainable_variables)
checkpoint = tf.train.Checkpoint(model=model)
if tf.train.latest_checkpoint(folder):
    checkpoint.restore(tf.train.latest_checkpoint(folder)).assert_consumed()
for _ in range(steps - int(model.optimizer.iterations)):
    model.train_on_batch(features, np.sin(features).sum(1))
checkpoint.save(os.path.join(folder, "model"))
variables = [*model.weights, *model.optimizer.variables]
np.savez(sys.argv[3], **{str(number): np.float64(variable.numpy()) for number, variable in enumerate(variables)})
"""
SCRIPTS = {"session": OF_SESSIONS, "keras": OF_KERAS}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains a script up to a step in a folder, under a Python; gives all variables, by name."""
    place = tmp_path_factory.mktemp("versions")
    for kind, text in SCRIPTS.items():
        (place / f"train_{kind}.py").write_text(text)

    numbers = itertools.count()

    @functools.cache
    def run(kind, *stages):
        """Each stage is a Python and the step up to which it trains."""
        name = f"{kind}{next(numbers)}"
        for python, steps in stages:
            command = [python, place / f"train_{kind}.py", place / name, str(steps), place / f"{name}.npz"]
            environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "2"}
            environment.pop("TF_USE_LEGACY_KERAS", None)
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
        with np.load(place / f"{name}.npz") as values:
            return dict(values)

    return run


def assert_alike(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        largest = np.max(np.abs(value), initial=1e-30)
        assert np.max(np.abs(found[name] - value), initial=0.0) <= BOUND * largest, name


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.parametrize("other", OTHERS, ids=lambda python: python.parent.parent.name)
def test_numbers_are_those_of_another_tensorflow(train, kind, other):
    assert_alike(train(kind, (sys.executable, STEPS)), train(kind, (str(other), STEPS)))


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.parametrize("other", OTHERS, ids=lambda python: python.parent.parent.name)
@pytest.mark.parametrize("is_here_first", [True, False], ids=["from here", "to here"])
def test_a_training_goes_on_under_another_tensorflow(train, kind, other, is_here_first):
    first, second = (sys.executable, str(other)) if is_here_first else (str(other), sys.executable)
    whole = train(kind, (sys.executable, STEPS))
    assert_alike(train(kind, (first, STEPS // 2), (second, STEPS)), whole)
