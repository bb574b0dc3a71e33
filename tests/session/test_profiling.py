"""A trace that TensorBoard opens, finished whatever happens."""

from __future__ import annotations

import json
import pathlib

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2  # what TensorBoard's profile page reads

from npu_bridge.estimator.npu.npu_config import NPURunConfig, ProfilingConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.session import profiling
from tests.goldens.two_layers import assert_same_bits
from tests.session.models import dataset, model_fn, session_config, train_in_session, train_npu_estimator

tf1 = tf.compat.v1


def _options(folder):
    return json.dumps({"output": str(folder), "training_trace": "on"})


def _profiled(folder):
    return session_config(profiling_mode=True, profiling_options=_options(folder))


def _runs_traced(folder):
    """The number of session runs in the only trace of a folder; the trace holds operators too."""
    (file,) = pathlib.Path(folder).glob("plugins/profile/*/*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(file.read_bytes())
    names = [
        plane.event_metadata[event.metadata_id].name
        for plane in space.planes
        for line in plane.lines
        for event in line.events
    ]
    assert any("MatMul" in name for name in names), "no operator in the trace"
    return sum(name.startswith("SessionRun") for name in names)


@pytest.fixture(autouse=True)
def no_profiler_is_left_running():
    yield
    with pytest.raises(tf.errors.UnavailableError):
        tf.profiler.experimental.stop()


def test_session_is_traced_until_it_closes(tmp_path):
    expected = train_in_session()
    assert_same_bits(train_in_session(_profiled(tmp_path / "new folder")), expected)
    assert _runs_traced(tmp_path / "new folder") == 7, "one that initialises, five steps, one that reads the variables"


def test_trace_ends_after_some_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "PROFILED_RUNS", 3)
    train_in_session(_profiled(tmp_path))
    assert _runs_traced(tmp_path) == 3


@pytest.mark.parametrize("mode", ["train", "evaluate"])
def test_trace_is_finished_when_an_estimator_fails(tmp_path, mode):
    config = NPURunConfig(
        model_dir=str(tmp_path / "model"), profiling_config=ProfilingConfig(True, _options(tmp_path / "trace"))
    )
    estimator = NPUEstimator(model_fn, config=config)
    with pytest.raises(RuntimeError, match="on purpose"):
        getattr(estimator, mode)(dataset, hooks=[_Failing()], steps=5)
    assert _runs_traced(tmp_path / "trace") >= 3


class _Failing(tf.estimator.SessionRunHook):
    runs = 0

    def before_run(self, run_context):
        self.runs += 1
        if self.runs == 4:
            raise RuntimeError("on purpose")


def test_trace_is_finished_when_a_session_fails(tmp_path):
    with pytest.raises(tf.errors.InvalidArgumentError), tf.Graph().as_default():
        with tf1.Session(config=_profiled(tmp_path)) as session:
            session.run(tf.matmul([[1.0]], [[2.0]], name="MatMul"))
            session.run(tf1.placeholder(tf.float32, [], "forgotten"))
    assert _runs_traced(tmp_path) >= 1


@pytest.mark.parametrize("is_estimator", [False, True])
def test_a_run_that_the_script_traces_ends_it(tmp_path, is_estimator):
    if is_estimator:
        options = {"profiling_config": ProfilingConfig(True, _options(tmp_path / "ours"))}
        with tf.Graph().as_default():  # its writer of summaries is one of version 1
            hook = tf.estimator.ProfilerHook(save_steps=2, output_dir=str(tmp_path))
        config = NPURunConfig(model_dir=str(tmp_path / "model"), **options)
        NPUEstimator(model_fn, config=config).train(dataset, hooks=[hook], steps=5)
        assert list(tmp_path.glob("timeline-*.json"))
    else:
        metadata = tf1.RunMetadata()
        with tf.Graph().as_default(), tf1.Session(config=_profiled(tmp_path / "ours")) as session:
            session.run(tf.matmul([[1.0]], [[2.0]], name="MatMul"))
            traced = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)
            session.run(tf.constant(1.0) + 1.0, options=traced, run_metadata=metadata)
        assert metadata.step_stats.dev_stats
    assert _runs_traced(tmp_path / "ours") >= 1


def test_a_second_profiler_is_not_disturbed(tmp_path, caplog):
    tf.profiler.experimental.start(str(tmp_path / "own"))
    train_in_session(_profiled(tmp_path / "ours"))
    tf.profiler.experimental.stop()
    assert "another profiler is running" in caplog.text
    assert len(list((tmp_path / "own").rglob("*.xplane.pb"))) == 1
    assert not list((tmp_path / "ours").rglob("*.xplane.pb"))


def profile_on_a_rank(folder):
    """Trains with tracing on a rank."""
    train_npu_estimator(f"{folder}/model", profiling_config=ProfilingConfig(True, _options(folder)))


def test_each_rank_has_a_trace_of_its_own(on_ranks, tmp_path):
    on_ranks(2, profile_on_a_rank, str(tmp_path))
    assert [_runs_traced(tmp_path / name) >= 5 for name in ("rank_0", "rank_1")] == [True, True]
