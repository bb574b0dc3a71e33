"""Estimators on several ranks: which rank writes, the common start, and how resuming works."""

from __future__ import annotations

import contextlib
import io
import os
import time

import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.environment import MEMORY_FOLDER
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.estimator.npu.npu_hook import NPUBroadcastGlobalVariablesHook, NPUCheckpointSaverHook
from npu_bridge.gradients import collections
from tests.goldens.scaled_estimator import batches_of_rows, model_fn
from tests.goldens.two_layers import assert_same_bits
from tests.once import lines_said
from tests.rank_pool import on_each_rank

tf1 = tf.compat.v1


class Recorder(tf.estimator.SessionRunHook):
    """Keeps the loss scale used in every step and all variables as they are at the start and at the end."""

    def __init__(self):
        self.scales, self.variables = [], []

    def begin(self):
        self._scale = tf1.get_collection(collections.LOSS_SCALE)[0]

    def before_run(self, run_context):
        if not self.variables:
            self._record(run_context.session)
        return tf.estimator.SessionRunArgs(self._scale)

    def after_run(self, run_context, run_values):
        self.scales.append(float(run_values.results))

    def end(self, session):
        self._record(session)

    def _record(self, session):
        self.variables.append(session.run({variable.name: variable for variable in tf1.global_variables()}))


def input_fn(rank, size):
    """Eternal batches; on several ranks, every 55th one overflows."""
    return batches_of_rows(55, 10 if size > 1 else None).repeat().shard(size, rank)


def own_params():
    """Of this rank, whose initial values are not those of others."""
    ranks = collective.current()
    return {"seed": 10 + ranks.rank, "is_distributed": ranks.size > 1}


def estimator_of(kind, config):
    """Returns an estimator, and the hooks that a script gives it."""
    if kind == "NPUEstimator":
        return NPUEstimator(model_fn, config=config, params=own_params()), []
    if kind == "without hooks":
        return tf1.estimator.Estimator(model_fn, config=config, params=own_params()), []
    hook = NPUBroadcastGlobalVariablesHook(0, collective.current().rank)
    return tf.estimator.Estimator(model_fn, config=config, params=own_params()), [hook]


def train(folder, max_steps, kind, is_shared, steps=None):
    """Trains on a rank up to `max_steps`, or for some steps; ranks differ in initial values and perhaps in folders."""
    model_dir = folder if is_shared else os.path.join(folder, f"rank_{collective.current().rank}")
    config = NPURunConfig(model_dir=model_dir, save_checkpoints_steps=5, save_summary_steps=5, log_step_count_steps=5)
    recorder = Recorder()
    estimator, hooks = estimator_of(kind, config)
    estimator.train(input_fn_of_this_rank(), [*hooks, recorder], steps, max_steps)
    files = os.listdir(model_dir) if os.path.isdir(model_dir) else []
    return recorder.scales, recorder.variables, sorted(files)


@pytest.mark.few_fast(1, "the stock Estimator in the same way")
@pytest.mark.parametrize("kind", ["NPUEstimator", "Estimator"])
def test_a_resumed_job_continues_rank_0s_checkpoint_on_every_rank(on_ranks, tmp_path, kind):
    whole = on_ranks(2, train, str(tmp_path / "whole"), 12, kind, False)
    first = on_ranks(2, train, str(tmp_path / "parts"), 7, kind, False)
    second = on_ranks(2, train, str(tmp_path / "parts"), 12, kind, False)
    for results in (whole, first, second):
        assert results[0][0] == results[1][0], "loss scales differ between ranks"
        for variables, others in zip(results[0][1], results[1][1]):
            assert_same_bits(others, variables)
    # the part trained after resuming starts from what the first part ended with, counters included
    assert_same_bits(second[1][1][0], first[0][1][1])
    scales = whole[0][0]
    assert any(later < earlier for earlier, later in zip(scales, scales[1:])), f"nothing overflowed: {scales}"


@pytest.mark.parametrize("kind", ["NPUEstimator", "Estimator"])
def test_only_rank_0_writes(on_ranks, tmp_path, kind):
    results = on_ranks(2, train, str(tmp_path), 6, kind, False)
    (_, _, files_of_rank_0), (_, _, files_of_rank_1) = results
    assert any(name.startswith("model.ckpt-6") for name in files_of_rank_0)
    assert any(name.startswith("events") for name in files_of_rank_0)
    assert files_of_rank_1 == []


