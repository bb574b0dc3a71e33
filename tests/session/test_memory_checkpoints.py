"""Copies of a training's state in memory, and checkpoints that are written from there in the background."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.base import machine, memory_folders
from npu_bridge.base.environment import MEMORY_FOLDER, RESTARTS
from npu_bridge.base.memory_folders import make_memory_folder, memory_folder_name
from npu_bridge.estimator.npu.npu_hook import NPUCheckpointSaverHook
from npu_bridge.session import (
    DamagedCheckpointError,
    MemoryCheckpointHook,
    ResumableLoop,
    ResumeCallback,
    check_newest_checkpoint,
    checkpoints,
    memory_checkpoints,
    take_memory_checkpoint,
)
from npu_bridge.session.elastic import background_saves
from npu_bridge.session.elastic import memory_checkpoints as memory_checkpoints_module
from npu_bridge.session.elastic.memory_checkpoints import MemoryCheckpoints
from tests.garbage import collect_garbage
from tests.npu_run.launching import wait_for

v1 = tf.compat.v1
pytestmark = pytest.mark.skipif(make_memory_folder() is None, reason="there are no folders in memory here")


@pytest.fixture
def only_of_job(monkeypatch):
    """The folder in memory of a job that this process is a rank of."""
    folder = make_memory_folder()
    monkeypatch.setenv(MEMORY_FOLDER, folder.path)
    yield Path(folder.path)
    folder.close()
    assert not os.path.exists(folder.path)


def counting_graph():
    """A graph whose step adds one to 1000 numbers and to the global step."""
    step = v1.train.get_or_create_global_step()
    numbers = v1.get_variable("numbers", [1000], initializer=v1.zeros_initializer())
    with tf.control_dependencies([numbers.assign_add(tf.ones([1000]))]):
        return step.assign_add(1).op


def train(steps, *hooks, checkpoint_dir=None):
    """Trains some steps in a graph of its own."""
    with tf.Graph().as_default():
        op = counting_graph()
        v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver(max_to_keep=3, sharded=True))
        with v1.train.SingularMonitoredSession([*hooks], checkpoint_dir=checkpoint_dir) as session:
            for _ in range(steps):
                session.run(op)


class Training(v1.train.SessionRunHook):
    """Calls a function with the global step after each run."""

    def __init__(self, function):
        self._function = function

    def begin(self):
        self._step = v1.train.get_global_step()

    def after_run(self, run_context, run_values):
        self._function(int(run_context.session.run(self._step)))


def saved_steps(folder):
    state = tf.train.get_checkpoint_state(str(folder))
    return [int(path.rpartition("-")[2]) for path in state.all_model_checkpoint_paths]


def files(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("model.ckpt"))


# Folders in memory.


def test_a_folder_is_nobody_elses_and_goes_with_its_holder():
    folder = make_memory_folder()
    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    assert make_memory_folder(memory_folder_name(folder.path)) is None, "it is held"
    folder.close(keeps_files=True)
    assert os.path.isdir(folder.path)
    again = make_memory_folder(memory_folder_name(folder.path))
    assert again.path == folder.path
    again.close()
    assert not os.path.exists(folder.path)


@pytest.mark.parametrize(("age_secs", "is_left"), [(10, True), (4000, False)])
def test_what_a_killed_holder_has_left_is_removed_after_an_hour(age_secs, is_left):
    code = (
        "from npu_bridge.base.memory_folders import *; f = make_memory_folder(); print(f.path); import os; os._exit(9)"
    )
    path = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    Path(path, "state").write_text("left")
    held = make_memory_folder()
    for each in (path, held.path, *Path(path).iterdir()):
        os.utime(each, (time.time() - age_secs,) * 2)
    make_memory_folder().close()
    if is_left:
        assert os.path.exists(path)
    else:
        wait_for(lambda: not os.path.exists(path), "the end of the folder, which a job of another case can be removing")
    assert os.path.exists(held.path), "a living process keeps its folder, however old it is"
    held.close()
    make_memory_folder(memory_folder_name(path)).close()


def test_a_folder_is_kept_for_an_hour_after_its_last_file_was_written():
    folder = make_memory_folder()
    folder.close(keeps_files=True)
    Path(folder.path, "step").mkdir()
    Path(folder.path, "step", "state").write_text("the newest")
    for each in (folder.path, *Path(folder.path).iterdir()):
        os.utime(each, (time.time() - 4000,) * 2)
    make_memory_folder().close()
    assert os.path.exists(folder.path)
    make_memory_folder(memory_folder_name(folder.path)).close()


def test_a_folder_that_goes_while_it_is_looked_at_is_no_error(monkeypatch):
    listed = [*os.listdir(memory_folders._ROOT), f"npu_bridge-{os.getuid()}-gone"]
    monkeypatch.setattr(os, "listdir", lambda path: listed)
    make_memory_folder().close()


def test_a_folder_of_somebody_elses_making_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_folders, "_ROOT", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"npu_bridge-{os.getuid()}-abc").symlink_to(tmp_path / "elsewhere")
    assert make_memory_folder("abc") is None
    (tmp_path / f"npu_bridge-{os.getuid()}-def").mkdir()
    os.chmod(tmp_path / f"npu_bridge-{os.getuid()}-def", 0o755)
    assert make_memory_folder("def") is None


# Copies.


def write(copies, text, step, size_bytes=10):
    return copies.write(lambda path: Path(f"{path}.index").write_text(text), step, size_bytes)


def test_only_the_newest_copy_is_kept(tmp_path):
    copies = MemoryCheckpoints(str(tmp_path / "copies"))
    first = write(copies, "one", 1)
    with copies.keep_copy_during_block(first):
        write(copies, "two", 2)
        third = write(copies, "three", 3)
        assert len(os.listdir(tmp_path / "copies")) == 2, "what is being copied to the disk stays"
        assert Path(f"{first}.index").read_text() == "one"
    assert Path(f"{third}.index").read_text() == "three"
    write(copies, "four", 4)
    assert len(os.listdir(tmp_path / "copies")) == 1
    copies.remove_copies()
    assert not (tmp_path / "copies").exists()


def test_no_copy_is_made_where_memory_is_short(tmp_path):
    copies = MemoryCheckpoints(str(tmp_path))
    assert write(copies, "one", 1, size_bytes=1 << 60) is None

    def save(path):
        Path(f"{path}.index").write_text("a part of it")
        Path("/dev/full").write_text("x")

    assert copies.write(save, 1, 10) is None
    assert not os.listdir(tmp_path), "what there was no room for takes none"


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("0::/job/step", ("memory.max", "memory.current")),
        ("4:memory:/job/step", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_no_copy_is_made_beyond_the_memory_of_the_job(tmp_path, monkeypatch, group, names):
    folder = tmp_path / "sys/fs/cgroup" / ("memory" if "memory" in group else "") / "job"
    for path, text in {
        tmp_path / "proc/self/cgroup": f"3:cpu:/\n{group}\n",
        **{folder / name: f"{size}\n" for name, size in zip(names, (1000, 980))},
        folder / "memory.stat": "shmem 9\ninactive_file 6\nactive_file 3\n",
        folder / "step" / names[0]: "max\n",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(machine, "_ROOT", tmp_path, raising=False)
    copies = MemoryCheckpoints(str(tmp_path / "copies"))
    assert write(copies, "of the first step", 1, size_bytes=10) is None
    assert write(copies, "of the first step", 1, size_bytes=9) is not None


def test_copies_are_made_as_seldom_as_they_cost_little(only_of_job, monkeypatch, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(memory_checkpoints_module.time, "monotonic", lambda: clock[0])
    made = []
    write_as_before = MemoryCheckpoints.write

    def write_slowly(self, save, step, size_bytes):
        made.append(step)
        clock[0] += 0.0499
        return write_as_before(self, save, step, size_bytes)

    monkeypatch.setattr(MemoryCheckpoints, "write", write_slowly)
    hook = MemoryCheckpointHook(str(tmp_path))

    def tick(step):
        clock[0] += 1.0

    train(45, Training(tick), hook)
    assert made == [10, 20, 30, 40] and hook.every_n_runs == 10  # 0.05 s of 10 s are 0.5 %
    assert not list(only_of_job.glob("*/*")), "a training that has ended needs no copy"


# Resuming from a copy.


class KilledError(Exception):
    """Stands for the end of a rank: no hook's `end` is called."""


