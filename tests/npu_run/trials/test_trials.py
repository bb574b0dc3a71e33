"""The effects of a trial on scripts that know nothing of it: seeds, initial weights, history, folders, the end."""

from __future__ import annotations

import json
import math
import os
import signal
import sys

import numpy as np
import pytest

from npu_bridge.reporting.history import HISTORY_FILE, History
from npu_run.trials.acceptance import Float32Band
from npu_run.trials.seeds import seed_of_rank
from npu_run.trials.trial import SEED, Trial, _run_with_log
from tests.npu_run.launching import LIMIT_SECS, write_script
from tests.npu_run.trials.running import losses_in
from tests.reporting.test_page import write_history

# Nothing has a seed, the loss is in no collection, and there is no global step.
SESSION = """
import random, sys
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
data = np.random.RandomState(0).randn(32, 8).astype("float32")
hidden = tf.nn.dropout(tf.layers.dense(data, 4, tf.nn.relu), rate=0.3)
loss = tf.reduce_mean(tf.square(tf.reduce_sum(hidden, 1) - 1.0))
train = tf.train.AdamOptimizer(0.01).minimize(loss)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    print("weights", session.run("dense/kernel:0").tolist())
    for _ in range(6):
        session.run(train)
    print("after", session.run("dense/kernel:0").sum(), random.random(), np.random.rand())
"""

ESTIMATOR = """
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()

def data():
    features = np.random.RandomState(0).randn(64, 4).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((features, features.sum(axis=1))).shuffle(64).repeat().batch(8)

def model(features, labels, mode):
    loss = tf.losses.mean_squared_error(labels, tf.squeeze(tf.layers.dense(features, 1), 1))
    train = tf.train.AdamOptimizer(0.05).minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train)

for name in ("one", "other"):
    estimator = tf.estimator.Estimator(model, "out/" + name)
    estimator.train(data, max_steps=5)
    print("went to", tf.estimator.Estimator(model, "out/" + name).model_dir)
"""

KERAS = """
import numpy as np
import tensorflow as tf
features = np.random.RandomState(0).randn(64, 4).astype("float32")
model = tf.keras.Sequential([tf.keras.layers.Dense(8, "relu"), tf.keras.layers.Dense(1)])
for _ in range(2):
    model.compile("adam", "mse")  # an optimizer begins anew, but not the training
    model.fit(features, features.sum(1), batch_size=8, verbose=0, shuffle=False)
"""

# One CallbackList serves both calls of `fit`, and the optimizer of `compile` makes no update.
OWN_OPTIMIZER = """
import numpy as np
import tensorflow as tf
features = np.random.RandomState(0).randn(64, 4).astype("float32")
class Model(tf.keras.Sequential):
    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(batch[0])[:, 0] - batch[1]))
        self.own.apply_gradients(zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights))
        return {"loss": loss}
model = Model([tf.keras.layers.Dense(8, "relu"), tf.keras.layers.Dense(1)])
model.own = tf.keras.optimizers.Adam()
model.compile()
watch = tf.keras.callbacks.CallbackList([], model=model)
for _ in range(2):
    model.fit(features, features.sum(1), batch_size=8, verbose=0, shuffle=False, callbacks=watch)
"""


def test_seeds_are_pinned_and_shifted(trials, tmp_path):
    script = write_script(tmp_path, SESSION)
    printed = []
    for number, shift in enumerate((0, 0, 1)):
        assert trials.run(Trial(folder=str(tmp_path / str(number)), seed=shift), [str(script)]) == 0, trials.printed
        printed.append([line for line in trials.printed.splitlines() if line.startswith(("weights", "after"))])
    assert printed[0] == printed[1]
    assert losses_in(tmp_path / "0") == losses_in(tmp_path / "1") and len(losses_in(tmp_path / "0")) == 6
    assert printed[0][0] != printed[2][0] and losses_in(tmp_path / "0") != losses_in(tmp_path / "2")
    # Python's and numpy's own numbers, too.
    assert not {*printed[0][1].split()[2:]} & {*printed[2][1].split()[2:]}


def test_a_rank_draws_other_numbers(trials, tmp_path, monkeypatch):
    text = SESSION.partition("    for _ in")[0] + "print('drawn', random.random(), np.random.rand())\n"
    script, drawn = write_script(tmp_path, text), []
    for rank in ("0", "1"):
        for name, number in {"RANK": rank, "SIZE": "2", "LOCAL_RANK": rank, "LOCAL_SIZE": "2"}.items():
            monkeypatch.setenv(f"HOROVOD_{name}", number)
        assert trials.run(Trial(folder=str(tmp_path / rank), seed=0), [str(script)]) == 0, trials.printed
        drawn.append(trials.printed.split())
    assert drawn[0][0] == "weights" and drawn[0][-3] == "drawn"
    assert not set(drawn[0]) & set(drawn[1]) - {"weights", "drawn"}


def test_each_rank_of_each_repeat_has_a_seed_of_its_own():
    seeds = [seed_of_rank(rank) + shift for rank in range(16) for shift in range(100)]
    assert len(set(seeds)) == len(seeds)


def test_a_seed_of_the_script_is_kept_and_shifted(trials, tmp_path):
    seeded = SESSION.replace("data =", f"tf.set_random_seed({SEED + 1})\ndata =", 1)
    seeded_too = SESSION.replace("data =", f"tf.set_random_seed({SEED})\ndata =", 1)
    for number, (text, shift) in enumerate(((seeded, 0), (seeded_too, 1))):
        script = write_script(tmp_path, text, f"script_{number}.py")
        assert trials.run(Trial(folder=str(tmp_path / str(number)), seed=shift), [str(script)]) == 0, trials.printed
    # Operators take (graph seed, own seed); the shift is one of the first.
    assert losses_in(tmp_path / "0") == losses_in(tmp_path / "1")


