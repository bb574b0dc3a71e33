"""The output of an `NPUEstimator` during training, and `host_call`."""

from __future__ import annotations

import os
import re

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.reporting import History, ProgressHook

tf1 = tf.compat.v1
TRAIN, EVAL, PREDICT = tf.estimator.ModeKeys.TRAIN, tf.estimator.ModeKeys.EVAL, tf.estimator.ModeKeys.PREDICT


def input_fn():
    return tf.data.Dataset.range(1, 100).map(lambda number: tf.cast(number, tf.float32))


def plain_model_fn(features, mode, params):
    """The loss of step n is n."""
    weight = tf1.get_variable("weight", [], initializer=tf1.zeros_initializer())
    loss = features * (1.0 + 0.0 * weight)
    train_op = tf1.train.GradientDescentOptimizer(0.5).minimize(loss, tf1.train.get_global_step())
    hooks = [params["hook"]] if params.get("hook") else None
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=hooks)


def lines_of(text):
    return [line.split(" | ")[0] for line in text.splitlines() if line.startswith("step ")]


def estimator_of(folder, params=None, model_fn=plain_model_fn, **options):
    return NPUEstimator(model_fn, config=NPURunConfig(model_dir=str(folder), **options), params=params or {})


def test_progress_is_shown_on_standard_error_as_plain_lines(tmp_path, capsys):
    estimator = estimator_of(tmp_path)
    estimator.train(input_fn, max_steps=40)
    shown = capsys.readouterr()
    assert shown.out == "" and "\r" not in shown.err
    assert lines_of(shown.err)[0] == "step 1/40 (2 %)" and lines_of(shown.err)[-1] == "step 40/40 (100 %)"
    assert len(lines_of(shown.err)) <= 22 and "loss 40.000" in shown.err
    estimator.train(input_fn, steps=5)  # counted from the checkpoint
    assert lines_of(capsys.readouterr().err)[-1] == "step 45/45 (100 %)"
    estimator.train(lambda: input_fn().take(3))  # until the data ends
    assert lines_of(capsys.readouterr().err)[-1] == "step 48"


def test_one_option_switches_it_off(tmp_path, capsys):
    estimator_of(tmp_path, log_step_count_steps=None).train(input_fn, steps=3)
    assert lines_of(capsys.readouterr().err) == []


@pytest.mark.parametrize("place", ["of train", "of the spec"])
def test_a_progress_hook_of_the_caller_is_the_only_one(place, tmp_path, capsys):
    hook = ProgressHook(total_steps=3, every_n_steps=2)
    estimator = estimator_of(tmp_path, {"hook": hook if place == "of the spec" else None})
    estimator.train(input_fn, max_steps=3, hooks=[hook] if place == "of train" else None)
    shown = capsys.readouterr()
    assert lines_of(shown.err) == []
    assert lines_of(shown.out) == ["step 1/3 (33 %)", "step 3/3 (100 %)"]


def test_the_lines_of_tensorflow_stay(tmp_path, caplog):
    with caplog.at_level("INFO", "tensorflow"):
        estimator_of(tmp_path, log_step_count_steps=2).train(input_fn, steps=5)
    # TensorFlow reads the step beside the update: before or after it.
    for line in (r"loss = 1\.0, step = [01]\b", r"loss = 5\.0, step = [45]\b"):
        assert re.search(line, caplog.text)


def evaluated_model_fn(features, mode, params):
    spec = plain_model_fn(features, mode, params)
    return spec._replace(eval_metric_ops={"accuracy": tf1.metrics.mean(features / 100.0)})


def test_a_training_with_evaluations_reads_as_a_story(tmp_path, capsys):
    """Lines of both in turn, and one summary in the end."""
    estimator = estimator_of(tmp_path, model_fn=evaluated_model_fn, save_checkpoints_steps=20)
    tf.estimator.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(input_fn, max_steps=40),
        tf.estimator.EvalSpec(lambda: input_fn().take(3), throttle_secs=0, start_delay_secs=0),
    )
    lines = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("  ") and "WARNING" not in line
    ]
    told = [line for line in lines if line.startswith("evaluation")]
    told_at = [lines.index(line) for line in told]
    for line, step in zip(told, (20, 40)):
        assert re.fullmatch(
            rf"evaluation at step {step} \| loss 2\.0000 \| accuracy 0\.02 \| 3 batches in .* m?s", line
        )
    assert len(told) == 2 and lines[told_at[1] + 1].startswith("step 40/40 (100 %)")
    assert {line.split()[0] for line in lines[: told_at[0]] + lines[told_at[0] + 1 : told_at[1]]} == {"step"}
    assert [line.split()[0] for line in lines[told_at[1] + 2 :]] == ["trained", "median", "peak", "report"]
    history = History(str(tmp_path / "history.jsonl"))
    assert [(one.step, one.metrics, one.batches) for one in history.evaluations] == [
        (step, {"loss": 2.0, "accuracy": pytest.approx(0.02)}, 3) for step in (20, 40)
    ]