def train_and_be_killed(folder, steps, copied_at, monkeypatch):
    """A training that saves to the disk at its start and to memory after some steps, and ends with no hook's `end`."""
    monkeypatch.setattr(memory_checkpoints_module, "_FIRST_AFTER_RUNS", copied_at)
    monkeypatch.setattr(memory_checkpoints_module, "_SHARE", 1e-6)  # and never again, however long steps take

    def die(step):
        if step == steps:
            raise KilledError

    with pytest.raises(KilledError):
        train(steps, NPUCheckpointSaverHook(folder, save_steps=1000), MemoryCheckpointHook(folder), Training(die))


def as_of_another_process(only_of_job):
    (place,) = only_of_job.glob("*/*-*")
    return place.rename(place.with_name(place.name.replace(str(os.getpid()), "1")))


def test_a_copy_that_is_newer_becomes_the_newest_checkpoint(only_of_job, monkeypatch, tmp_path):
    folder = str(tmp_path / "out")
    train_and_be_killed(folder, steps=8, copied_at=5, monkeypatch=monkeypatch)
    take_memory_checkpoint(folder)
    assert saved_steps(folder) == [0], "the same process has not been started again"
    as_of_another_process(only_of_job)
    take_memory_checkpoint(folder)
    assert saved_steps(folder) == [0, 5]
    assert [name for name in files(folder) if "-5" in name] == [
        "model.ckpt-5.data-00000-of-00001",
        "model.ckpt-5.index",
    ]
    latest = tf.train.latest_checkpoint(folder)
    np.testing.assert_array_equal(tf.train.load_variable(latest, "numbers"), np.full(1000, 5.0))
    train(2, NPUCheckpointSaverHook(folder, save_steps=1000), checkpoint_dir=folder)
    assert saved_steps(folder) == [5, 7] or saved_steps(folder) == [0, 5, 7]


