"""The start of Estimators on several ranks, the order of their hooks, their configuration, and who exports."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.estimator.npu.npu_hook import NPUBroadcastGlobalVariablesHook, NPUCheckpointSaverHook
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer
from tests.rank_pool import on_each_rank
from tests.ranks.ways import Named, StartAndEnd, log_begins

tf1 = tf.compat.v1


def input_fn():
    rank = collective.current().rank
    return tf.data.Dataset.from_tensors({"x": np.float32([rank])}).repeat()


def model_fn(features, mode, params):
    """Each step adds 1 to the weight: the mean over two ranks of what features say, 0 and 1, doubled."""
    weight = tf1.get_variable("weight", [], initializer=tf1.constant_initializer(params["start"]))
    if mode == tf.estimator.ModeKeys.PREDICT:
        return NPUEstimatorSpec(mode, predictions={"weight": features["x"] + weight})
    loss = -2 * tf.reduce_sum(features["x"] * weight)
    optimizer = NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(1.0))
    train_op = optimizer.minimize(loss, tf1.train.get_global_step())
    return NPUEstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=params.get("hooks"))


def estimator_of(folder, job=None, **params):
    params = {"start": 100.0 * collective.current().rank, **params}
    config = NPURunConfig(model_dir=folder, save_checkpoints_steps=2, log_step_count_steps=None)
    return NPUEstimator(model_fn, config=config, params=params, job_start_file=job)


def write_job(folder, size, source):
    rank = collective.current().rank
    path = os.path.join(folder, f"job_{rank}.json")
    content = {"device_info": {"Index": rank}, "rank_table_file": "", "rank_size": size, "local_checkpoint_dir": source}
    with open(path, "w") as file:
        json.dump(content, file)
    return path


@on_each_rank(2, gives=[3.0, 5.0])
def test_every_rank_starts_where_the_job_says(tmp_path):
    """Trains a folder, then another that starts from the first; returns the weights."""
    source = os.path.join(tmp_path, "source")
    estimator_of(source).train(input_fn, max_steps=3)
    with pytest.raises(RuntimeError, match="npu-run -np 4"):
        estimator_of(source, write_job(tmp_path, 4, source))
    weight = StartAndEnd()
    estimator_of(os.path.join(tmp_path, "started"), write_job(tmp_path, 2, source)).train(
        input_fn, [weight], max_steps=2
    )
    return weight.seen


IN_ORDER = ["NPUCheckpointSaverHook", "NPUBroadcastGlobalVariablesHook", "given", "of the spec"]


@on_each_rank(2, by_rank=[IN_ORDER, IN_ORDER[1:]])
def test_hooks_come_in_order(tmp_path):
    log = []
    with pytest.MonkeyPatch.context() as patch:
        log_begins(patch, log, NPUBroadcastGlobalVariablesHook, NPUCheckpointSaverHook)
        estimator_of(tmp_path, hooks=[Named("of the spec", log)]).train(input_fn, hooks=[Named("given", log)], steps=1)
    return log


def serving_input_fn():
    x = tf1.placeholder(tf.float32, [None])
    return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})


def export(folder):
    """On a rank: what two exports into one folder give, as the exported models say it."""
    estimator = estimator_of(f"{folder}/model").train(input_fn, max_steps=2)
    exports = (estimator.export_savedmodel, estimator.export_saved_model)
    paths = [method(f"{folder}/export", serving_input_fn).decode() for method in exports]
    serves = [tf.saved_model.load(path).signatures["serving_default"] for path in paths]
    return paths, [float(serve(x=tf.constant([0.5]))["weight"][0]) for serve in serves]


def test_rank_0_alone_exports_where_it_was_asked_to(on_ranks, tmp_path):
    (of_rank_0, weights), (of_rank_1, weights_of_1) = on_ranks(2, export, str(tmp_path))
    assert sorted(os.listdir(tmp_path / "export")) == sorted(map(os.path.basename, of_rank_0))
    assert weights == weights_of_1 == [2.5, 2.5]
    assert not any(path.startswith(str(tmp_path)) for path in of_rank_1)


def train_evaluate_and_export(folder):
    """On a rank: the stock loop, in a folder that ranks share, or one whose name has the rank."""
    results, exported = tf.estimator.train_and_evaluate(
        estimator_of(folder.format(collective.current().rank)),
        tf.estimator.TrainSpec(input_fn, max_steps=4),
        tf.estimator.EvalSpec(
            input_fn,
            steps=1,
            throttle_secs=0,
            start_delay_secs=0,
            exporters=[tf.estimator.FinalExporter("last", serving_input_fn)],
        ),
    )
    return results, [path.decode() for path in exported or []]


@pytest.mark.parametrize("folder", ["shared", "of_rank_{}"])
def test_rank_0_alone_evaluates_and_exports(on_ranks, tmp_path, folder):
    of_rank_0, of_rank_1 = on_ranks(2, train_evaluate_and_export, str(tmp_path / folder))
    assert of_rank_1 == (None, []) and list(tmp_path.glob("of_rank_1/*")) == []
    results, (exported,) = of_rank_0
    assert results == {"loss": 0.0, "global_step": 4}
    written = tmp_path / folder.format(0)
    assert {"eval", "model.ckpt-4.index"} <= set(os.listdir(written))
    assert os.listdir(written / "export" / "last") == [os.path.basename(exported)]
    serve = tf.saved_model.load(exported).signatures["serving_default"]
    np.testing.assert_array_equal(serve(x=tf.constant([0.5]))["weight"], [4.5])


INTERVALS = ("save_checkpoints_steps", "save_checkpoints_secs", "save_summary_steps", "log_step_count_steps")


def numbers(config):
    return [getattr(config, name) for name in INTERVALS]


def numbers_seen(folder, kind, has_listeners):
    """Returns, on a rank, the configuration before, in the model function, in a hook, and afterwards."""
    rank, seen, told = collective.current().rank, [], []

    def model_fn(features, labels, mode, config):
        seen.append(numbers(config))
        step, weight = tf1.train.get_or_create_global_step(), tf1.get_variable("weight", [])
        loss = tf.square(weight - tf.reduce_mean(features))
        hook = tf1.train.StepCounterHook(every_n_steps=config.save_checkpoints_steps, output_dir=folder + "/counted")
        update = tf1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=update, training_hooks=[hook])

    class Reading(tf.estimator.SessionRunHook):
        def begin(self):
            seen.append(numbers(estimator.config))

    class Listening(tf1.train.CheckpointSaverListener):
        def after_save(self, session, step):
            told.append(int(step))

    config = NPURunConfig(
        model_dir=os.path.join(folder, str(rank)),
        save_checkpoints_steps=2,
        save_summary_steps=2,
        log_step_count_steps=2,
    )
    kinds = {"npu": NPUEstimator, "plain": tf.estimator.Estimator, "of version 1": tf1.estimator.Estimator}
    estimator = kinds[kind](model_fn, config=config)
    seen += [numbers(config), numbers(estimator.config)]
    listeners = [Listening()] if has_listeners else None
    data = lambda: tf.data.Dataset.from_tensors([1.0]).repeat()  # noqa: E731
    estimator.train(data, hooks=[Reading()], steps=4, saving_listeners=listeners)
    seen.append(numbers(estimator.config))
    names = os.listdir(config.model_dir) if os.path.isdir(config.model_dir) else []
    wrote = any("ckpt" in name or "tfevents" in name for name in names)
    return seen, told, wrote


@pytest.mark.parametrize("kind, has_listeners", [("npu", True), ("plain", False), ("of version 1", True)])
def test_numbers_are_the_scripts_on_every_rank(on_ranks, tmp_path, kind, has_listeners):
    results = on_ranks(2, numbers_seen, str(tmp_path), kind, has_listeners)
    for seen, _, _ in results:
        assert seen == [[2, None, 2, 2]] * 5
    assert [wrote for _, _, wrote in results] == [True, False]
    assert results[0][1] == ([0, 2, 4] if has_listeners else []) and results[1][1] == []
