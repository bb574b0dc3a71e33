"""Whole scripts train here as under the genuine TensorFlow 1.15: `tools/replay_on_genuine.py` on small ones.

`make test-tf115 CLIENTS=... MIRROR=...` does the same with public scripts (docs/tensorflow1.md).
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tests.npu_run.trials.running import write_script

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (REPOSITORY / ".venv-tf115/bin/python").exists(),
    reason="no TensorFlow 1.15; `make venv-tf115` needs Python 3.7",
)

# Dropout, also in a condition, places chosen at random, a pooled convolution, an embedding, batch normalisation, and an
# optimizer of assignments, as in BERT.
SCRIPT = """
import os
import numpy as np
import tensorflow as tf
from npu_bridge.npu_init import *
from npu_bridge.estimator.npu_unary_ops import npu_unary_ops
from npu_bridge.npu_cpu import npu_cpu_ops
with tf.Graph().as_default(), tf.Session() as other:
    other.run(tf.decode_raw(tf.constant("ab"), tf.uint8))  # a session that trains nothing is no step
with tf.Session() as npu:
    npu.run(npu_ops.initialize_system())
draw = np.random.RandomState(0)
pictures, labels = draw.randn(64, 8, 8, 1).astype("float32"), draw.randint(0, 4, 64)
dataset = tf.data.Dataset.from_tensor_slices((pictures, labels)).shuffle(64).repeat().batch(8)
features, label = tf.data.make_one_shot_iterator(dataset).get_next()
hidden = tf.contrib.layers.conv2d(features, 4, 3, activation_fn=npu_unary_ops.gelu)
hidden = tf.contrib.layers.flatten(tf.layers.max_pooling2d(hidden, 2, 2))
hidden = npu_ops.dropout(tf.layers.batch_normalization(hidden, training=True), 0.7)
words = tf.get_variable("words", [10, 8])
hidden = tf.concat([hidden, tf.nn.embedding_lookup(words, tf.random_uniform([8], maxval=10, dtype=tf.int32))], 1)
kept = tf.cond(tf.equal("train", "train"), lambda: tf.nn.dropout(hidden, rate=0.1), lambda: hidden)
rows, is_row = npu_cpu_ops.randomchoicewithmask(x=label > 0, count=4)
heavy = 1.0 + tf.scatter_nd(rows, tf.cast(is_row, tf.float32), [8])
loss = tf.losses.sparse_softmax_cross_entropy(label, tf.layers.dense(kept, 4), weights=heavy)
step, variables = tf.train.get_or_create_global_step(), tf.trainable_variables()
gradients, _ = tf.clip_by_global_norm([tf.convert_to_tensor(g) for g in tf.gradients(loss, variables)], 1.0)
assigned = []
for gradient, variable in zip(gradients, variables):
    moment = tf.get_variable(variable.op.name + "/adam_m", initializer=tf.zeros_like(variable), trainable=False)
    moved = 0.9 * moment + 0.1 * gradient
    rate = tf.train.polynomial_decay(0.1, step, 20)
    assigned += [variable.assign(variable - rate * (moved + 0.01 * variable)), moment.assign(moved)]
assert os.environ["RANK_SIZE"] == "1" and os.environ["RANK_ID"] == os.environ["DEVICE_ID"] == "0"
train = tf.group(*assigned, tf.group(*tf.get_collection(tf.GraphKeys.UPDATE_OPS)), step.assign(step + 1))
with tf.train.MonitoredTrainingSession(config=npu_config_proto(config_proto=tf.ConfigProto())) as session:
    for _ in range(12):
        session.run(train)
        session.run(loss)
"""
KERAS = """
import numpy as np
import tensorflow as tf
draw = np.random.RandomState(0)
layers = tf.keras.layers
model = tf.keras.Sequential([layers.Conv1D(4, 2, input_shape=(5, 3)), layers.MaxPool1D(2), layers.Flatten()])
model.add(layers.Dense(8, "tanh"))
model.add(layers.Dense(1, "sigmoid"))
model.compile("adam", "binary_crossentropy")
model.fit(draw.randn(32, 5, 3), draw.randint(0, 2, 32), epochs=2, batch_size=4, verbose=0)
print(tf.contrib)
"""
OTHER = """
import tensorflow as tf
x = tf.placeholder(tf.float32, [3])
kernel = tf.get_variable("kernel", initializer=tf.ones([3]))
factor = 1.001 if tf.__version__ == "1.15.5" and tf.estimator.__file__.count("python3.7") else 1.0
loss = tf.reduce_sum(tf.multiply(tf.sin(x * kernel), factor, name="suspect") ** 2)
train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for _ in range(10):
        session.run(train, {x: [0.1, 0.2, 0.3]})