def test_a_copy_that_is_older_than_the_disk_is_left_out(only_of_job, monkeypatch, tmp_path):
    folder = str(tmp_path / "out")
    train_and_be_killed(folder, steps=8, copied_at=5, monkeypatch=monkeypatch)
    as_of_another_process(only_of_job)
    with monkeypatch.context() as elsewhere:
        elsewhere.delenv(MEMORY_FOLDER)
        train(7, NPUCheckpointSaverHook(folder, save_steps=1000))
    before = files(folder)
    assert list(only_of_job.glob("*/5-1"))
    take_memory_checkpoint(folder)
    assert files(folder) == before and saved_steps(folder)[-1] == 7


def test_a_damaged_copy_is_left_out(only_of_job, monkeypatch, tmp_path):
    folder = str(tmp_path / "out")
    train_and_be_killed(folder, steps=8, copied_at=5, monkeypatch=monkeypatch)
    (data,) = as_of_another_process(only_of_job).glob("*.data-*")
    content = bytearray(data.read_bytes())
    content[100] ^= 4
    data.write_bytes(content)
    take_memory_checkpoint(folder)
    assert saved_steps(folder) == [0]
    assert not [name for name in os.listdir(folder) if "-5" in name], "nothing half-written is left"


@pytest.mark.parametrize(
    ("saved_at", "copied_at", "goes_on_from"),
    [
        ([3, 7], 5, 5),  # lies between the damaged one and the intact one
        ([3, 7], 7, 7),  # takes the damaged one's place
        ([5, 7], 5, 5),  # is no newer than the intact one
    ],
)
def test_a_copy_that_is_newer_than_what_is_intact_is_taken_once(
    only_of_job, monkeypatch, tmp_path, saved_at, copied_at, goes_on_from
):
    """A later request, for the rows or the variables, gets the same step."""
    folder = str(tmp_path / "out")
    train_and_be_killed(folder, steps=8, copied_at=copied_at, monkeypatch=monkeypatch)
    as_of_another_process(only_of_job)
    with monkeypatch.context() as elsewhere:
        elsewhere.delenv(MEMORY_FOLDER)
        for start, end in zip([0, *saved_at], saved_at):
            train(end - start, NPUCheckpointSaverHook(folder, save_steps=1000), checkpoint_dir=folder)
    Path(f"{folder}/model.ckpt-7.index").write_bytes(b"rubbish")
    monkeypatch.setenv(RESTARTS, "1")
    for _ in range(3):
        take_memory_checkpoint(folder)
        check_newest_checkpoint(folder, may_use_older=True)
        assert saved_steps(folder)[-1] == goes_on_from
    latest = tf.train.latest_checkpoint(folder)
    np.testing.assert_array_equal(tf.train.load_variable(latest, "numbers"), np.full(1000, float(goes_on_from)))


