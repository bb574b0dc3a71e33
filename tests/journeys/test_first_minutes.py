"""The output for a new user before the first step, of our examples at most three lines, and no noise after it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import time

import pytest
import tensorflow as tf

from npu_bridge.base import tensorflow_start
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from tests.journeys.test_readme import EXAMPLES, REPOSITORY

# Variables that TensorFlow reads when it is loaded, and those that tests set for themselves.
QUIET = ("TF_CPP_MIN_LOG_LEVEL", "TFA_NO_EOL_NOTICE", "PYTHONWARNINGS", "NPU_BRIDGE_VERBOSE")
MOST_LINES = 3
PROGRAMS = {
    "digits/train_estimator.py": (["--steps=2", "--output_dir=out"], r"step 1/2"),
    "digits/train_session.py": (["--steps=10", "--save_steps=10", "--output_dir=out"], r"step 10/10"),
    "keras_fit/train.py": (["--steps=2", "--output_dir=out"], r"step 1/2"),
    "accelerate/train.py": (["--steps=10", "--output_dir=out"], r"step 1/10"),
    "bert_pretrain/train.py": (["--num_train_steps=2", "--num_eval_batches=0", "--output_dir=out"], r"step 1/2"),
}


tf1 = tf.compat.v1


def lines_of(command, folder, code=0, **variables):
    environment = {name: text for name, text in os.environ.items() if name not in QUIET}
    environment["PYTHONPATH"] = str(REPOSITORY)
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stdout[-6000:]
    return done.stdout.splitlines()


def before_first_step(lines, first_step):
    assert not any("Traceback" in line for line in lines)
    number = next((number for number, line in enumerate(lines) if re.search(first_step, line)), None)
    assert number is not None, lines
    return lines[:number]


def npu_run(ranks):
    return [sys.executable, "-m", "npu_bridge.run", "-np", str(ranks)]


@pytest.mark.few_fast(["bert_pretrain/train.py"], "the other examples have tests of their own")
@pytest.mark.parametrize("program", PROGRAMS)
def test_examples_on_one_process(program, tmp_path):
    arguments, first_step = PROGRAMS[program]
    lines = lines_of([sys.executable, str(REPOSITORY / "examples" / program), *arguments], tmp_path)
    assert len(before_first_step(lines, first_step)) <= MOST_LINES, lines


@pytest.mark.slow("a long training")
@pytest.mark.ranks(2)
def test_the_longest_example_on_two_ranks_and_again_when_it_is_done(tmp_path):
    arguments, first_step = PROGRAMS["bert_pretrain/train.py"]
    command = [*npu_run(2), str(REPOSITORY / "examples" / "bert_pretrain" / "train.py"), *arguments]
    lines = before_first_step(lines_of(command, tmp_path), first_step)
    assert lines[0].startswith("npu-run: starting 2 ranks of ") and len(lines) <= MOST_LINES, lines
    again = lines_of(command, tmp_path)
    assert "already at step 2 of 2: nothing to do; --num_train_steps 4 or another --output_dir" in again and not any(
        line.startswith("step ") for line in again
    ), again


@pytest.mark.slow("several starts of TensorFlow for one line of output")
def test_warnings_of_the_script_are_shown_and_on_request_those_of_tensorflow(tmp_path):
    (tmp_path / "train.py").write_text(
        "import logging, warnings\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "logging.info('own note')\n"
        f"{EXAMPLES[0].replace('tf.estimator.Estimator(', 'NPUEstimator(').replace('max_steps=100', 'max_steps=1')}\n"
        "warnings.warn('own warning')\n"
        "tf.logging.warning('From %s: this is deprecated', 'me')\n"
        "tf.logging.error('own error')\n"
    )
    text = "\n".join(lines_of([sys.executable, "train.py"], tmp_path))
    for shown in ("own note", "own warning", "From me: this is deprecated", "own error"):
        assert shown in text
    assert "Instructions for updating" not in text and "oneDNN" not in text
    told = "\n".join(lines_of([sys.executable, "train.py"], tmp_path, NPU_BRIDGE_VERBOSE="1"))
    assert "Instructions for updating" in told and "cpu_feature_guard" in told
    assert "already at step 1 of 1: nothing to do; to train further, use max_steps=2 or another model_dir" in told


FAILING = """
from npu_bridge.npu_init import *
def model_fn(features, labels, mode):
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(tf.layers.dense(features, 8), 1))
    optimizer = NPUOptimizer(tf.train.AdamOptimizer(0.01), is_distributed=True)
    train_op = optimizer.minimize(loss, tf.train.get_global_step())
    return NPUEstimatorSpec(mode, loss=loss, train_op=train_op)
def input_fn():
    records = tf.data.TFRecordDataset("train.tfrecord")
    return records.map(lambda record: (tf.ones([4]), tf.ones([1]))).batch(16)
config = NPURunConfig(model_dir="out", debug_dir="here", op_debug_config="there")
NPUEstimator(model_fn, config=config).train(input_fn, max_steps=20)
"""


@pytest.mark.slow("several starts; npu_run/ tests each of these messages")
@pytest.mark.ranks(2)
def test_one_failure_is_one_traceback_and_nothing_else_is_in_its_way(tmp_path):
    (tmp_path / "train.py").write_text(FAILING)
    lines = lines_of([*npu_run(2), "train.py"], tmp_path, code=1)
    assert lines[:2] == [
        "npu-run: starting 2 ranks of train.py",
        "npu_bridge: 2 of the 3 options you set have no effect here (debug_dir, op_debug_config): npu-run effects "
        "train.py lists them",
    ]
    text = "\n".join(lines)
    assert text.count("Traceback") == 1 and len(lines) <= 12, lines
    assert '  File "train.py", line 12, in <module>' in lines and "site-packages" not in text
    assert "frames of libraries (npu-run --verbose shows them)" in text
    assert lines[-1].startswith("npu-run: rank ") and "NotFoundError: train.tfrecord; No such file" in lines[-1]


def warnings_of_tensorflow(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "tensorflow"]


def test_a_global_step_that_stands_still_is_no_news_where_steps_are_skipped(caplog, monkeypatch):
    alarms = tensorflow_start._false_alarm_filter()
    monkeypatch.setattr(alarms, "step_is_explained", False)
    assert tensorflow_start._STANDS_STILL in inspect.getsource(inspect.getmodule(tf.estimator.StepCounterHook))
    text = f"{tensorflow_start._STANDS_STILL} has not been increased."
    for _ in range(2):
        tf1.logging.warning(text)
    assert warnings_of_tensorflow(caplog) == [text], "once"
    monkeypatch.setattr(alarms, "step_is_explained", False)
    with tf.Graph().as_default():
        loss = tf.square(tf1.get_variable("weight", []))
        NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0)).minimize(loss, tf1.train.get_or_create_global_step())
    tf1.logging.warning(text)
    assert warnings_of_tensorflow(caplog) == [text]


class Slow(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.3)


@pytest.mark.few_fast(1, "the other one is not slow")
@pytest.mark.parametrize(("module", "count"), [("npu_bridge.reporting", 0), (__name__, 1)])
def test_a_callback_is_slow_if_it_is_a_persons_own(module, count, caplog, monkeypatch):
    monkeypatch.setattr(Slow, "__module__", module)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(tf.ones([6, 2]), tf.ones([6, 1]), batch_size=1, verbose=0, callbacks=[Slow()])
    assert len([text for text in warnings_of_tensorflow(caplog) if "is slow compared" in text]) == count
