"""The same training under two versions of TensorFlow: its numbers, and checkpoints that resume under the other one.

Small trainings of an Estimator and of Keras, on one rank and on two, and the BERT of the examples on two.

Runs where the environments of two versions are there, as after `make venv` and `make venv TF=2.21`.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.base.environment import RANK_VARIABLES
from tests.npu_run.launching import needs_horovod

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
OTHERS = [
    python
    for python in sorted(REPOSITORY.glob(".venv*/bin/python"))
    if python.parent.parent.name != ".venv-tf115" and python.parent.parent != pathlib.Path(sys.prefix)
]
STEPS = 32  # two epochs: a resumed training begins with the first batch
BERT_STEPS = 50
BOUND = 1e-5  # of the largest number of an array
# Kernels of 2.15 and 2.21 add up in other orders. Over 50 steps of configs/bert_tiny.toml, written in plain TensorFlow
# without this package, one bias came 8e-6 apart with LAMB, slots 5e-6, all other weights 2e-6, and losses 2e-7.
BOUND_OF_BERT = 2e-5
WITHOUT_EFFECT = "attention/key/bias"  # a softmax does not notice it: its gradient is zero but for rounding
pytestmark = [
    pytest.mark.slow("trains under every TensorFlow that is here"),
    pytest.mark.skipif(not OTHERS, reason="no environment with another TensorFlow is here"),
]

OF_SESSIONS = """
import sys
import numpy as np
from npu_bridge.npu_init import *
from npu_bridge.optimizers import LAMB

folder, steps = sys.argv[1], int(sys.argv[2])
ranks, rank = get_rank_size(), get_rank_id()


def input_fn():
    random = np.random.RandomState(0)
    features = random.randn(256, 12).astype("f")
    rows = tf.data.Dataset.from_tensor_slices((features, np.sin(features).sum(1))).repeat()
    return rows.shard(ranks, rank).batch(16 // ranks)


def model_fn(features, labels, mode):
    hidden = features
    for seed, width in enumerate((32, 16)):
        start = tf.glorot_uniform_initializer(seed=seed)
        hidden = tf.layers.dense(hidden, width, tf.nn.relu, kernel_initializer=start)
    hidden = tf.layers.batch_normalization(hidden, training=True)
    predictions = tf.layers.dense(hidden, 1, kernel_initializer=tf.glorot_uniform_initializer(seed=2))
    loss = tf.losses.mean_squared_error(labels, tf.squeeze(predictions, 1))
    manager = ExponentialUpdateLossScaleManager(2.0**16, 4, 2, 2.0, 0.5)
    optimizer = NPUOptimizer(LAMB(0.02, weight_decay=0.01), manager, is_distributed=True, is_loss_scale=True)
    train_op = optimizer.minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.group(train_op, *tf.get_collection("update_ops")))


config = NPURunConfig(model_dir=folder, save_checkpoints_steps=100)
NPUEstimator(model_fn, config=config).train(input_fn, max_steps=steps)
"""

OF_KERAS = """
import os, sys
import numpy as np
from npu_bridge.npu_init import *
import tensorflow as tf

folder, steps = sys.argv[1], int(sys.argv[2])
random = np.random.RandomState(0)
features = random.randn(16, 12).astype("f")[get_rank_id() :: get_rank_size()]
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
if get_rank_id() == 0:
    checkpoint.save(os.path.join(folder, "model"))
"""
SCRIPTS = {"session": OF_SESSIONS, "keras": OF_KERAS}

BERT = REPOSITORY / "examples/bert_pretrain/train.py"
BERT_SIZE = """
[model]
vocab_size = 512
hidden_size = 64
num_layers = 2
num_heads = 2
ffn_size = 128
max_positions = 32