@pytest.mark.few_fast(2, "both estimators take the same way")
@pytest.mark.parametrize("kind, is_shared", [("NPUEstimator", True), ("NPUEstimator", False), ("Estimator", True)])
def test_a_folder_at_its_last_step_ends_a_training_on_every_rank(on_ranks, tmp_path, kind, is_shared):
    """Also on a rank whose own folder has no checkpoint."""
    on_ranks(2, train, str(tmp_path), 5, kind, is_shared)
    for scales, variables, _ in on_ranks(2, train, str(tmp_path), 5, kind, is_shared):
        assert scales == variables == []


def input_fn_of_this_rank():
    communicator = collective.current()
    return lambda: input_fn(communicator.rank, communicator.size)


@pytest.mark.slow("resumed jobs have a fast case")
def test_a_number_of_steps_is_counted_from_rank_0s_checkpoint(on_ranks, tmp_path):
    for steps, reached in ((5, 5), (4, 9)):
        results = on_ranks(2, train, str(tmp_path), None, "NPUEstimator", False, steps)
        assert [variables[-1]["global_step:0"] for _, variables, _ in results] == [reached] * 2


@pytest.mark.parametrize("counts", [{"steps": 1, "max_steps": 2}, {"max_steps": 0}], ids=str)
@on_each_rank(2)
def test_counts_of_steps_that_are_refused_on_one_rank_are_refused_on_two(tmp_path, counts):
    with pytest.raises(ValueError, match="max_steps"):
        estimator_of("NPUEstimator", NPURunConfig(model_dir=tmp_path))[0].train(input_fn_of_this_rank(), **counts)


def host_model_fn(features, labels, mode, params):
    def write(loss, step):
        with tf.summary.create_file_writer(os.path.join(params["folder"], params["rank"])).as_default():
            return tf.summary.scalar("host loss", loss, step=step)

    spec = model_fn(features, labels, mode, {"is_distributed": True})
    return NPUEstimatorSpec(
        mode, loss=spec.loss, train_op=spec.train_op, host_call=(write, [spec.loss, tf1.train.get_global_step()])
    )


def train_with_host_call(folder):
    """On a rank: what it shows on standard error, and the hooks that an estimator brings along."""
    rank, shown, seen = collective.current().rank, io.StringIO(), []

    class Seen(tf.estimator.SessionRunHook):
        def begin(self):
            seen.append(estimator.config.save_checkpoints_steps)

    config = NPURunConfig(model_dir=os.path.join(folder, "model"), save_checkpoints_steps=2)
    estimator = NPUEstimator(host_model_fn, config=config, params={"folder": folder, "rank": str(rank)})
    with contextlib.redirect_stderr(shown):
        estimator.train(input_fn_of_this_rank(), max_steps=4, hooks=[Seen()])
    return [line.split(" | ")[0] for line in shown.getvalue().splitlines() if line.startswith("step ")], seen


def test_rank_0_alone_shows_saves_and_runs_host_calls(on_ranks, tmp_path):
    (lines, interval), (other_lines, other_interval) = on_ranks(2, train_with_host_call, str(tmp_path))
    assert lines[-1] == "step 4/4 (100 %)" and other_lines == []
    assert interval == other_interval == [2]  # what the script wrote, though rank 0 alone writes
    assert sorted(os.listdir(tmp_path)) == ["0", "model"], "no writer of rank 1"
    events = [
        event.step
        for file in os.listdir(tmp_path / "0")
        for event in tf1.train.summary_iterator(str(tmp_path / "0" / file))
        if event.summary.value
    ]
    assert events == [1, 2, 3, 4]
    assert tf.train.latest_checkpoint(str(tmp_path / "model")).endswith("model.ckpt-4")


class SlowSave(tf.estimator.CheckpointSaverListener):
    def before_save(self, session, global_step_value):
        time.sleep(0.7)


