"""A job holds the folder it trains in: who is refused, who is not, and what is taken over from the dead."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import signal
import subprocess
import threading
import time

import pytest
import tensorflow as tf

from npu_bridge.base import environment, held_folders, lock_owners
from npu_bridge.base.files import NotOursError, new_file, remove_own_files
from npu_bridge.base.held_folders import FolderHeldError, hold_folder
from npu_bridge.estimator.npu.npu_hook import NPUCheckpointSaverHook
from npu_bridge.estimator.npu.npu_saver import NPUSaver
from npu_bridge.session import ModelDirInUseError, hold_model_dir
from tests.garbage import collect_garbage
from tests.goldens.counting_estimator import estimator_of, input_fn, model_fn
from tests.holding import LOCK, held_by_another, leave_by_the_dead, python

tf1 = tf.compat.v1


def take(folder):
    return hold_folder(str(folder), "training", "a training")


def test_who_holds_it_is_told_and_the_dead_hold_nothing(tmp_path):
    process = held_by_another(tmp_path)
    with pytest.raises(FolderHeldError) as refused:
        take(tmp_path)
    text = str(refused.value)
    assert f"{tmp_path} is in use. Expected a folder that no other job uses; got a training, process " in text
    assert f"process {process.pid} on {os.uname().nodename}, since 20" in text and "\n" not in text
    assert f"stop it (kill {process.pid}), or name another folder." in text
    with hold_folder(str(tmp_path), "npu_bridge", "a command"):
        pass  # of another purpose
    process.communicate()
    with take(tmp_path) as hold:
        assert hold.has_taken_over
    assert os.listdir(tmp_path) == []
    with take(tmp_path) as hold:
        assert not hold.has_taken_over


def test_one_process_holds_it_as_often_as_it_likes(tmp_path):
    first, second = take(tmp_path), take(tmp_path)
    assert first.is_first and not second.is_first
    first.release()
    first.release()
    assert (tmp_path / LOCK).exists()
    child = os.fork()
    if not child:
        second.release()  # not held: the child holds nothing
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / LOCK).exists()
    second.release()
    assert os.listdir(tmp_path) == []


RACE = """
import os, random, signal, sys, time
from npu_bridge.base.files import NotOursError, new_file, remove_own_files
from npu_bridge.base.held_folders import FolderHeldError, hold_folder
folder, number = sys.argv[1], int(sys.argv[2])
inside = os.path.join(folder, "inside")
draw = random.Random(number)