def test_rounds_have_one_line_each_and_a_name_is_told(tmp_path, capsys):
    estimator = estimator_of(tmp_path)
    for _ in range(2):
        estimator.train(input_fn, steps=2)
        estimator.evaluate(lambda: input_fn().take(1), name="short")
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(("step", "WARNING", "  "))]
    assert [line.split(" |")[0].split(" in ")[0] for line in lines] == [
        "trained 2 steps",
        *lines[1:4],  # pace, memory, and where the report is: the first time
        "evaluation 'short' at step 2",
        "trained 2 steps up to step 4",
        "evaluation 'short' at step 4",
    ]
    quiet = estimator_of(tmp_path, log_step_count_steps=None)
    quiet.evaluate(lambda: input_fn().take(1))
    assert "evaluation" not in capsys.readouterr().err
    assert len(History(str(tmp_path / "history.jsonl")).evaluations) == 2


def host_model_fn(features, mode, params):
    """A host call that writes the loss and the global step as summaries, or counts what it is called with."""
    step = tf1.train.get_global_step()
    loss = features * (1.0 + 0.0 * tf1.get_variable("weight", [], initializer=tf1.zeros_initializer()))
    params["made"].append(mode)

    def write(loss, step):
        params["called"].append(mode)
        writer = tf.summary.create_file_writer(os.path.join(params["folder"], mode))
        with writer.as_default():
            tf.summary.scalar("host loss", loss, step=step)
        return tf1.summary.all_v2_summary_ops() if params["returns"] else None

    tensors = {"step": step, "loss": loss} if params["as_dict"] else [loss, step]
    if mode == PREDICT:
        return NPUEstimatorSpec(mode, predictions=features, host_call=(write, tensors))
    train_op = tf1.train.GradientDescentOptimizer(0.5).minimize(loss, step)
    return NPUEstimatorSpec(mode, loss=loss, train_op=train_op, host_call=(write, tensors))


def written(folder, mode):
    """Step and value of each summary that a host call wrote."""
    place = os.path.join(folder, mode)
    values = []
    for file in sorted(os.listdir(place)):
        for event in tf1.train.summary_iterator(os.path.join(place, file)):
            values += [(event.step, float(tf.make_ndarray(value.tensor))) for value in event.summary.value]
    return values


@pytest.mark.parametrize("as_dict, returns, loop", [(True, True, 1), (False, False, 3)])
def test_a_host_call_runs_with_every_step(as_dict, returns, loop, tmp_path):
    folder = str(tmp_path / "host")
    params = {"made": [], "called": [], "folder": folder, "as_dict": as_dict, "returns": returns}

    class Shared(dict):
        def __deepcopy__(self, memo):
            return self

    estimator = estimator_of(tmp_path / "model", Shared(params), host_model_fn, iterations_per_loop=loop)
    estimator.train(input_fn, max_steps=3)
    assert estimator.evaluate(lambda: input_fn().take(4)) == {"loss": 2.5, "global_step": 3}
    assert next(estimator.predict(lambda: input_fn().batch(1))) == 1.0
    assert params["made"] == [TRAIN, EVAL, PREDICT] and params["called"] == [TRAIN, EVAL], "once for each graph"
    assert written(folder, TRAIN) == [(1, 1.0), (2, 2.0), (3, 3.0)], "the step is counted, the loss of the step"
    assert written(folder, EVAL) == [(3, 1.0), (3, 2.0), (3, 3.0), (3, 4.0)]


def test_a_host_call_changes_nothing_else(tmp_path):
    """Only what it adds is added: variables, and the loss that is shown, are the same."""
    values = []
    for name, model_fn in (("with", host_model_fn), ("without", plain_model_fn)):
        params = {"made": [], "called": [], "folder": str(tmp_path / name), "as_dict": True, "returns": True}
        estimator = estimator_of(tmp_path / f"model_{name}", params, model_fn, save_summary_steps=1)
        estimator.train(input_fn, max_steps=3)
        place = str(tmp_path / f"model_{name}")
        events = [
            (event.step, value.tag, value.simple_value)
            for file in os.listdir(place)
            if "tfevents" in file
            for event in tf1.train.summary_iterator(os.path.join(place, file))
            for value in event.summary.value
            if value.tag == "loss"
        ]
        reader = tf.train.load_checkpoint(place)
        values.append((events, sorted(reader.get_variable_to_shape_map()), reader.get_tensor("weight")))
    assert values[0] == values[1] and len(values[0][0]) == 3
