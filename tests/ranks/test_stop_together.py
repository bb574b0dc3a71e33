"""A hook or a callback that ends a training ends it on all ranks at the same step; the best checkpoint is kept."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.estimator.npu.npu_helpers import npu_callbacks_append
from npu_bridge.estimator.npu.npu_optimizer import KerasDistributeOptimizer, NPUDistributedOptimizer
from npu_bridge.session import AverageMetricsCallback, BestCheckpoint, StopTogether
from npu_bridge.session.stop_together import can_hook_request_stop
from tests.goldens.two_layers import in_graph
from tests.rank_pool import on_each_rank
from tests.ranks.ways import AtEnd

tf1 = tf.compat.v1
_BEST = 2


class _StopAfter(tf.estimator.SessionRunHook):
    """Asks for the end after some runs of this rank."""

    def __init__(self, runs):
        self._left = runs

    def before_run(self, run_context):
        return tf.estimator.SessionRunArgs(tf1.train.get_global_step())

    def after_run(self, run_context, run_values):
        self._left -= 1
        assert isinstance(run_values.results, np.int64)
        if self._left == 0:
            run_context.request_stop()


def _train_op():
    optimizer = NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(0.1))
    weight = tf1.get_variable("weight", [], initializer=tf1.zeros_initializer())
    return optimizer.minimize(tf.square(weight - 1.0), tf1.train.get_or_create_global_step())


def _model_fn(features, labels, mode):
    """Of which the checkpoint of step `_BEST` has the smallest loss of all evaluations."""
    if mode == tf.estimator.ModeKeys.EVAL:
        from_best = tf.cast(tf.abs(tf1.train.get_global_step() - _BEST), tf.float32)
        return NPUEstimatorSpec(mode, loss=from_best, eval_metric_ops={"score": tf1.metrics.mean(-from_best)})
    return NPUEstimatorSpec(mode, loss=tf.constant(0.0), train_op=_train_op())


def _input_fn():
    return tf.data.Dataset.from_tensors((0.0, 0.0)).repeat(20)


def _estimator(folder):
    config = NPURunConfig(model_dir=folder, save_checkpoints_steps=2, log_step_count_steps=None)
    return NPUEstimator(_model_fn, config=config)


def _asked_by_rank_1(folder):
    """On a rank: the step that a training ended with, of which only rank 1 has a hook that stops it."""
    hooks = [_StopAfter(3)] if collective.current().rank == 1 else []
    at_end = AtEnd()
    _estimator(folder).train(_input_fn, hooks=[*hooks, at_end], max_steps=10)
    return at_end.values["global_step:0"]


class _Done(tf.estimator.CheckpointSaverListener):
    def after_save(self, session, global_step_value):
        return global_step_value >= 2


def _with_chief_hook(features, labels, mode):
    hooks = [_StopAfter(3)] if collective.current().rank == 1 else []
    return _model_fn(features, labels, mode)._replace(training_chief_hooks=hooks)


@on_each_rank(2, gives=[3, 4])
def test_a_listener_and_a_chief_hook_of_one_rank_stop_all_ranks(tmp_path):
    """Returns the steps that trainings ended with, which a listener of rank 0 and a chief hook of rank 1 stop."""
    steps = []
    for name, model_fn, listeners in (("listener", _model_fn, [_Done()]), ("chief", _with_chief_hook, None)):
        config = NPURunConfig(
            model_dir=os.path.join(tmp_path, name), save_checkpoints_steps=2, log_step_count_steps=None
        )
        at_end = AtEnd()
        NPUEstimator(model_fn, config=config).train(_input_fn, [at_end], max_steps=10, saving_listeners=listeners)
        steps.append(at_end.values["global_step:0"])
    return steps


@in_graph
def _in_a_monitored_session():
    train_op, at_end = _train_op(), AtEnd()
    stop = StopTogether([_StopAfter(2 + collective.current().rank)])
    with tf1.train.MonitoredTrainingSession(hooks=[stop, at_end]) as session:
        session.run(train_op.graph.get_tensor_by_name("weight:0"))  # a run that trains nothing exchanges nothing
        while not session.should_stop():
            session.run(train_op)
    return at_end.values["global_step:0"], stop.step, stop.was_asked


def _stopped_early(folder):
    """On a rank: the steps that a training and its resumption ended with."""
    steps = []
    for _ in range(2):
        estimator, at_end = _estimator(folder), AtEnd()
        stop = tf.estimator.experimental.stop_if_no_decrease_hook(
            estimator, "loss", max_steps_without_decrease=2, run_every_secs=None, run_every_steps=1
        )
        tf.estimator.train_and_evaluate(
            estimator,
            tf.estimator.TrainSpec(_input_fn, max_steps=20, hooks=[stop, at_end]),
            tf.estimator.EvalSpec(
                _input_fn, steps=1, throttle_secs=0, start_delay_secs=0, exporters=[BestCheckpoint("score", False)]
            ),
        )
        steps.append(at_end.values["global_step:0"])
    return steps


def _by_hooks(folder):
    return (
        _asked_by_rank_1(os.path.join(folder, "asked")),
        _in_a_monitored_session(),
        _stopped_early(os.path.join(folder, "early")),
    )


def test_all_ranks_end_one_step_after_a_hook_has_asked(on_ranks, tmp_path):
    answers = on_ranks(2, _by_hooks, str(tmp_path))
    # The first request counts. The monitored session's first run counts for the hook, and trains nothing.
    assert [answer[:2] for answer in answers] == [(4, (2, 2, True))] * 2
    # No decrease since step 2 is known when step 4 was evaluated. A training that continues stops at its first check.
    assert answers[0][2] == answers[1][2] == [5, 7]
    best = str(tmp_path / "early/export/best")
    assert tf.train.latest_checkpoint(best) == f"{best}/model.ckpt-{_BEST}"
    reader = tf.train.load_checkpoint(best)
    assert reader.get_tensor("global_step") == _BEST
    note = json.loads((tmp_path / "early/export/best/best.json").read_text())
    assert note == {"step": _BEST, "metrics": {"loss": 0.0, "score": 0.0}, "checkpoint": f"model.ckpt-{_BEST}"}


def _fit(validates_on_rank_1):
    """On a rank: epochs done, val_loss of each, the weights, and how often the step was traced."""
    ranks = collective.current()
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones", input_shape=(1,))])
    model.compile(KerasDistributeOptimizer(tf.keras.optimizers.SGD(0.1)), "mae")
    # The model's prediction falls. So its error grows on rank 0, and shrinks on rank 1 by as much, if that validates.
    validation = (np.ones([1, 1]), np.full([1, 1], (20.0, -2.0)[ranks.rank]))
    stop = tf.keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)
    done = model.fit(
        np.ones([2, 1]) + ranks.rank,
        np.full([2, 1], -10.0),
        batch_size=1,
        epochs=5,
        verbose=0,
        validation_data=validation if validates_on_rank_1 or ranks.rank == 0 else None,
        callbacks=npu_callbacks_append([stop]),
    )
    traces = model.train_tf_function.experimental_get_tracing_count()
    return len(done.epoch), done.history["val_loss"], done.history["loss"], traces, model.get_weights()


def test_keras_callbacks_decide_by_the_metrics_of_all_ranks(on_ranks):
    for validates_on_rank_1 in (True, False):
        first, second = on_ranks(2, _fit, validates_on_rank_1)
        assert first[:4] == second[:4] and first[3] == 1
        for ours, theirs in zip(first[4], second[4]):
            np.testing.assert_array_equal(ours, theirs)
        epochs, losses = first[:2]
        assert epochs == 2 and losses[1] >= losses[0]
        # About 20 - 1 on rank 0, and 1 + 2 on rank 1 if that validates, too.
        assert (8 < losses[0] < 13) if validates_on_rank_1 else losses[0] > 18


def test_with_one_rank_logs_stay_as_they_are():
    logs = {"loss": np.float32(0.5), "matrix": np.ones([2])}
    AverageMetricsCallback().on_epoch_end(0, logs)
    assert list(logs) == ["loss", "matrix"] and logs["loss"].dtype == np.float32
    assert [type(each).__name__ for each in npu_callbacks_append([])] == ["NPUBroadcastGlobalVariablesCallback"]


def test_only_hooks_that_decide_by_themselves_are_asked_for():
    undecided = (tf.estimator.StopAtStepHook(3), AtEnd(), tf.estimator.CheckpointSaverHook("unused", 3))
    inherits = type("Inherits", (_StopAfter,), {})
    assert (
        can_hook_request_stop(_StopAfter(3))
        and can_hook_request_stop(inherits(3))
        and not any(map(can_hook_request_stop, undecided))
    )


def _ask(run_context):
    run_context.request_stop()


def _decorated(method):
    return lambda *arguments: method(*arguments)


def test_a_request_is_found_in_a_helper_a_decorated_method_and_an_inner_hook():
    kind = tf.estimator.SessionRunHook
    by_helper = type("ByHelper", (kind,), {"after_run": lambda self, context, values: _ask(context)})()
    decorated = type("Decorated", (kind,), {"after_run": _decorated(_StopAfter.after_run)})()
    outer, quiet = AtEnd(), type("Quiet", (kind,), {"after_run": _decorated(AtEnd.end)})()
    outer.inner = [_StopAfter(3)]
    assert all(map(can_hook_request_stop, (by_helper, decorated, outer))) and not can_hook_request_stop(quiet)


def test_the_best_checkpoint_replaces_an_older_one(graph, tmp_path):
    weight, keeper = tf1.get_variable("weight", [1]), BestCheckpoint()
    home, saver = str(tmp_path / "export/best"), tf1.train.Saver()
    with tf1.Session() as session:
        for step, loss in enumerate((float("nan"), 3.0, float("nan"), 2.0, 2.0)):
            session.run(weight.assign([step]))
            path = saver.save(session, str(tmp_path / "model.ckpt"), step)
            copied = keeper.export(None, home, path, {"loss": np.float32(loss), "global_step": step}, False)
            assert (copied is None) == (step in (2, 4))
        home = os.fspath(shutil.move(tmp_path / "export", tmp_path / "moved")) + "/best"
        assert keeper.export(None, home, path, {"loss": 2.5, "global_step": 5}, False) is None
    assert tf.train.load_checkpoint(home).get_tensor("weight") == [3.0]
    files = sorted(os.listdir(home))
    parts = ("data-00000-of-00001", "index", "meta")
    assert files == ["best.json", "checkpoint", *(f"model.ckpt-3.{part}" for part in parts)]
    with pytest.raises(ValueError, match="no such metric. Expected one of accuracy; got metric='loss'"):
        keeper.export(None, home, path, {"accuracy": 1.0}, False)


def test_the_first_evaluation_with_another_metric_gives_the_best_checkpoint(graph, tmp_path):
    weight, home = tf1.get_variable("weight", [1]), str(tmp_path / "export/best")
    with tf1.Session() as session:
        session.run(weight.initializer)
        path = tf1.train.Saver().save(session, str(tmp_path / "model.ckpt"), 1)
        BestCheckpoint().export(None, home, path, {"loss": 1.0}, False)
        assert BestCheckpoint("accuracy", False).export(None, home, path, {"loss": 2.0, "accuracy": 0.5}, False)


def test_a_note_of_the_best_checkpoint_that_was_cut_off_ends_no_training(graph, tmp_path):
    weight, keeper, home = tf1.get_variable("weight", [1]), BestCheckpoint(), str(tmp_path / "export/best")
    with tf1.Session() as session:
        session.run(weight.initializer)
        for step in (1, 2):
            path = tf1.train.Saver().save(session, str(tmp_path / "model.ckpt"), step)
            copied = keeper.export(None, home, path, {"loss": 1.0, "global_step": step}, False)
            assert copied == f"{home}/model.ckpt-{step}"
            (tmp_path / "export/best/best.json").write_text('{"step": 1, "met')