def is_running(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # it was collected, perhaps this very moment
        return False

done, end = 0, time.monotonic() + 600  # only what hangs takes as long as this
while done < 12 and time.monotonic() < end:
    try:
        hold = hold_folder(folder, "training", "a race")
    except FolderHeldError:
        time.sleep(draw.uniform(0, 0.01))
        continue
    if os.path.exists(inside):
        with open(inside) as file:
            before = file.read()
        if before and is_running(before):
            print("two at once", flush=True)
    with open(inside, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(draw.uniform(0, 0.005))
    done += 1
    if done == 12 and number % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    os.truncate(inside, 0)
    hold.release()
print("done", done)
"""


def test_of_many_at_once_one_has_it_also_when_holders_are_killed(tmp_path):
    processes = [python(RACE, tmp_path, number, stdout=subprocess.PIPE) for number in range(8)]
    said = [process.communicate()[0] for process in processes]
    assert "two at once" not in "".join(said)
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL] * 4
    assert [text for text in said if text] == ["done 12\n"] * 4


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(held_folders, "SILENT_SECS", 0.6)
    monkeypatch.setattr(held_folders, "_POLL_SECS", 0.02)


@pytest.fixture
def unattended(monkeypatch):
    """No thread keeps locks young, which would put them back between two lines of a test."""
    alone = held_folders._ProcessLocks()
    alone._start_renewing = lambda: None
    monkeypatch.setattr(held_folders, "_PROCESS_LOCKS", alone)


def write_lock(folder, **facts):
    """A lock as this machine's `init` would have written it, but for some facts."""
    with take(folder):
        text = (folder / LOCK).read_text()
    (folder / LOCK).write_text(json.dumps({**json.loads(text), "process": 1, **facts}))


def test_a_process_number_that_is_another_ones_now_is_no_holder(tmp_path):
    write_lock(tmp_path, started="1")
    with take(tmp_path) as hold:
        assert hold.has_taken_over


def test_a_holder_elsewhere_is_believed_as_long_as_it_gives_signs_of_life(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(held_folders, "_POLL_SECS", 0.02)
    write_lock(tmp_path, host="elsewhere", machine="another")
    ended = threading.Event()

    def live():
        while not ended.wait(0.1):
            os.utime(tmp_path / LOCK)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        for _ in range(3):
            with pytest.raises(FolderHeldError, match=r"process 1 on elsewhere.*stop it \(ssh elsewhere kill 1\)"):
                take(tmp_path)
    finally:
        ended.set()
        thread.join()
    assert "waiting for a sign of life from process 1 on elsewhere" in caplog.text
    monkeypatch.setattr(held_folders, "SILENT_SECS", 0.6)  # which the signs of a busy machine might not keep to
    with take(tmp_path) as hold:  # it has died: not at once, but after its silence
        assert hold.has_taken_over


def test_a_holder_elsewhere_of_an_earlier_start_of_the_job_needs_no_waiting(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(environment.START, "")  # as it was afterwards
    starts = lock_owners.JobStarts()
    starts.begin_start()
    write_lock(tmp_path, host="elsewhere")
    starts.end_start(might_still_run=False)
    starts.begin_start()
    with take(tmp_path) as hold:
        assert hold.has_taken_over and "waiting for a sign of life" not in caplog.text


@pytest.mark.parametrize("which", ["this start", "one that may continue", "a later one", "another job"])
def test_a_holder_elsewhere_that_may_live_is_waited_for(which, tmp_path, monkeypatch):
    said = []

    def warn(text, *values):
        said.append(text % values)
        monkeypatch.setattr(held_folders, "SILENT_SECS", 0.0)  # the wait is over

    monkeypatch.setenv(environment.START, "")
    monkeypatch.setattr(held_folders._LOG, "warning", warn)
    starts = lock_owners.JobStarts()
    starts.begin_start()
    write_lock(tmp_path, host="elsewhere", job="of the start")
    if which == "one that may continue":
        starts.end_start(might_still_run=True)
        starts.begin_start()
    elif which == "a later one":
        monkeypatch.setenv(environment.START, environment.read_variable(environment.START).replace(":1:", ":0:"))
    elif which == "another job":
        lock_owners.JobStarts().begin_start()
        monkeypatch.setenv(environment.START, environment.read_variable(environment.START).replace(":1:", ":2:"))
    with take(tmp_path):
        assert len(said) == 1 and "waiting for a sign of life" in said[0]


def test_a_long_silence_needs_no_waiting(tmp_path):
    write_lock(tmp_path, host="elsewhere")
    os.utime(tmp_path / LOCK, (time.time() - 3600,) * 2)
    with take(tmp_path) as hold:
        assert hold.has_taken_over


@pytest.mark.parametrize("text", ["", "[]", '{"process": "1; rm -rf /", "machine": []}'])
def test_a_lock_that_says_nothing_is_judged_by_its_age(text, tmp_path, quick):
    (tmp_path / LOCK).write_text(text)
    with take(tmp_path) as hold:
        assert hold.has_taken_over


def test_the_holder_gives_signs_of_life_and_notices_its_loss(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(held_folders, "BEAT_SECS", 0.05)
    monkeypatch.setattr(held_folders._PROCESS_LOCKS, "_thread", None)
    with take(tmp_path) as hold:
        os.utime(tmp_path / LOCK, (0, 0))
        while os.stat(tmp_path / LOCK).st_mtime == 0:
            time.sleep(0.02)
        hold.check_still_held()
        (tmp_path / LOCK).write_text("another's")
        with pytest.raises(FolderHeldError, match="was taken over by another job"):
            hold.check_still_held()
    assert "another job has taken the folder" in caplog.text
    assert (tmp_path / LOCK).read_text() == "another's"


def test_a_lock_that_was_cleaned_away_is_put_back(tmp_path, monkeypatch, unattended):
    with take(tmp_path) as hold:
        text = (tmp_path / LOCK).read_text()
        (tmp_path / LOCK).unlink()
        hold.check_still_held()
        assert os.listdir(tmp_path) == [LOCK] and (tmp_path / LOCK).read_text() == text
        (tmp_path / LOCK).unlink()
        child = os.fork()
        if not child:
            hold.check_still_held()  # not held: the child holds nothing
            os._exit(0 if not os.listdir(tmp_path) else 1)
        assert os.waitpid(child, 0)[1] == 0
        (tmp_path / LOCK).write_text("another's")
        monkeypatch.setattr(held_folders.os.path, "lexists", lambda path: False)  # it came this very moment
        with pytest.raises(FolderHeldError, match="was taken over by another job, because .*lock was removed, or"):
            hold.check_still_held()
        assert os.listdir(tmp_path) == [LOCK] and (tmp_path / LOCK).read_text() == "another's"


def test_a_lock_that_was_given_back_is_not_put_back(tmp_path):
    hold = take(tmp_path)
    lock = hold._lock
    hold.release()
    lock.renew()  # the thread had begun before
    assert os.listdir(tmp_path) == []


def test_a_lock_can_be_given_back_while_it_is_put_back(tmp_path, monkeypatch):
    """Python can collect the hook that holds the folder in the thread that writes the file."""
    hold, write = take(tmp_path), held_folders._write_new_file

    def collect_and_write(path, text):
        hold.release()
        write(path, text)

    monkeypatch.setattr(held_folders, "_write_new_file", collect_and_write)
    (tmp_path / LOCK).unlink()
    thread = threading.Thread(target=hold._lock.renew, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and os.listdir(tmp_path) == []


def test_after_a_silence_a_lock_that_is_gone_is_lost(tmp_path, monkeypatch):
    """Another job may have come in between, trained and ended."""
    with take(tmp_path) as hold:
        # Every look at the clock comes after a silence, also that of the thread which keeps the lock young.
        clock = itertools.count(1e9, 2 * held_folders.SILENT_SECS)
        monkeypatch.setattr(held_folders, "_clock_secs", lambda: next(clock))
        (tmp_path / LOCK).unlink()
        with pytest.raises(FolderHeldError):
            hold.check_still_held()


def test_a_training_goes_on_when_its_lock_is_cleaned_away(tmp_path):
    class CleansUp(tf.estimator.SessionRunHook):
        def after_run(self, run_context, run_values):
            (tmp_path / LOCK).unlink(missing_ok=True)

    estimator_of(tmp_path).train(input_fn, hooks=[CleansUp()], max_steps=4)
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-4") and LOCK not in os.listdir(tmp_path)


def test_ranks_of_one_job_do_not_refuse_each_other(tmp_path, monkeypatch):
    write_lock(tmp_path, host="elsewhere", job="10.0.0.1:1234")
    with pytest.MonkeyPatch.context() as other_job:
        other_job.setattr(held_folders, "SILENT_SECS", 0.0)  # else it would be waited for
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "10.0.0.1")
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1234")
    with take(tmp_path) as hold:
        assert not hold.has_taken_over
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "elsewhere"


def test_a_child_of_a_rank_is_refused_the_folder_in_which_its_parent_trains(tmp_path, monkeypatch):
    for name, text in (("GLOO_RENDEZVOUS_ADDR", "10.0.0.1"), ("GLOO_RENDEZVOUS_PORT", 1), ("RANK", 0), ("SIZE", 2)):
        monkeypatch.setenv(f"HOROVOD_{name}", str(text))
    with take(tmp_path):
        code = """
        import sys
        from npu_bridge.base.held_folders import hold_folder
        hold_folder(sys.argv[1], "training", "a training")
        """
        child = python(code, tmp_path, stderr=subprocess.PIPE)
        assert "is in use" in child.communicate()[1]
        monkeypatch.setenv("HOROVOD_RANK", "1")
        assert python(code, tmp_path).wait() == 0


def test_a_file_system_without_links_will_do(tmp_path, monkeypatch):
    def no_link(*_):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", no_link)
    leave_by_the_dead(tmp_path)
    with take(tmp_path) as hold:
        assert hold.has_taken_over and hold.is_first
    process = held_by_another(tmp_path)
    with pytest.raises(FolderHeldError):
        take(tmp_path)
    process.communicate()


@pytest.mark.parametrize("folder", ["gs://bucket/model", "hdfs://name/model", "", None, "/proc/self"])
def test_what_is_remote_or_cannot_be_written_is_not_held(folder):
    with hold_model_dir(folder) as hold:
        assert not hold.has_taken_over
        hold.check_still_held()


# A save that is not finished yet.
UNFINISHED = "model.ckpt-6_temp/part-00000-of-00001.data-00000-of-00001"


def test_beside_a_training_others_read_and_do_not_train(tmp_path):
    folder = str(tmp_path)
    estimator, stock = estimator_of(folder), _stock_estimator(folder)
    estimator.train(input_fn, max_steps=1)

    def monitored(*hooks, **arguments):
        with tf.Graph().as_default():
            tf1.train.get_or_create_global_step()
            with tf1.train.MonitoredTrainingSession(hooks=hooks, **arguments):
                pass

    def save():
        with tf.Graph().as_default(), tf1.Session() as session:
            session.run(tf1.get_variable("variable", []).initializer)
            NPUSaver().save(session, f"{folder}/other", 1, write_state=False)

    receiver = tf.estimator.export.build_raw_serving_input_receiver_fn({"x": tf.constant([1.0])})
    specs = tf.estimator.TrainSpec(input_fn, max_steps=8), tf.estimator.EvalSpec(input_fn, steps=1)
    trainings = [
        lambda: estimator.train(input_fn, max_steps=8),
        lambda: tf.estimator.train_and_evaluate(estimator, *specs),
        lambda: stock.train(input_fn, max_steps=8),
        lambda: monitored(NPUCheckpointSaverHook(folder, save_steps=1)),
        lambda: monitored(checkpoint_dir=folder),
        save,
    ]
    process = held_by_another(tmp_path)
    (tmp_path / UNFINISHED).parent.mkdir()
    (tmp_path / UNFINISHED).write_text("half of the weights")
    before = set(os.listdir(folder))
    refused = f"{folder} is in use. Expected a folder that no other job uses; got a training, process {process.pid} on "
    for train in trainings:
        with pytest.raises(ModelDirInUseError, match=re.escape(refused)):
            train()
    estimator.evaluate(input_fn, steps=1)
    stock.evaluate(input_fn, steps=1)
    next(estimator.predict(input_fn))
    estimator.export_saved_model(f"{folder}/export", receiver)
    assert before <= set(os.listdir(folder)) and (tmp_path / UNFINISHED).exists(), "the save in progress was deleted"
    process.communicate()
    for train in trainings:
        train()
    assert LOCK not in os.listdir(folder), "given back in the end"


def _stock_estimator(folder):
    config = tf.estimator.RunConfig(model_dir=str(folder), save_checkpoints_steps=2)
    return tf.estimator.Estimator(model_fn, config=config)


_STAGES = pytest.param("stages import Accumulate", marks=pytest.mark.slow("another start of Python"))


@pytest.mark.parametrize("place", ["session import BestCheckpoint", _STAGES])
def test_stock_sessions_hold_their_folder_whatever_is_imported_first(place, tmp_path):
    code = f"""
    import os, sys
    from npu_bridge.{place}
    import tensorflow as tf

    with tf.Graph().as_default():
        tf.compat.v1.train.get_or_create_global_step()
        with tf.compat.v1.train.MonitoredTrainingSession(checkpoint_dir=sys.argv[1]):
            print({LOCK!r} in os.listdir(sys.argv[1]))
    """
    assert python(code, tmp_path, stdout=subprocess.PIPE).communicate()[0] == "True\n"


@pytest.mark.parametrize("make", [estimator_of, _stock_estimator])
def test_a_training_that_fails_gives_the_folder_back(make, tmp_path):
    class Fails(tf.estimator.SessionRunHook):
        def after_run(self, run_context, run_values):
            assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
            raise ValueError("of the script")

    estimator = make(tmp_path)
    with pytest.raises(ValueError, match="of the script"):
        estimator.train(input_fn, hooks=[Fails()], max_steps=4)
    collect_garbage()
    assert LOCK not in os.listdir(tmp_path)
    estimator.train(input_fn, max_steps=4)
    assert LOCK not in os.listdir(tmp_path)


def test_a_killed_job_is_taken_over_and_what_it_left_is_cleared(tmp_path, caplog):
    leftovers = [UNFINISHED, "model.ckpt-10_temp_0a1b/part", "checkpoint.tmp0123abc", "graph.pbtxt.tmp456"]
    leftovers += ["model.ckpt-6.index.tempstate77", "model.ckpt-8.meta.tmp9"]
    kept = ["model.ckpt-best_temp/notes", "other-8_temp/part", "notes.tmp1", "model.ckpt-8.index"]

    def put():
        for name in [*leftovers, *kept]:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("half")

    def left():
        return [name for name in leftovers if (tmp_path / name).exists()]

    put()
    estimator_of(tmp_path).train(input_fn, max_steps=1)
    assert left() == leftovers, "who wrote them may be writing still"
    leave_by_the_dead(tmp_path)
    estimator_of(tmp_path).evaluate(input_fn, steps=1)
    assert left() == leftovers, "only who saves may clear away"
    with caplog.at_level(logging.INFO, "npu_bridge"):
        estimator_of(tmp_path).train(input_fn, max_steps=2)
    assert left() == [] and f"{tmp_path}: taken over from process " in caplog.text
    assert [name for name in kept if not (tmp_path / name).exists()] == []
    process = held_by_another(tmp_path)
    put()
    with pytest.raises(ModelDirInUseError):
        estimator_of(tmp_path).train(input_fn, max_steps=3)
    assert left() == leftovers
    process.communicate()


def test_a_users_own_files_in_the_folder_stay(tmp_path, caplog):
    names = [
        "report.html",
        "report.json",
        "run.toml",
        "history.jsonl",
        "tailing.json",
        "notes.txt",
        "model.ckpt-9_temp",
    ]
    for name in names:
        (tmp_path / name).write_text(f"years of work on {name}")
    for _ in range(2):
        estimator_of(tmp_path, log_step_count_steps=100).train(input_fn, steps=2)
    assert [(tmp_path / name).read_text() for name in names] == [f"years of work on {name}" for name in names]
    assert tf.train.load_variable(str(tmp_path), "global_step") == 4
    for name in ("report.json", "run.toml", "history.jsonl"):  # and without its facts no page is made
        assert f"{name} is a file that npu_bridge did not make" in caplog.text


def test_a_folder_with_a_file_of_others_is_left_whole(tmp_path):
    names = ["own", *(f"{folder}/own" for folder in "abcxyz"), "m/foreign"]  # some are met before the foreign one
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    with pytest.raises(NotOursError):
        remove_own_files(str(tmp_path), lambda path, _: path.endswith("/own"))
    assert all((tmp_path / name).exists() for name in names)


def test_an_interrupted_write_leaves_no_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_file(str(tmp_path / "written")) as file:
        file.write("half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