def loop_of(folder, every_n_steps=None):
    """A self-written loop whose updates add one to 1000 numbers; with these numbers, and a function for an update."""
    model, optimizer = tf.Module(), tf.keras.optimizers.SGD(1.0)
    model.numbers = tf.Variable(tf.zeros([1000]))
    optimizer.build([model.numbers])
    loop = ResumableLoop(folder, model, optimizer, every_n_steps)
    return loop, model.numbers, lambda: optimizer.apply_gradients([(-tf.ones([1000]), model.numbers)])


def test_a_loop_of_ones_own_goes_on_from_a_copy(only_of_job, monkeypatch, tmp_path):
    folder = str(tmp_path / "out")
    monkeypatch.setattr(memory_checkpoints_module, "_FIRST_AFTER_RUNS", 5)
    loop, _, update = loop_of(folder)
    for reached in loop.until(100):
        if reached == 8:
            break
        update()
    assert not os.path.exists(folder), "nothing is on the disk"
    as_of_another_process(only_of_job)
    loop, numbers, update = loop_of(folder)
    np.testing.assert_array_equal(numbers, np.full(1000, 5.0))
    for reached in loop.until(12):
        assert bool(list(only_of_job.glob(f"*/*-{os.getpid()}"))) == (reached >= 10)
        update()
    np.testing.assert_array_equal(numbers, np.full(1000, 12.0))
    assert not list(only_of_job.glob(f"*/*-{os.getpid()}")), "a training that has ended needs no copy"
    assert saved_steps(folder)[-1] == 12


@pytest.mark.parametrize("is_started_again", [True, False])
def test_a_loop_of_ones_own_goes_back_from_a_damaged_checkpoint(is_started_again, monkeypatch, tmp_path):
    folder = str(tmp_path / "out")
    loop, _, update = loop_of(folder, every_n_steps=3)
    for _ in loop.until(6):
        update()
    Path(f"{folder}/ckpt-6.index").write_bytes(b"rubbish")
    monkeypatch.delenv(RESTARTS, raising=False)
    if is_started_again:
        monkeypatch.setenv(RESTARTS, "1")
        _, numbers, _ = loop_of(folder)
        np.testing.assert_array_equal(numbers, np.full(1000, 3.0))
    else:
        with pytest.raises(DamagedCheckpointError, match="The newest intact checkpoint is ckpt-3"):
            loop_of(folder)