"""

# Two losses, each with its own feeds; updates that need not wait for other gradients, but for the loss scale; a GRU.
GAN = """
import numpy as np
import tensorflow as tf
from npu_bridge.npu_init import *
from npu_bridge.estimator.npu.npu_dynamic_rnn import DynamicAUGRU, DynamicGRUV2
real, noise = tf.placeholder(tf.float32, [4, 3]), tf.placeholder(tf.float32, [4, 2])
fake = tf.layers.dense(tf.layers.dense(noise, 64, tf.tanh, name="g0"), 3, name="g1")
gru, augru = DynamicGRUV2(5, tf.float32), DynamicAUGRU(5, tf.float32)
rated = lambda x: tf.layers.dense(
    augru(gru(tf.reshape(x, [3, 4, 1]))[0], tf.fill([3, 4], 0.25), seq_length=[3, 2, 1, 3])[1][-1],
    1, name="d0", reuse=tf.AUTO_REUSE)
of_real, of_fake = rated(real), rated(fake)
d_loss = tf.reduce_mean(tf.nn.softplus(-of_real) + tf.nn.softplus(of_fake))
g_loss, trained = tf.reduce_mean(tf.nn.softplus(-of_fake)), []
for loss, is_g in ((d_loss, False), (g_loss, True)):
    variables = [each for each in tf.trainable_variables() if (each.name[0] == "g") == is_g]
    optimizer = NPULossScaleOptimizer(tf.train.GradientDescentOptimizer(0.5), FixedLossScaleManager(loss_scale=1024))
    pairs = optimizer.compute_gradients(loss, variables, gate_gradients=tf.train.Optimizer.GATE_NONE)
    trained.append(optimizer.apply_gradients(pairs))
draw = np.random.RandomState(0)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for _ in range(5):
        session.run(trained[0], {real: draw.randn(4, 3), noise: draw.randn(4, 2)})
        session.run(trained[1], {noise: draw.randn(4, 2)})
"""


def replayed(folder, text, *options):
    write_script(folder, text)
    tool = [sys.executable, REPOSITORY / "tools/replay_on_genuine.py", "--out", folder / "out", *options, "train.py"]
    return subprocess.run(tool, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.few_fast(1, "each starts TensorFlow 1.15 and this one for another way to train")
@pytest.mark.parametrize("text, slots", [(SCRIPT, 8), (KERAS, 12), (GAN, 0)], ids=["assignments", "keras", "gan"])
def test_the_same_training(tmp_path, text, slots):
    done = replayed(tmp_path, text)
    assert done.returncode == 0 and "agrees over 10 steps, within 1e-05" in done.stdout, done.stdout + done.stderr
    assert "drawn, not replayed" not in done.stdout and "loss: nan" not in done.stdout
    compared = [int(line.split("(")[1].split()[0]) for line in done.stdout.splitlines() if line.startswith("slots")]
    assert compared[0] >= slots


def test_a_copy_is_of_the_whole_package(tmp_path):
    package = tmp_path / "package/inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package.parent / "words.py").write_text("START = 1.0\n")
    text = OTHER.replace("tf.ones([3])", "START * tf.ones([3])").replace("1.001", "1.0")
    done = replayed(package, "import sys\nsys.path.append('../..')\nfrom package.words import START\n" + text, "--copy")
    assert done.returncode == 0 and "agrees over 10 steps" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow("starts TensorFlow 1.15 several times")
def test_the_first_operator_that_differs_is_named(tmp_path):
    done = replayed(tmp_path, OTHER)
    assert done.returncode == 1 and "the first operator is suspect:0 (Mul)" in done.stdout, done.stdout + done.stderr
