"""Damaged checkpoints: one error that says which file, what is wrong and which one is intact, or training from that."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time

import pytest
import tensorflow as tf

from npu_bridge.base.environment import BEGAN, RESTARTS, set_variables_temporarily
from npu_bridge.npu_init import ExponentialUpdateLossScaleManager
from npu_bridge.session import DamagedCheckpointError, check_checkpoint, check_newest_checkpoint, updates_dealt
from npu_bridge.session.damaged_checkpoints import mismatches_explained
from tests.goldens.counting_estimator import estimator_of, input_fn
from tests.ranks.ways import StartAndEnd

tf1 = tf.compat.v1
NEWEST, INTACT = "model.ckpt-6", "model.ckpt-4"
INDEX, DATA, STATE = f"{NEWEST}.index", f"{NEWEST}.data-00000-of-00001", "checkpoint"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    estimator_of(folder).train(input_fn, max_steps=6)
    return folder


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    """A copy of the checkpoints of steps 0, 2, 4 and 6."""
    monkeypatch.delenv(RESTARTS, raising=False)
    return shutil.copytree(trained, tmp_path / "model")


def cut(path, size):
    with open(path, "r+b") as file:
        file.truncate(int(os.path.getsize(path) * size))


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 0x40
    path.write_bytes(content)


def become_folder(path):
    path.unlink()
    path.mkdir()


# The file that is damaged, how, and what is said of it.
KINDS = {
    "no index": (INDEX, os.remove, "no such file"),
    "empty index": (INDEX, lambda path: cut(path, 0), "too short"),
    "half an index": (INDEX, lambda path: cut(path, 0.5), "not an sstable"),
    "a bit of the index": (INDEX, lambda path: flip(path, 0.3), "corrupt|checksum"),
    "a folder for an index": (INDEX, become_folder, "directory"),
    "no data": (DATA, os.remove, "no such file"),
    "half of the data": (DATA, lambda path: cut(path, 0.5), "Read less bytes"),
    "a bit of the data": (DATA, lambda path: flip(path, 0.5), "table, which cannot be read .*Checksum"),
    "a folder for data": (DATA, become_folder, "directory"),
    "empty list": (STATE, lambda path: cut(path, 0), "names no checkpoint"),
    "noise for a list": (STATE, lambda path: path.write_bytes(bytes(range(256))), "names no checkpoint"),
    "a folder for a list": (STATE, become_folder, "names no checkpoint"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_what_is_wrong_and_the_newest_intact_one(folder, kind, monkeypatch, caplog):
    name, damage, what = KINDS[kind]
    check_newest_checkpoint(str(folder))
    damage(folder / name)
    listed = NEWEST if name == STATE else INTACT  # what is damaged is then only the list
    with pytest.raises(DamagedCheckpointError) as raised:
        check_newest_checkpoint(str(folder), may_use_older=True)
    text = str(raised.value)
    assert text.startswith(f"checkpoint: {folder / name} is damaged. Expected a file as it was saved; got ")
    assert re.search(what, text) and f"The newest intact checkpoint is {listed}; to resume from it, write" in text
    assert len(text) < 500 + 3 * len(str(folder)) and "\n" not in text

    monkeypatch.setenv(RESTARTS, "3")
    with pytest.raises(DamagedCheckpointError):
        check_newest_checkpoint(str(folder))  # evaluation changes nothing
    check_newest_checkpoint(str(folder), may_use_older=True)
    assert f"{name} is damaged" in caplog.text and f"Training resumes from {listed}." in caplog.text
    assert tf.train.latest_checkpoint(str(folder)) == str(folder / listed)
    known = tf.train.get_checkpoint_state(str(folder)).all_model_checkpoint_paths
    earlier = [] if name == STATE else ["model.ckpt-0", "model.ckpt-2"]
    assert [os.path.basename(path) for path in known] == [*earlier, listed]
    check_newest_checkpoint(str(folder))


def test_the_line_to_write_fixes_it(folder):
    cut(folder / DATA, 0.5)
    with pytest.raises(DamagedCheckpointError) as raised:
        check_checkpoint(str(folder))
    line, path = re.search(r"write (.*) to (.*)\.$", str(raised.value)).groups()
    with open(path, "w") as file:
        file.write(line)
    check_checkpoint(str(folder))
    assert tf.train.latest_checkpoint(str(folder)) == str(folder / INTACT)


def test_a_checkpoint_that_a_training_replaces_while_it_is_read_is_not_damaged(folder, monkeypatch):
    load = tf.train.load_checkpoint

    def load_late(prefix):
        (folder / STATE).write_text(f'model_checkpoint_path: "{NEWEST}"')
        if prefix.endswith(INTACT):
            (folder / f"{INTACT}.data-00000-of-00001").unlink(missing_ok=True)
        return load(prefix)

    (folder / STATE).write_text(f'model_checkpoint_path: "{INTACT}"')
    monkeypatch.setattr(tf.train, "load_checkpoint", load_late)
    check_checkpoint(str(folder))
    cut(folder / DATA, 0.5)
    with pytest.raises(DamagedCheckpointError, match=DATA):
        check_checkpoint(str(folder))


def test_a_checkpoint_is_read_again_only_if_its_files_have_changed(folder, monkeypatch):
    load, read = tf.train.load_checkpoint, []
    monkeypatch.setattr(tf.train, "load_checkpoint", lambda path: [read.append(path), load(path)][1])
    for seconds, count in ((3600, 2), (-3600, 3)):  # of new files, the times say little
        for file in (INDEX, DATA):
            os.utime(folder / file, (time.time() + seconds, time.time() + seconds))
        for _ in range(2):
            check_newest_checkpoint(str(folder))
        assert len(read) == count
    flip(folder / DATA, 0.5)
    with pytest.raises(DamagedCheckpointError):
        check_newest_checkpoint(str(folder))


def test_where_nothing_is_intact(folder, monkeypatch):
    monkeypatch.setenv(RESTARTS, "3")
    for path in folder.glob("*.index"):
        cut(path, 0.5)
    with pytest.raises(
        DamagedCheckpointError, match="No intact checkpoint is left in .*; remove .*checkpoint to start"
    ):
        check_newest_checkpoint(str(folder), may_use_older=True)


def test_steps_are_compared_as_numbers(folder):
    cut(folder / STATE, 0)
    for file in folder.glob(f"{INTACT}.*"):
        shutil.copy(file, folder / file.name.replace(INTACT, "model.ckpt-10"))
    with pytest.raises(DamagedCheckpointError, match=r"newest intact checkpoint is model\.ckpt-10;"):
        check_checkpoint(str(folder))


def test_where_there_is_nothing_and_names_that_look_like_patterns(trained, tmp_path):
    """TensorFlow cannot find the latter, and says so itself."""
    for path in (tmp_path, tmp_path / "none", tmp_path / "run[1]" / "model.ckpt-3"):
        check_checkpoint(str(path))
    check_newest_checkpoint(str(shutil.copytree(trained, tmp_path / "run[1]*?")))


def test_the_variable_that_differs_is_named_beside_scales_and_parts_of_variables(tmp_path):
    """The restore of reference variables fails; scales and parts have other names in checkpoints than in the graph."""
    for width in (2, 3):
        with tf.Graph().as_default(), contextlib.ExitStack() as expected:
            ExponentialUpdateLossScaleManager(8.0, 2)
            with tf1.variable_scope("", partitioner=tf1.fixed_size_partitioner(2)):
                tf1.get_variable("embedding", [4, 2])
            tf1.get_variable("top", [width], use_resource=False)
            tf1.train.get_or_create_global_step()
            if width == 3:
                words = r"Expected top of shape \(3,\); got the shape \(2,\)"
                expected.enter_context(pytest.raises(tf.errors.InvalidArgumentError, match=words))
            with mismatches_explained(str(tmp_path)):
                tf1.train.MonitoredTrainingSession(checkpoint_dir=str(tmp_path)).close()


def test_an_estimator_says_so_before_it_does_anything(folder, tmp_path):
    cut(folder / DATA, 0.5)
    estimator, files = estimator_of(folder), sorted(os.listdir(folder))
    newest = str(folder / NEWEST)
    calls = {
        "train": lambda: estimator.train(input_fn, max_steps=8),
        "evaluate": lambda: estimator.evaluate(input_fn, steps=1),
        "that one": lambda: estimator.evaluate(input_fn, steps=1, checkpoint_path=newest),
        "predict": lambda: next(estimator.predict(input_fn)),
        "start": lambda: estimator_of(tmp_path / "other", warm_start_from=newest).train(input_fn, max_steps=8),
    }
    for name, call in calls.items():
        with pytest.raises(DamagedCheckpointError, match=rf"{DATA} is damaged.*newest intact checkpoint.* {INTACT}"):
            call()
            pytest.fail(name)
    assert sorted(os.listdir(folder)) == files
    assert estimator.evaluate(input_fn, steps=1, checkpoint_path=str(folder / INTACT))["global_step"] == 4


def test_rows_go_on_after_the_newest_intact_one(folder, monkeypatch):
    """In a session, no other code checks before it restores."""
    cut(folder / DATA, 0.5)
    with pytest.raises(DamagedCheckpointError):
        updates_dealt(folder)
    monkeypatch.setenv(RESTARTS, "1")
    assert updates_dealt(folder) == 4
    assert tf.train.latest_checkpoint(str(folder)) == str(folder / INTACT)


def test_a_list_that_is_lost_while_the_job_runs_is_made_anew(folder, monkeypatch, caplog):
    """One that was removed before is a wish to start from initial values."""
    saved = os.path.getmtime(folder / f"{NEWEST}.index")
    (folder / STATE).unlink()
    monkeypatch.setenv(RESTARTS, "1")
    for began in ("", str(saved + 1)):
        monkeypatch.setenv(BEGAN, began)
        check_newest_checkpoint(str(folder), may_use_older=True)
        assert tf.train.latest_checkpoint(str(folder)) is None
    monkeypatch.setenv(BEGAN, str(saved - 1))
    check_newest_checkpoint(str(folder))
    assert tf.train.latest_checkpoint(str(folder)) is None
    check_newest_checkpoint(str(folder), may_use_older=True)
    assert f"{STATE} is damaged. Expected a file as it was saved; got no such file." in caplog.text
    assert tf.train.latest_checkpoint(str(folder)) == str(folder / NEWEST)


def test_a_folder_in_place_of_the_list_keeps_what_is_in_it(folder, monkeypatch):
    become_folder(folder / STATE)
    (folder / STATE / "notes.txt").write_text("mine")
    monkeypatch.setenv(RESTARTS, "1")
    check_newest_checkpoint(str(folder), may_use_older=True)
    assert tf.train.latest_checkpoint(str(folder)) == str(folder / NEWEST)
    assert [path.read_text() for path in folder.glob("checkpoint.folder_*/notes.txt")] == ["mine"]


def train_on(folder):
    """Returns, on a rank, the weight before and after the training resumes, from a shared folder."""
    weight = StartAndEnd()
    with set_variables_temporarily(lambda: {RESTARTS: "1"}):
        estimator_of(folder, {"is_distributed": True}).train(input_fn, [weight], max_steps=8)
    return weight.seen


def test_ranks_go_on_from_the_same_one(on_ranks, folder):
    cut(folder / INDEX, 0.5)
    assert on_ranks(2, train_on, str(folder)) == [[4.0, 8.0]] * 2