[training]
train_batch_size = 8
max_seq_length = 32
num_train_steps = 50
learning_rate = 0.02
warmup_share = 0.1
weight_decay_rate = 0.01
save_checkpoints_steps = 100
"""


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains up to a step in a folder, under a Python; gives all variables of the last checkpoint, by name."""
    place = tmp_path_factory.mktemp("versions")
    for kind, text in SCRIPTS.items():
        (place / f"train_{kind}.py").write_text(text)
    (place / "size.toml").write_text(BERT_SIZE)
    # Text that ships with Python would be another one under another Python.
    of_bert = [BERT, f"--config={place}/size.toml", f"--corpus={REPOSITORY}/docs/stages.md", "--num_eval_batches=0"]
    environment = {name: text for name, text in os.environ.items() if name not in RANK_VARIABLES}
    environment |= {"PYTHONPATH": str(REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment.pop("TF_USE_LEGACY_KERAS", None)
    numbers = itertools.count()

    @functools.cache
    def run(kind, *stages, ranks=1):
        """Each stage is a Python and the step up to which it trains."""
        folder = place / f"{kind}{next(numbers)}"
        for python, steps in stages:
            command = [place / f"train_{kind}.py", folder, str(steps)]
            if kind == "bert":
                command = [*of_bert, f"--output_dir={folder}", f"--num_train_steps={steps}"]
            job = ["-m", "npu_bridge.run", "-np", str(ranks)] if ranks > 1 else []
            how = {"cwd": place, "env": environment, "capture_output": True, "text": True, "timeout": 600}
            done = subprocess.run([python, *job, *command], **how, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
        return read_values(folder)

    return run


def read_values(folder):
    """All variables of the newest checkpoint, and the losses of all steps where there is a history."""
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(folder))
    kinds = reader.get_variable_to_dtype_map()
    kept = [name for name in kinds if kinds[name] != tf.string and not name.startswith("save_counter")]
    values = {name: np.asarray(reader.get_tensor(name), np.float64) for name in kept}
    history = folder / "history.jsonl"
    if history.exists():
        rows = map(json.loads, history.read_text().splitlines())
        values["losses"] = np.array([row["loss"] for row in rows if "step" in row])
    return values


def assert_alike(found, expected, bound=BOUND):
    assert set(found) == set(expected)
    for name, value in expected.items():
        largest = np.max(np.abs(value), initial=1e-30)
        apart = np.max(np.abs(found[name] - value), initial=0.0)
        if WITHOUT_EFFECT in name:
            assert max(largest, apart) < 1e-5, name
        else:
            assert apart <= bound * largest, f"{name} is {apart / largest:.2g} off"


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.parametrize("other", OTHERS, ids=lambda python: python.parent.parent.name)
def test_numbers_are_those_of_another_tensorflow(train, kind, other):
    assert_alike(train(kind, (sys.executable, STEPS)), train(kind, (str(other), STEPS)))


@pytest.mark.ranks(2)
@needs_horovod
@pytest.mark.parametrize("kind", [*SCRIPTS, "bert"])
@pytest.mark.parametrize("other", OTHERS, ids=lambda python: python.parent.parent.name)
def test_numbers_of_two_ranks_are_those_of_another_tensorflow(train, kind, other):
    if not any(other.parent.parent.glob("lib/python*/site-packages/horovod")):
        pytest.skip("the other environment has no Horovod")
    steps, bound = (BERT_STEPS, BOUND_OF_BERT) if kind == "bert" else (STEPS, BOUND)
    here, there = (train(kind, (python, steps), ranks=2) for python in (sys.executable, str(other)))
    assert_alike(here, there, bound)


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.parametrize("other", OTHERS, ids=lambda python: python.parent.parent.name)
@pytest.mark.parametrize("is_here_first", [True, False], ids=["from here", "to here"])
def test_a_training_goes_on_under_another_tensorflow(train, kind, other, is_here_first):
    first, second = (sys.executable, str(other)) if is_here_first else (str(other), sys.executable)
    whole = train(kind, (sys.executable, STEPS))
    assert_alike(train(kind, (first, STEPS // 2), (second, STEPS)), whole)
