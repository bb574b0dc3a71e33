"""`npu-run bisect` on a small network in which a value leaves the range of float16."""

from __future__ import annotations

import json

import pytest

from npu_run.bisect import bisect
from tests.npu_run.launching import write_script

# Behind the product `loud` values are beyond 65504 until `quiet` brings them back: both have to be float32.
FRAGILE = """
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
draw = np.random.RandomState(0)
value = tf.constant(draw.randn(64, 16), tf.float32)
for layer in range(1):
    with tf.variable_scope(f"layer_{layer}"):
        value = tf.nn.relu(tf.matmul(value, tf.get_variable("w", [16, 16])))
with tf.variable_scope("energy"):
    loud = tf.matmul(value, tf.ones([16, 16]) * 3e4, name="loud")
    quiet = tf.matmul(loud, tf.eye(16) * 3e-5, name="quiet")
with tf.variable_scope("head"):
    out = tf.matmul(quiet, tf.get_variable("v", [16, 1]))
loss = tf.reduce_mean(tf.square(out - draw.randn(64, 1)))
train = tf.train.GradientDescentOptimizer(1e-4).minimize(loss, tf.train.get_or_create_global_step())
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for _ in range(100):
        session.run(train)
"""


def test_the_fragile_operators_are_found_and_a_search_goes_on(command, trials, tmp_path):
    write_script(tmp_path, FRAGILE)
    arguments = ["--low", "allow_mix_precision", "--steps", "3", "train.py"]
    code, output = command(bisect, "--max-runs", 6, *arguments)
    assert code == 0 and "not the smallest set: 6 runs are the limit" in output, output
    assert trials.runs == 6

    code, output = command(bisect, *arguments)
    assert code == 0 and "resumes after 3 runs" in output and trials.runs < 25, output
    kept = [line.partition("::")[0] for line in (tmp_path / "bisect" / "kept.txt").read_text().splitlines()]
    assert kept == ["energy/loud", "energy/quiet"], output
    assert "must stay float32 (the smallest set" in output
    assert "with keep_dtype_scope():  # train.py:11, makes energy/loud" in output
    assert 'loud = tf.matmul(value, tf.ones([16, 16]) * 3e4, name="loud")' in output
    mixlist = json.loads((tmp_path / "bisect" / "mixlist.json").read_text())
    assert mixlist == {"black-list": {"to-add": ["MatMul"]}} and "it passes, too" in output

    before = trials.runs
    assert command(bisect, *arguments)[0] == 0 and trials.runs == before  # all is known
    code, output = command(bisect, *arguments[:-2], "4", "train.py")
    assert code == 2 and "holds another search. Expected the same steps" in output


def test_what_is_robust_keeps_nothing(command, trials, tmp_path):
    robust = FRAGILE.replace("3e4", "1.0").replace("3e-5", "1.0")
    write_script(tmp_path, robust)
    code, output = command(bisect, "--steps", 3, "train.py")
    assert code == 0 and "none of" in output and "passes as it is" in output, output
    assert trials.runs == 4


def test_a_script_without_training_is_an_error(command, tmp_path):
    write_script(tmp_path, "print('nothing')")
    code, output = command(bisect, "train.py")
    assert code == 2 and "no run of a session was a training step" in output
    write_script(tmp_path, "raise SystemExit(5)")
    code, output = command(bisect, "--out", "other", "train.py")
    assert code == 2 and "exit code 5 in float32" in output


# A product of batches, whose values are beyond 65504 until the next layer brings them back.
FIT = """
import numpy as np
import tensorflow as tf
import keras

class Loud(keras.layers.Layer):
    def call(self, values):
        return tf.matmul(values[:, None, :], tf.ones([tf.shape(values)[0], 16, 16]) * 1e5)[:, 0] * 1e-5

draw = np.random.RandomState(0)
model = keras.Sequential([keras.layers.Input([16]), Loud(), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(1e-4), "mse", **({"jit_compile": False} if keras.__version__ > "3" else {}))
model.fit(draw.randn(64, 16).astype("float32"), draw.randn(64), batch_size=16, epochs=3, verbose=0, shuffle=False)
"""


@pytest.mark.slow("a search; the one through sessions takes the same way")
def test_the_fragile_types_of_a_fit_are_found(command, trials, tmp_path):
    write_script(tmp_path, FIT)
    code, output = command(bisect, "--steps", 3, "train.py")
    assert code == 0 and "must stay float32 (the smallest set" in output, output + trials.printed
    mixlist = json.loads((tmp_path / "bisect" / "mixlist.json").read_text())
    assert mixlist == {"black-list": {"to-add": ["BatchMatMulV2"]}}, output
    code, output = command(bisect, "--out", "other", "--low", "force_fp16", "--steps", 3, "train.py")
    assert code == 2 and "in model.fit only types of operators can be kept" in output
