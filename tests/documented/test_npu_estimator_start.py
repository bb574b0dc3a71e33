"""The start of an `NPUEstimator`'s training, the order of its hooks, and its exports."""

from __future__ import annotations

import json
import os
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.estimator.npu.npu_hook import (
    NPUCheckpointSaverHook,
    NPUInfeedOutfeedSessionHook,
    NPULogOutfeedSessionHook,
    NPUShutDownHook,
    SetIterationsVarHook,
)
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from tests.goldens.counting_estimator import estimator_of, input_fn, model_fn
from tests.options.conftest import quiet_environment  # noqa: F401 - the same quiet here
from tests.ranks.ways import Named, log_begins

tf1 = tf.compat.v1
TRAIN, EVAL = tf.estimator.ModeKeys.TRAIN, tf.estimator.ModeKeys.EVAL


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of checkpoints by the weight they hold."""
    folder = tmp_path_factory.mktemp("trained")
    for weight in (10, 20, 30, 40):
        estimator_of(folder / str(weight), {"start": weight - 1.0}).train(input_fn, steps=1)
    return folder


def first_weight(estimator):
    estimator.train(input_fn, steps=1)
    return estimator.get_variable_value("weight") - 1.0


def serving_input_fn():
    x = tf1.placeholder(tf.float32, [None])
    return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})


def job_file(folder, name, **content):
    path = folder / name
    path.write_text(json.dumps({"device_info": {"Index": 0}, "rank_table_file": "", "rank_size": 1, **content}))
    return str(path)


def test_a_start_is_looked_for_in_four_places(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("RESTORE_FROM", str(trained / "40" / "model.ckpt-1"))
    assert first_weight(estimator_of(tmp_path / "last resort")) == 40.0
    job = job_file(tmp_path, "job.json", local_checkpoint_dir=str(trained / "20"))
    assert first_weight(estimator_of(tmp_path / "job", job_start_file=job)) == 20.0
    asked = {"job_start_file": job, "warm_start_from": str(trained / "10")}
    assert first_weight(estimator_of(tmp_path / "asked", **asked)) == 10.0
    monkeypatch.setenv("LOCAL_CHECKPOINT_DIR", str(trained / "30"))
    assert first_weight(estimator_of(tmp_path / "environment")) == 30.0
    again = estimator_of(tmp_path / "environment")
    assert first_weight(again) == 31.0, "its own checkpoint comes first"
    assert again.get_variable_value("global_step") == 2


def test_a_resumed_training_does_not_need_its_start(trained, tmp_path):
    shutil.copytree(trained / "10", tmp_path / "start")
    start = tf.estimator.WarmStartSettings(str(tmp_path / "start"), vars_to_warm_start=["weight"])
    ours = {"is_distributed": True}
    assert first_weight(estimator_of(tmp_path / "out", ours, warm_start_from=start)) == 10.0
    shutil.rmtree(tmp_path / "start")
    assert first_weight(estimator_of(tmp_path / "out", ours, warm_start_from=start)) == 11.0


def test_a_start_that_is_not_there_is_an_error(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("RESTORE_FROM", str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"RESTORE_FROM names no checkpoint\. Expected a checkpoint.* got .*gone"):
        estimator_of(tmp_path / "out")
    estimator_of(tmp_path / "out", warm_start_from=str(trained / "10"))  # the variable is not asked


def test_a_saved_model_is_a_start(trained, tmp_path, monkeypatch):
    exported = estimator_of(trained / "20").export_saved_model(str(tmp_path / "export"), serving_input_fn).decode()
    serve = tf.saved_model.load(exported).signatures["serving_default"]
    np.testing.assert_array_equal(serve(x=tf.constant([1.0, 2.0]))["sum"], [21.0, 22.0])
    monkeypatch.setenv("RESTORE_FROM", exported)
    assert first_weight(estimator_of(tmp_path / "out")) == 20.0


def test_a_job_for_more_ranks_is_not_trained_alone(tmp_path):
    with pytest.raises(RuntimeError, match=r"rank_size .*Expected 1; got 8\. .*npu-run -np 8"):
        estimator_of(tmp_path / "out", job_start_file=job_file(tmp_path, "job.json", rank_size=8))
    with pytest.raises(ValueError, match="rank_size is out of range"):
        estimator_of(tmp_path / "out", job_start_file=job_file(tmp_path, "job.json", rank_size=0))


def test_hooks_come_in_order(tmp_path, monkeypatch):
    log = []
    log_begins(monkeypatch, log, NPUCheckpointSaverHook, NPUInfeedOutfeedSessionHook, SetIterationsVarHook)

    def model_fn_with_hooks(features, mode):
        of_spec = {
            "training_hooks": [Named("of the spec", log)],
            "training_chief_hooks": [Named("of the chief", log)],
            "evaluation_hooks": [Named("of the spec", log)],
            "host_call": (lambda step: tf.no_op(), [tf1.train.get_global_step()]),
        }
        return model_fn(features, mode, {"of_spec": of_spec})

    config = NPURunConfig(model_dir=str(tmp_path), iterations_per_loop=2, save_checkpoints_steps=2)
    estimator = NPUEstimator(model_fn_with_hooks, config=config)
    estimator.train(input_fn, hooks=[Named("given", log)], steps=2)
    assert log == [
        "NPUCheckpointSaverHook",
        "of the chief",
        "SetIterationsVarHook",
        "given",
        "NPUInfeedOutfeedSessionHook",
        "of the spec",
    ]
    log.clear()
    estimator.evaluate(input_fn, steps=1, hooks=[Named("given", log)])
    assert log == ["given", "NPUInfeedOutfeedSessionHook", "of the spec"]


@pytest.mark.parametrize("is_saved", [False, True])
def test_graphs_are_saved_with_checkpoints_as_the_config_says(is_saved, tmp_path):
    estimator_of(tmp_path, checkpoint_save_graph_def=is_saved).train(input_fn, steps=1)
    assert {name for name in os.listdir(tmp_path) if name.endswith(("ckpt-1.meta", "pbtxt"))} == (
        {"model.ckpt-1.meta", "graph.pbtxt"} if is_saved else set()
    )


def test_the_hook_of_host_calls_runs_its_operators_with_every_run(graph, tmp_path):
    count = tf1.get_variable("count", initializer=0)
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        written = tf.summary.scalar("count", count.assign_add(1), step=tf.cast(count, tf.int64))
    hook = NPUInfeedOutfeedSessionHook([written], "channel")
    with tf1.train.MonitoredSession(hooks=[hook]) as session:
        for _ in range(3):
            session.run([])
    (file,) = os.listdir(tmp_path)
    events = tf1.train.summary_iterator(str(tmp_path / file))
    assert len([event for event in events if event.summary.value]) == 3


def test_hooks_without_effect(graph):
    count = tf1.get_variable("count", initializer=0)
    step = count.assign_add(1)
    hooks = [NPUShutDownHook(), NPUShutDownHook(tf1.train.Scaffold()), NPULogOutfeedSessionHook("stderr")]
    with tf1.train.MonitoredSession(hooks=hooks) as session:
        assert [session.run(step) for _ in range(2)] == [1, 2]
    assert graph.get_collection(tf1.GraphKeys.LOCAL_VARIABLES) == []


def test_a_checkpoint_of_another_model_is_told_with_the_variable_that_differs(trained, tmp_path):
    def wider_model_fn(features, mode):
        weight = tf1.get_variable("weight", [2])
        loss = tf.reduce_sum(weight * features["x"])
        train_op = tf1.train.GradientDescentOptimizer(1.0).minimize(loss, tf1.train.get_global_step())
        return NPUEstimatorSpec(mode, loss=loss, train_op=train_op)

    shutil.copytree(trained / "10", tmp_path / "10")
    estimator = NPUEstimator(wider_model_fn, config=NPURunConfig(model_dir=str(tmp_path / "10")))
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        estimator.train(input_fn, steps=1)
    found = r"10/model.ckpt-1 is a checkpoint of another model. Expected weight of shape \(2,\); got the shape \(\)"
    assert re.search(found, str(caught.value))


def test_a_folder_that_cannot_be_is_told_before_anything_is_built(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"model_dir cannot be used. .*got .*file \(File exists\)"):
        estimator_of(tmp_path / "file").train(input_fn, steps=1)


def test_a_spec_without_a_loss_or_a_step_says_what_to_pass(graph):
    loss = tf1.constant(1.0)
    with pytest.raises(ValueError, match=r"train_op is missing.*Pass train_op=optimizer.minimize\(loss, tf.train"):
        NPUEstimatorSpec(TRAIN, loss=loss)
    with pytest.raises(ValueError, match="NPUEstimatorSpec: loss is missing. Expected a value in mode 'eval'"):
        NPUEstimatorSpec(EVAL)
    assert NPUEstimatorSpec(EVAL, loss=loss).train_op is None


def uncounted_model_fn(features, mode, params):
    weight = tf1.get_variable("weight", [])
    train_op = tf1.train.GradientDescentOptimizer(1.0).minimize(weight * features["x"][0])
    if params["counts"]:
        train_op = tf.group(train_op, tf1.assign_add(tf1.train.get_global_step(), 1))
    return NPUEstimatorSpec(mode, loss=weight * 1.0, train_op=train_op)


@pytest.mark.parametrize("counts", [False, True])
def test_a_training_that_counts_no_steps_is_told_at_its_start(counts, tmp_path, caplog):
    config = NPURunConfig(model_dir=str(tmp_path), log_step_count_steps=None)
    NPUEstimator(uncounted_model_fn, config=config, params={"counts": counts}).train(lambda: input_fn().take(1))
    said = [record.getMessage() for record in caplog.records if "no step is counted" in record.getMessage()]
    assert len(said) == (not counts)
    assert counts or said[0].startswith("global_step: no step is counted: training never reaches its last step")


@pytest.mark.parametrize("counts", [False, True])
def test_so_is_a_session_of_an_optimizer_of_this_package(counts, graph, caplog):
    step = tf1.train.get_or_create_global_step()
    loss = tf.square(tf1.get_variable("weight", []))
    train_op = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.1)).minimize(loss, step if counts else None)
    with tf1.train.MonitoredTrainingSession(hooks=[tf1.train.StopAtStepHook(last_step=5)]) as session:
        session.run(train_op)
    assert ("no step is counted" in caplog.text) == (not counts)


def test_a_model_is_exported_as_in_version_1(trained, tmp_path):
    (tmp_path / "words.txt").write_text("a")
    estimator, folder = estimator_of(trained / "20"), str(tmp_path / "export")
    assets = {"more/words.txt": str(tmp_path / "words.txt")}
    exported = estimator.export_savedmodel(folder, serving_input_fn, assets, True, estimator.latest_checkpoint(), True)
    assert os.listdir(folder) == [os.path.basename(exported.decode())]
    assert os.path.exists(os.path.join(exported.decode(), "saved_model.pbtxt"))
    with open(os.path.join(exported.decode(), "assets.extra", "more", "words.txt"), encoding="utf-8") as file:
        assert file.read() == "a"
    assert "serving_default" in tf.saved_model.load(exported.decode()).signatures