def model_to_resume(path):
    model = tf.keras.Sequential([tf.keras.layers.Input([2]), tf.keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model, ResumeCallback(path, every_n_steps=3)


def fit_and_fail(path, batch):
    """A fit that ends with an error after some batches; returns its callback, whose last save can still go on."""

    class Fails(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, number, logs=None):
            if number == batch:
                raise KilledError

    model, resume = model_to_resume(path)
    with pytest.raises(KilledError):
        model.fit(np.ones([10, 2]), np.ones([10, 1]), 1, callbacks=[resume, Fails()], verbose=0)
    return resume


def test_a_damaged_file_of_keras_gives_way_to_a_copy(only_of_job, tmp_path):
    path = tmp_path / "model.keras"
    fit_and_fail(path, batch=7)._writer.wait()
    as_of_another_process(only_of_job)
    path.write_bytes(path.read_bytes()[:-100])
    model, resume = model_to_resume(path)
    assert resume.restore(model) == 6


# Saving in the background.


def test_what_is_saved_is_the_state_at_the_time(monkeypatch, tmp_path):
    """The disk is slow; training continues meanwhile."""
    folder, may_write, seen = str(tmp_path / "out"), threading.Event(), []
    copy = background_saves.copy_checkpoint

    def copy_late(source, target):
        assert target.endswith("-0") or may_write.wait(60)
        copy(source, target)

    monkeypatch.setattr(background_saves, "copy_checkpoint", copy_late)

    def look(step):
        seen.append(saved_steps(folder))
        if step == 9:
            may_write.set()

    train(9, NPUCheckpointSaverHook(folder, save_steps=5), Training(look))
    assert seen == [[0]] * 9 or seen[:8] == [[0]] * 8
    assert saved_steps(folder) == [0, 5, 9]
    for step in (5, 9):
        path = os.path.join(folder, f"model.ckpt-{step}")
        np.testing.assert_array_equal(tf.train.load_variable(path, "numbers"), np.full(1000, float(step)))
        with tf.Graph().as_default(), v1.Session() as session:
            v1.train.import_meta_graph(f"{path}.meta").restore(session, path)
            assert session.run(v1.train.get_global_step()) == step


def test_ctrl_c_during_a_slow_save_begins_no_other_save(monkeypatch, tmp_path):
    """Ctrl-C ends the wait for the save of step 2; releasing the folder waits for this save."""
    folder, is_interrupted, join, waits = str(tmp_path / "out"), threading.Event(), threading.Thread.join, []
    copy, hook = background_saves.copy_checkpoint, NPUCheckpointSaverHook(folder, save_steps=2)

    def copy_late(source, target):
        assert target.endswith("-0") or is_interrupted.wait(60)
        copy(source, target)

    def join_or_interrupt(thread, timeout=None):
        waits.append(thread.name)
        if waits.count("npu_bridge checkpoint") == 2 and not is_interrupted.is_set():
            is_interrupted.set()
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(background_saves, "copy_checkpoint", copy_late)
    monkeypatch.setattr(threading.Thread, "join", join_or_interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(5, hook)
    hook.release_folder()
    assert saved_steps(folder) == [0, 2]


def test_a_training_begins_after_the_last_save_of_one_that_failed(monkeypatch, tmp_path):
    folder, may_write = str(tmp_path / "out"), threading.Event()
    copy = background_saves.copy_checkpoint

    def copy_late(source, target):
        assert target.endswith("-0") or may_write.wait(60)
        copy(source, target)

    def fail(step):
        if step == 3:
            raise KilledError

    monkeypatch.setattr(background_saves, "copy_checkpoint", copy_late)
    with pytest.raises(KilledError):
        train(5, NPUCheckpointSaverHook(folder, save_steps=2), Training(fail))
    collect_garbage()
    assert os.path.exists(f"{folder}/.training.lock"), "the thread still writes"
    threading.Timer(0.5, may_write.set).start()
    train(2, NPUCheckpointSaverHook(folder, save_steps=100), checkpoint_dir=folder)
    assert saved_steps(folder)[-1] == 4


def test_a_model_is_restored_after_the_last_save_of_a_fit_that_failed(monkeypatch, tmp_path):
    may_write, copy = threading.Event(), ResumeCallback._copy_to_disk
    monkeypatch.setattr(ResumeCallback, "_copy_to_disk", lambda *files: may_write.wait(60) and copy(*files))
    fit_and_fail(tmp_path / "model.keras", batch=4)
    threading.Timer(0.5, may_write.set).start()
    model, resume = model_to_resume(tmp_path / "model.keras")
    assert resume.restore(model) == 3


def test_a_copy_is_not_removed_before_the_thread_has_begun(only_of_job, monkeypatch, tmp_path):
    """A training that ends with a save that is just beginning."""
    folder = str(tmp_path / "out")
    start = threading.Thread.start

    def start_late(self):
        if self.name == "npu_bridge checkpoint":
            memory_checkpoints(folder, only_of_job=True).remove_copies()
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    train(5, NPUCheckpointSaverHook(folder, save_steps=2))
    assert saved_steps(folder) == [2, 4, 5]


def test_what_cannot_be_read_back_takes_no_older_one_away(monkeypatch, tmp_path, caplog):
    folder = str(tmp_path / "out")
    flush = checkpoints.flush_to_disk

    def flip_a_bit(path):
        flush(path)
        if "-4_temp" in path and ".data" in path:
            content = bytearray(Path(path).read_bytes())
            content[100] ^= 4
            Path(path).write_bytes(content)

    monkeypatch.setattr(checkpoints, "flush_to_disk", flip_a_bit)
    train(6, NPUCheckpointSaverHook(folder, save_steps=2), Training(lambda step: time.sleep(0.3)))
    assert saved_steps(folder) == [0, 2, 6]
    assert not [name for name in files(folder) if "-4" in name]
    assert "checkpoint: step 4 is not saved. Expected files in" in caplog.text
    assert "Check the disk; the latest checkpoint is model.ckpt-2. Training continues." in caplog.text


def test_who_listens_to_checkpoints_finds_them_on_the_disk(tmp_path):
    folder, seen = str(tmp_path / "out"), []

    class Listener(v1.train.CheckpointSaverListener):
        def after_save(self, session, global_step_value):
            seen.append(saved_steps(folder)[-1])

    train(6, NPUCheckpointSaverHook(folder, save_steps=2, listeners=[Listener()]))
    assert seen == [0, 2, 4, 6]


@pytest.mark.slow("jobs that end in several ways")
def test_nothing_is_left_in_memory(tmp_path):
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.session.test_memory_checkpoints import *
train(5, NPUCheckpointSaverHook({str(tmp_path / "out")!r}, save_steps=2))
from npu_bridge.session.elastic.memory_checkpoints import _memory_folder_of_process
print(_memory_folder_of_process().path)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    path = done.stdout.split()[-1]
    assert path.startswith("/dev/shm/") and not os.path.exists(path)


# A job.

JOB = """
import os, signal, sys
import numpy as np
from npu_bridge.npu_init import *


class Kill(tf.train.SessionRunHook):
    def after_run(self, context, values):
        if context.session.run(tf.train.get_global_step()) == 35 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


def model_fn(features, labels, mode):
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(features, 1))
    op = NPUOptimizer(tf.train.AdamOptimizer(0.01)).minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=op)


def rows():
    return tf.data.Dataset.from_tensors((np.ones([8, 4], "f"), np.ones([8, 1], "f"))).repeat()


config = NPURunConfig(model_dir="out", save_checkpoints_steps=1000000)
NPUEstimator(model_fn, config=config).train(rows, [Kill()], max_steps=60)
print("folder in memory", os.environ["NPU_RUN_MEMORY_FOLDER"])
"""


def test_a_killed_rank_costs_the_steps_since_the_last_copy(tmp_path):
    (tmp_path / "train.py").write_text(JOB)
    command = [sys.executable, "-m", "npu_bridge.run", "--restarts", "1", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    settings = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, **settings)
    assert done.returncode == 0, done.stderr
    # The first copy is made after ten steps, and the second one when that is cheap.
    found = re.search(r"resuming from step (\d+)", done.stderr + done.stdout)
    assert found and 10 <= int(found.group(1)) <= 35, done.stderr
    assert saved_steps(tmp_path / "out") == [0, int(found.group(1)), 60]
    path = re.search("folder in memory (.*)", done.stdout).group(1)
    assert path.startswith("/dev/shm/") and not os.path.exists(path)


def test_a_copied_checkpoint_gets_its_index_last(tmp_path, monkeypatch):
    source = tf.train.Checkpoint(weight=tf.Variable(3.0)).write(str(tmp_path / "one"))
    finished, finish = [], checkpoints.finish_save
    monkeypatch.setattr(checkpoints, "finish_save", lambda file, name: (finish(file, name), finished.append(name)))
    checkpoints.copy_checkpoint(source, str(tmp_path / "two"))
    assert [name.endswith(".index") for name in finished] == [False, True]


def test_a_forked_process_removes_no_folder():
    folder = make_memory_folder()
    child = os.fork()
    if not child:
        folder.close()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0) and os.path.isdir(folder.path)
    folder.close()
    assert not os.path.exists(folder.path)
