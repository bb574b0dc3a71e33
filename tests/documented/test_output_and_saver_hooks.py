"""`NPUOutputTensorHook` and `NPUCheckpointSaverHook`, one documented fact after the other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.base.session_wrapper import EnginePlace, SessionEngine, add_engine
from npu_bridge.estimator.npu.npu_hook import NPUCheckpointSaverHook, NPUOutputTensorHook
from tests.documented.signatures import signature_of
from tests.refusing import refuses

tf1 = tf.compat.v1
REPOSITORY = Path(__file__).parents[2]


def test_signatures():
    assert signature_of(NPUOutputTensorHook) == ("(tensors, dependencies=None, output_fn=None, output_every_n_steps=0)")
    assert signature_of(NPUCheckpointSaverHook) == (
        "(checkpoint_dir, save_secs=None, save_steps=None, saver=None, checkpoint_basename='model.ckpt', "
        "scaffold=None, listeners=None, save_graph_def=True)"
    )
    assert issubclass(NPUOutputTensorHook, tf.estimator.LoggingTensorHook)
    assert issubclass(NPUCheckpointSaverHook, tf.estimator.CheckpointSaverHook)


def run(hook, runs=5):
    """Trains a graph whose tensor `double` is 2, 4, 6, ...; hands out what the hook was given, call by call."""
    with tf1.train.MonitoredSession(hooks=[hook]) as session:
        for _ in range(runs):
            session.run("count_up")


@pytest.fixture
def double(graph):
    step = tf1.get_variable("step", [], initializer=tf1.zeros_initializer(), use_resource=True)
    advanced = step.assign_add(1.0)
    tf.group(advanced, name="count_up")
    return tf.multiply(advanced, 2.0, name="double")


class Calls:
    """An `output_fn` that keeps copies of what it was given, and the list itself."""

    def __init__(self):
        self.values, self.lists = [], []

    def __call__(self, outputs):
        self.values.append([{tag: float(value) for tag, value in output.items()} for output in outputs])
        self.lists.append(outputs)

    def of(self, tag):
        return [[output[tag] for output in outputs] for outputs in self.values]


@pytest.mark.parametrize(
    "every, expected",
    [(1, [[2], [4], [6], [8], [10]]), (2, [[2, 4], [6, 8], [10]]), (5, [[2, 4, 6, 8, 10]]), (0, [[2, 4, 6, 8, 10]])],
)
def test_outputs_come_several_runs_at_a_time_and_the_rest_in_the_end(double, every, expected):
    calls = Calls()
    run(NPUOutputTensorHook({"double": double}, output_fn=calls, output_every_n_steps=every))
    assert calls.of("double") == expected
    assert all(outputs is calls.lists[0] and outputs == [] for outputs in calls.lists), "one list, emptied"


@pytest.mark.parametrize("tensors", [{"tag": "double:0"}, ["double:0"]], ids=["dict of names", "list of names"])
def test_names_are_looked_up(double, tensors):
    calls = Calls()
    run(NPUOutputTensorHook(tensors, output_fn=calls), runs=2)
    assert calls.of("tag" if isinstance(tensors, dict) else "double:0") == [[2, 4]]


@pytest.mark.parametrize("wrap", [lambda op: op, lambda op: [op]], ids=["one", "list"])
def test_dependencies_run_before_the_tensors_are_read(double, wrap):
    other = tf1.get_variable("other", [], initializer=tf1.zeros_initializer(), use_resource=True)
    raised = other.assign_add(10.0, read_value=False)
    calls = Calls()
    with tf1.train.MonitoredSession(hooks=[NPUOutputTensorHook({"double": double}, wrap(raised), calls)]) as session:
        session.run("count_up")
        session.run("count_up")
        assert session.run(other) >= 20.0, "the dependency ran with both steps, whatever it did with this one"
    assert calls.of("double")[0][:2] == [2, 4]


def test_a_variable_is_read_after_dependencies(double):
    other = tf1.get_variable("other", [], initializer=tf1.zeros_initializer(), use_resource=True)
    calls = Calls()
    run(NPUOutputTensorHook({"other": other}, other.assign_add(10.0).op, calls), runs=2)
    assert calls.of("other") == [[10, 20]]


def test_nothing_to_collect_means_no_call(double):
    calls = Calls()
    run(NPUOutputTensorHook(None, output_fn=calls, output_every_n_steps=1))
    run(NPUOutputTensorHook(None))
    assert calls.values == []


@refuses(
    ({"tensors": ["double:0"]}, ValueError),
    ({"tensors": ["double:0"], "output_fn": print, "output_every_n_steps": -1}, ValueError),
    ({"tensors": ["double:0"], "output_fn": print, "output_every_n_steps": 1.5}, TypeError),
    ({"tensors": ["double:0"], "output_fn": print, "dependencies": []}, TypeError),
    says=["NPUOutputTensorHook: ", "Expected ", "got "],
)
def test_illegal_arguments(arguments):
    NPUOutputTensorHook(**arguments)


@pytest.mark.parametrize(
    "arguments", [{}, {"save_secs": 1, "save_steps": 1}, {"save_steps": 1, "saver": 1, "scaffold": 1}]
)
def test_saver_hook_refuses_what_the_stock_hook_refuses(arguments):
    with pytest.raises(ValueError):
        NPUCheckpointSaverHook("folder", **arguments)


def test_saver_hook_saves_when_due_and_in_the_end(graph, tmp_path, caplog):
    step = tf1.train.get_or_create_global_step()
    advance = tf1.assign_add(step, 1)
    saved = []

    class Listener(tf.estimator.CheckpointSaverListener):
        def after_save(self, session, global_step_value):
            saved.append(int(global_step_value))

    hook = NPUCheckpointSaverHook(
        str(tmp_path), save_steps=2, saver=tf1.train.Saver(), checkpoint_basename="own", listeners=[Listener()]
    )
    with caplog.at_level("INFO", "npu_bridge"), tf1.train.SingularMonitoredSession([hook]) as session:
        for _ in range(5):
            session.run(advance)
    assert saved == [0, 2, 4, 5]
    assert os.path.basename(tf.train.latest_checkpoint(str(tmp_path))) == "own-5"
    assert [record.getMessage() for record in caplog.records if "global step" in record.getMessage()] == []


class Counting(SessionEngine):
    """Counts what a session runs."""

    place = EnginePlace.HOOKS

    def __init__(self):
        self.runs = 0

    def run(self, session, *arguments):
        self.runs += 1
        return self.inner.run(session, *arguments)


@pytest.mark.few_fast(1, "other intervals")
@pytest.mark.parametrize("moves", [[2, 5], [0, 0, 0, 1]], ids=str)
def test_saver_hook_saves_as_the_stock_hook_and_does_not_ask_for_the_step_after_each_run(tmp_path, moves):
    saved, asked = {}, {}
    for kind in (tf.estimator.CheckpointSaverHook, NPUCheckpointSaverHook):
        with tf.Graph().as_default():
            step = tf1.train.create_global_step()
            add = tf1.placeholder(tf.int64, [])
            advance = tf1.assign_add(step, add)
            folder, steps = str(tmp_path / kind.__name__), saved.setdefault(kind, [])

            class Listener(tf.estimator.CheckpointSaverListener):
                def after_save(self, session, global_step_value, steps=steps):
                    steps.append(int(global_step_value))

            hook, counting = kind(folder, save_steps=50, listeners=[Listener()]), Counting()
            with tf1.train.SingularMonitoredSession([hook]) as session:
                add_engine(session.raw_session(), counting)
                for run in range(200):
                    session.run(advance, {add: moves[run % len(moves)]})
                asked[kind] = counting.runs - 200
    assert saved[NPUCheckpointSaverHook] == saved[tf.estimator.CheckpointSaverHook]
    assert asked[tf.estimator.CheckpointSaverHook] >= 200
    # The fetches of a run race with its update, so a run may be seen to move the step by 7. Twice that is
    # allowed for, 14 of the 50 steps between two checkpoints.
    assert asked[NPUCheckpointSaverHook] < 150


FULL_DISK = """
import logging, os, resource, shutil, signal, sys, time
import numpy as np, tensorflow as tf
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator

logging.basicConfig(level=logging.ERROR, stream=sys.stdout, format="%(message)s")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def input_fn():
    return tf.data.Dataset.from_tensors((np.ones([2, 100], np.float32), np.float32(1))).repeat()

def model_fn(features, labels, mode):
    kernel = tf.compat.v1.get_variable("kernel", [100, 1000], initializer=tf.compat.v1.zeros_initializer())
    loss = tf.reduce_mean(tf.matmul(features, kernel) - labels)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(1000.0)
    train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

class DiskIsFull(tf.estimator.SessionRunHook):
    def __init__(self, folder, room_again):
        self.runs, self.folder, self.room_again = 0, folder, room_again

    def after_run(self, run_context, run_values):
        self.runs += 1
        while self.runs == 3 and not os.path.exists(f"{self.folder}/model.ckpt-2.meta"):
            time.sleep(0.01)  # it is being written in the background
        if self.runs == 3:  # no file may grow beyond what events take, and checkpoints are larger
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        if self.runs == self.room_again:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def fill(folder):
    with open(os.path.join(folder, "filler"), "wb", buffering=0) as file:
        try:
            while os.path.ismount(folder):
                file.write(bytes(1000))
        except OSError:
            pass

trainings = ("small", []), ("small", []), ("for_some_time", [DiskIsFull("for_some_time", 7)])
trainings = *trainings, ("for_good", [DiskIsFull("for_good", 0)])
for number, (folder, hooks) in enumerate(trainings):
    print("---", flush=True)
    estimator = NPUEstimator(model_fn, config=NPURunConfig(model_dir=folder, save_checkpoints_steps=2))
    try:
        estimator.train(input_fn, max_steps=8, hooks=hooks)
    except OSError as error:
        print("raised", type(error).__name__, error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    shutil.copytree(folder, f"seen_{number}")
    fill(folder)
"""


# A file system with room for two checkpoints, which ends with the process.
MOUNT_AND_RUN = 'mount -t tmpfs -o size=1200k tmpfs small && exec "$0" "$@"'
ON_SMALL_DISK = ["unshare", "--map-root-user", "--mount", "sh", "-c", MOUNT_AND_RUN]


@pytest.fixture(scope="module")
def full_disk(tmp_path_factory):
    """Trains four times without enough space: gives the folders as each left them, and what each said.

    The first two are on a small disk of their own: on the second one it is full from the start. In the others files may
    not grow, which to a process is much the same. Where no disk can be made, the first two are None.
    """
    folder = tmp_path_factory.mktemp("disk")
    (folder / "small").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    has_disk = False
    if shutil.which("unshare"):
        has_disk = subprocess.run([*ON_SMALL_DISK, "true"], cwd=folder, capture_output=True).returncode == 0
    command = [*(ON_SMALL_DISK if has_disk else []), sys.executable, "-c", FULL_DISK]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = [(folder / f"seen_{number}", said) for number, said in enumerate(done.stdout.split("---")[1:])]
    return seen if has_disk else [None, None, *seen[2:]]


def of_training(full_disk, number):
    if full_disk[number] is None:
        pytest.skip("no disk of its own can be made here")
    return full_disk[number]


@pytest.mark.parametrize(
    "number, name, kept, reason",
    [
        (0, "small", [0, 2], "No space left on device"),
        (2, "for_some_time", [0, 2, 8], "File too large"),
        (3, "for_good", [0, 2], "File too large"),
    ],
)
def test_a_full_disk_takes_no_checkpoint_away(full_disk, number, name, kept, reason):
    folder, said = of_training(full_disk, number)
    for step in (4, 6):
        assert f"checkpoint: step {step} is not saved. Expected space in {name}; got " in said
    assert reason in said and "the latest checkpoint is model.ckpt-2. Training continues." in said
    is_raised = "raised CheckpointNotSavedError checkpoint: step 8 is not saved." in said
    assert is_raised == (name != "for_some_time") and ("raised" in said) == is_raised
    model_dir = str(folder)
    paths = tf.train.get_checkpoint_state(model_dir).all_model_checkpoint_paths
    assert [os.path.basename(path) for path in paths] == [f"model.ckpt-{step}" for step in kept]
    endings = ("data-00000-of-00001", "index", "meta")
    expected = [f"model.ckpt-{step}.{ending}" for step in kept for ending in endings]
    files = sorted(entry for entry in os.listdir(model_dir) if entry.startswith("model.ckpt"))
    assert files == expected, "nothing half-written is left"
    latest = tf.train.latest_checkpoint(model_dir)
    assert tf.train.load_variable(latest, "global_step") == kept[-1]
    kernel = tf.train.load_variable(latest, "kernel")  # the mean over 1000 columns, times 1000
    np.testing.assert_array_equal(kernel, np.full([100, 1000], -kept[-1], np.float32))


def test_no_space_at_the_start_is_said(full_disk):
    folder, said = of_training(full_disk, 1)
    assert "raised CheckpointNotSavedError checkpoint: graph.pbtxt is not saved. Expected space in small; got " in said
    assert "No space left on device. Free some space; the latest checkpoint is model.ckpt-2." in said
    assert [entry for entry in os.listdir(folder) if entry.startswith("graph")] == ["graph.pbtxt"]


def test_outputs_of_a_training_that_failed_are_not_handed_over(graph):
    handed_over = []
    x = tf.constant(1.0)
    hook = NPUOutputTensorHook({"x": x}, output_fn=lambda outputs: handed_over.append(len(outputs)))
    with pytest.raises(ZeroDivisionError), tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
        session.run(x)
        session.run(x)
        raise ZeroDivisionError
    with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
        session.run(x)
    assert handed_over == [1]