def train_and_read(folder, kind):
    """On a rank: trains in a shared folder and reads it at once: the newest checkpoint, and a loss of it."""
    communicator = collective.current()
    config = NPURunConfig(model_dir=folder, save_checkpoints_steps=5, save_summary_steps=0, log_step_count_steps=None)
    found = []
    if kind == "MonitoredSession":
        for last_step in (3, 5):
            with tf.Graph().as_default():
                features, labels = tf1.data.make_one_shot_iterator(input_fn(communicator.rank, 2)).get_next()
                spec = model_fn(features, labels, tf.estimator.ModeKeys.TRAIN, own_params())
                hooks = [NPUBroadcastGlobalVariablesHook(0), tf1.train.StopAtStepHook(last_step=last_step)]
                if communicator.rank == 0:  # after the hook that waits
                    hooks.append(NPUCheckpointSaverHook(folder, save_steps=100, listeners=[SlowSave()]))
                creator = tf1.train.ChiefSessionCreator(checkpoint_dir=folder)
                with tf1.train.MonitoredSession(creator, hooks) as session:
                    while not session.should_stop():
                        session.run(spec.train_op)
            found.append(os.path.basename(tf.train.latest_checkpoint(folder)))
        return found
    estimator, hooks = estimator_of(kind, config)
    listeners = [SlowSave()] if communicator.rank == 0 else None
    for max_steps in (3, 5):
        estimator.train(lambda: input_fn(communicator.rank, 2), hooks, None, max_steps, saving_listeners=listeners)
        found.append(os.path.basename(estimator.latest_checkpoint()))
        found.append(float(estimator.evaluate(lambda: input_fn(0, 1), steps=1)["loss"]))
    return found


@pytest.mark.slow("test_a_resumed_job_continues_rank_0s_checkpoint_on_every_rank finds it, too")
@pytest.mark.parametrize("kind", ["NPUEstimator", "Estimator", "without hooks", "MonitoredSession"])
def test_what_rank_0_has_saved_is_there_when_training_ends(on_ranks, tmp_path, kind):
    of_rank_0, of_rank_1 = on_ranks(2, train_and_read, str(tmp_path), kind)
    assert of_rank_0 == of_rank_1
    assert [name for name in of_rank_1 if isinstance(name, str)] == ["model.ckpt-3", "model.ckpt-5"]


@on_each_rank(2, gives="model.ckpt-12")
def test_a_saver_of_rank_0_alone_stops_no_rank_that_keeps_copies_in_memory(tmp_path):
    """Trains longer than until the first copy."""
    communicator = collective.current()
    memory = os.path.join(tmp_path, f"memory_{communicator.rank}")
    os.mkdir(memory, 0o700)
    os.environ[MEMORY_FOLDER] = memory
    hooks = [NPUCheckpointSaverHook(tmp_path, save_steps=50)] if communicator.rank == 0 else []
    config = NPURunConfig(model_dir=tmp_path, save_checkpoints_steps=100, log_step_count_steps=None)
    try:
        estimator = NPUEstimator(model_fn, config=config, params={"seed": 1, "size": communicator.size})
        estimator.train(input_fn_of_this_rank(), hooks, max_steps=12)
    finally:
        del os.environ[MEMORY_FOLDER]
    return os.path.basename(estimator.latest_checkpoint())


@on_each_rank(2, gives="model.ckpt-60")
def test_an_interval_of_rank_0_alone_for_lines_stops_no_rank(tmp_path):
    """Trains until speeds have been compared; rank 0 alone is asked for lines of progress."""
    every = 20 if collective.current().rank == 0 else None
    config = NPURunConfig(model_dir=str(tmp_path), log_step_count_steps=every)
    estimator = NPUEstimator(model_fn, config=config, params=own_params())
    estimator.train(input_fn_of_this_rank(), max_steps=60)
    return os.path.basename(estimator.latest_checkpoint())


def save_in(folder, own_folders, write_state):
    """On a rank: what is said of savers while each rank saves under a name of its own."""
    rank = collective.current().rank
    folder = os.path.join(folder, str(rank)) if own_folders else folder
    os.makedirs(folder, exist_ok=True)
    with lines_said() as lines, tf.Graph().as_default(), tf1.Session() as session:
        session.run(tf1.get_variable("weight", initializer=1.0).initializer)
        for step in range(3):
            tf1.train.Saver().save(session, os.path.join(folder, f"of_rank_{rank}"), step, write_state=write_state)
    return [text for text in lines if text.startswith("checkpoint: ")]


def test_ranks_that_save_into_one_folder_are_told_once(on_ranks, tmp_path):
    (said,) = sum(on_ranks(2, save_in, str(tmp_path / "one"), False, True), [])
    assert "ranks 0 and 1 save into one folder" in said and str(tmp_path / "one") in said
    for name, own_folders, write_state in (("own", True, True), ("without_state", False, False)):
        assert on_ranks(2, save_in, str(tmp_path / name), own_folders, write_state) == [[], []]