def test_initial_weights_are_rounded_otherwise(trials, tmp_path):
    script = write_script(tmp_path, SESSION)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    for draw, folder in enumerate((first, second)):
        assert trials.run(Trial(folder=folder, seed=0, rounding=draw), [str(script)]) == 0, trials.printed
    losses = np.array([losses_in(first), losses_in(second)])
    assert (losses[0] != losses[1]).any() and np.allclose(*losses, rtol=1e-5, atol=0)


def test_a_rounding_is_one_step_of_the_dtype_at_most():
    from npu_run.trials.hooks import round_at_random

    for dtype in (np.float32, np.float64, np.float16):
        value = np.array([0.0, 1.0, -2.5, 1e-3, 6e4] * 40, dtype)
        changed = round_at_random(value, 1, "kernel")
        apart = np.abs(changed - value) / np.spacing(np.abs(value))
        assert changed.dtype == dtype and apart.max() <= 1 and (changed != value).sum() > 60
        assert (changed[value == 0] == 0).all()
        assert (changed == round_at_random(value, 1, "kernel")).all()
        assert (changed != round_at_random(value, 2, "kernel")).any()


def test_estimators_write_to_the_folder_of_the_trial(trials, tmp_path):
    folder = tmp_path / "trial"
    assert trials.run(Trial(folder=str(folder), seed=0), [str(write_script(tmp_path, ESTIMATOR))]) == 0, trials.printed
    assert (folder / "checkpoint").exists() and (folder / "2" / "checkpoint").exists()
    assert not (tmp_path / "out").exists()
    assert trials.printed.count(f"went to {folder}\n") == trials.printed.count(f"went to {folder}/2\n") == 1
    losses = losses_in(folder)
    assert len(losses) == 5 and losses[0] > losses[-1]


@pytest.mark.slow("sessions are watched in the same way")
@pytest.mark.parametrize("text", [KERAS, OWN_OPTIMIZER], ids=["compiled", "own optimizer"])
def test_a_fit_is_watched(trials, tmp_path, text):
    script = write_script(tmp_path, text)
    for draw in (0, 1):
        trial = Trial(folder=str(tmp_path / str(draw)), seed=0, rounding=draw)
        assert trials.run(trial, [str(script)]) == 0, trials.printed
    losses = [losses_in(tmp_path / "0"), losses_in(tmp_path / "1")]
    assert [row.step for row in History(str(tmp_path / "0" / HISTORY_FILE)).rows] == [*range(1, 17)]
    assert losses[0] != losses[1] and np.allclose(*losses, rtol=1e-5)
    assert trials.run(Trial(folder=str(tmp_path / "short"), seed=0, steps=10), [str(script)]) == 0, trials.printed
    assert losses_in(tmp_path / "short") == losses[0][:10]


OF_NPU = ESTIMATOR.replace('tf.estimator.Estimator(model, "out/" + name)', "NPUEstimator(model, config=config)")
OF_NPU = OF_NPU.replace("import numpy", "from npu_bridge.npu_init import NPUEstimator, NPURunConfig\nimport numpy", 1)
OF_NPU = OF_NPU.replace("for name in", 'config = NPURunConfig(model_dir="out", iterations_per_loop=5)\nfor name in')


@pytest.mark.few_fast(1, "other ways to train")
@pytest.mark.parametrize("text", [SESSION, ESTIMATOR, OF_NPU], ids=["session", "estimator", "npu"])
def test_a_script_is_ended_after_some_steps(trials, tmp_path, text):
    folder = tmp_path / "trial"
    trial = Trial(folder=str(folder), seed=0, steps=2, operators=str(tmp_path / "operators.json"))
    imposed = {"iterations_per_loop": 1}
    assert trials.run(trial, [str(write_script(tmp_path, text))], imposed) == 0, trials.printed
    assert len(losses_in(folder)) == 2 and all(map(math.isfinite, losses_in(folder)))
    listed = {each["name"]: each for each in json.loads((tmp_path / "operators.json").read_text())}
    assert listed["dense/MatMul"]["type"] == "MatMul" and "tf.layers.dense" in listed["dense/MatMul"]["where"]
    assert listed["gradients/dense/MatMul_grad/MatMul"]["where"] == ""
    assert not any("Assign" in each["type"] or "Apply" in each["type"] for each in listed.values())


def test_a_run_that_ends_early_is_not_judged_by_the_steps_that_it_has(tmp_path):
    for name, losses in {"first": [5.0, 4.0, 3.0], "second": [5.0, 4.0, 3.0], "whole": [5.0, 4.0, 3.0001]}.items():
        write_history(tmp_path / name, losses)
    write_history(tmp_path / "short", [5.0, 4.0])
    band = Float32Band([str(tmp_path / "first"), str(tmp_path / "second")], 0.01)
    assert band.judge_run(str(tmp_path / "whole"))[0]
    assert band.judge_run(str(tmp_path / "short")) == (False, "it trained 2 of 3 steps")


def test_a_run_with_a_log_ends_with_its_script_and_not_with_what_the_script_leaves_behind(tmp_path):
    left = ["sh", "-c", f"sleep {LIMIT_SECS}; touch {tmp_path}/ended"]
    start = f"subprocess.Popen({left}, start_new_session=True)"
    script = f"import os, subprocess; print({start}.pid, 'x' * 60000, flush=True); os._exit(3)"
    assert _run_with_log([sys.executable, "-c", script], os.environ, str(tmp_path / "log")) == 3
    process, text = (tmp_path / "log").read_text().split()
    assert not (tmp_path / "ended").exists() and len(text) == 60000
    os.killpg(int(process), signal.SIGKILL)
