"""`NPUEstimator` without any option is `tf.estimator.Estimator`: same files, same numbers, same order of hooks."""

from __future__ import annotations

import os
import pathlib
import re
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.training import training_util

from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator

tf1 = tf.compat.v1
KINDS = {"stock": (tf.estimator.Estimator, tf.estimator.RunConfig), "ours": (NPUEstimator, NPURunConfig)}
ALIKE = {
    "tf_random_seed": 3,
    "save_summary_steps": 4,
    "save_checkpoints_steps": 5,
    "keep_checkpoint_max": 2,
    "log_step_count_steps": 4,
}


class Order(tf.estimator.SessionRunHook):
    """Writes down when it is called."""

    def __init__(self, name, log):
        self._name, self._log = name, log

    def begin(self):
        self._log.append(f"{self._name}: begin")

    def after_create_session(self, session, coord):
        self._log.append(f"{self._name}: after_create_session")

    def before_run(self, run_context):
        self._log.append(f"{self._name}: before_run")

    def after_run(self, run_context, run_values):
        self._log.append(f"{self._name}: after_run")

    def end(self, session):
        self._log.append(f"{self._name}: end")


class Listener(tf.estimator.CheckpointSaverListener):
    def __init__(self, log):
        self._log = log

    def after_save(self, session, global_step_value):
        self._log.append(f"listener: saved {global_step_value}")


def input_fn():
    random = np.random.RandomState(0)
    features = random.randn(48, 6).astype(np.float32)
    labels = (features.sum(axis=1) > 0).astype(np.int64)
    return tf.data.Dataset.from_tensor_slices(({"x": features}, labels)).shuffle(48).repeat().batch(8)


def one_pass():
    return input_fn().take(6)


def model_fn(features, labels, mode, params, config):
    """Dropout and random initial values show whether random seeds agree; batch statistics are no trained variables."""
    is_training = mode == tf.estimator.ModeKeys.TRAIN
    params["log"].append(f"model_fn: {mode} {params['width']} {config.save_checkpoints_steps}")
    kernel = tf1.get_variable("kernel", [6, params["width"]])
    hidden = tf.nn.relu(tf.matmul(features["x"], kernel))
    hidden = tf1.layers.batch_normalization(hidden, training=is_training)
    if is_training:
        hidden = tf.nn.dropout(hidden, 0.3)
    # The layer's own initializer draws a seed that no setting reaches.
    logits = tf1.layers.dense(hidden, 2, kernel_initializer=tf1.glorot_uniform_initializer())
    predictions = {"class": tf.argmax(logits, axis=1), "probability": tf.nn.softmax(logits)}
    if mode == tf.estimator.ModeKeys.PREDICT:
        outputs = {"serving_default": tf.estimator.export.PredictOutput(predictions)}
        return tf.estimator.EstimatorSpec(mode, predictions, export_outputs=outputs)
    loss = tf1.losses.sparse_softmax_cross_entropy(labels, logits)
    if not is_training:
        metrics = {"accuracy": tf1.metrics.accuracy(labels, predictions["class"])}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    tf1.summary.scalar("logit", tf.reduce_mean(logits))
    tf1.summary.histogram("hidden", hidden)
    step = tf1.train.get_global_step()
    optimizer = tf1.train.AdamOptimizer(tf1.train.exponential_decay(0.05, step, 10, 0.9))
    # Hooks read the step beside its update: before it or after it, and so save summaries one step earlier or later.
    read_first = training_util._get_or_create_global_step_read()
    with tf.control_dependencies([read_first, *tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)]):
        train_op = optimizer.minimize(loss, step)
    return tf.estimator.EstimatorSpec(
        mode,
        loss=loss,
        train_op=train_op,
        training_hooks=[Order("of the spec", params["log"])],
        training_chief_hooks=[Order("of the chief", params["log"])],
    )


class Life(NamedTuple):
    """Returns the results of one estimator from its first training to an export."""

    folder: str
    log: list
    evaluated: list
    predicted: list
    served: dict
    warm: dict


def live(kind, folder):
    estimator_class, config_class = KINDS[kind]
    log, served = [], {}

    class Params(dict):
        def __deepcopy__(self, memo):  # an Estimator copies its params; the log shall stay one
            return Params(self)

    def make(name, **others):
        config = config_class(model_dir=os.path.join(folder, name), **ALIKE)
        return estimator_class(model_fn, config=config, params=Params(width=5, log=log), **others)

    estimator = make("model")
    # Scripts calculate how many steps they want, as pictures / batch * epochs.
    estimator.train(input_fn, hooks=[Order("given", log)], steps=6.5, saving_listeners=[Listener(log)])
    evaluated = [estimator.evaluate(one_pass, hooks=[Order("of eval", log)])]
    estimator.train(input_fn, max_steps=12.5)
    estimator.train(input_fn, max_steps=13)  # nothing left to do
    evaluated.append(estimator.evaluate(input_fn, steps=3, name="again"))
    evaluated.append(estimator.evaluate(one_pass, checkpoint_path=os.path.join(estimator.model_dir, "model.ckpt-12")))
    predicted = list(estimator.predict(lambda: tf.data.Dataset.from_tensors({"x": np.eye(6, dtype=np.float32)})))
    predicted += estimator.predict(
        lambda: tf.data.Dataset.from_tensors({"x": np.eye(6, dtype=np.float32)}),
        predict_keys="class",
        yield_single_examples=False,
    )

    warm = make("warm", warm_start_from=tf.estimator.WarmStartSettings(estimator.model_dir, "kernel"))
    warm.train(input_fn, steps=1)
    looping = make("looping", warm_start_from=estimator.model_dir)
    evaluated += tf.estimator.train_and_evaluate(
        looping,
        tf.estimator.TrainSpec(input_fn, max_steps=10),
        tf.estimator.EvalSpec(one_pass, steps=None, throttle_secs=0, start_delay_secs=0),
    )[:1]

    def serving_input_fn():
        x = tf1.placeholder(tf.float32, [None, 6])
        return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})

    exported = estimator.export_saved_model(os.path.join(folder, "export"), serving_input_fn).decode()
    with tf.Graph().as_default(), tf1.Session() as session:
        meta = tf1.saved_model.load(session, ["serve"], exported)
        signature = meta.signature_def["serving_default"]
        fetches = {name: info.name for name, info in signature.outputs.items()}
        served = session.run(fetches, {signature.inputs["x"].name: np.eye(6)})
    return Life(folder, log, evaluated, predicted, served, checkpoint(os.path.join(folder, "warm")))


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    return {kind: live(kind, str(tmp_path_factory.mktemp(kind))) for kind in KINDS}


def checkpoint(folder, path=None):
    reader = tf.train.load_checkpoint(path or tf.train.latest_checkpoint(folder))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def assert_same_bits(ours, stock):
    assert sorted(ours) == sorted(stock)
    for name, value in stock.items():
        assert np.asarray(ours[name]).tobytes() == np.asarray(value).tobytes(), name


@pytest.mark.few_fast(1, "other settings")
@pytest.mark.parametrize("name", ["model", "warm", "looping"])
def test_files_and_checkpoints(lives, name):
    ours, stock = (os.path.join(lives[kind].folder, name) for kind in ("ours", "stock"))
    of_the_page = {"history.jsonl", "report.html", "report.json", "run.toml"}
    files = [sorted(entry for entry in os.listdir(folder) if "tfevents" not in entry) for folder in (ours, stock)]
    listed = [[entry for entry in entries if entry not in of_the_page] for entries in files]
    assert listed[0] == listed[1]
    paths = [tf.train.get_checkpoint_state(folder).all_model_checkpoint_paths for folder in (ours, stock)]
    assert [os.path.basename(path) for path in paths[0]] == [os.path.basename(path) for path in paths[1]]
    for our_path, stock_path in zip(*paths):
        assert_same_bits(checkpoint(None, our_path), checkpoint(None, stock_path))


def events(folder):
    """Kind, step, tag and value of all events of a folder; no times, and nothing that is measured in time."""
    found = []
    for file in sorted(entry for entry in os.listdir(folder) if "tfevents" in entry):
        for event in tf1.train.summary_iterator(os.path.join(folder, file)):
            kind = event.WhichOneof("what")
            if kind == "session_log":
                found.append((kind, event.step, event.session_log.status))
            elif kind == "graph_def":
                found.append((kind, event.step, len(tf1.GraphDef.FromString(event.graph_def).node)))
            elif kind == "summary":
                values = [value for value in event.summary.value if value.tag != "global_step/sec"]
                # An evaluation names its checkpoint by path.
                found += [
                    (value.tag, event.step, b"" if "checkpoint_path" in value.tag else value.SerializeToString())
                    for value in values
                ]
            else:
                found.append((kind, event.step))
    return found


@pytest.mark.parametrize("name", ["model", "model/eval", "model/eval_again", "warm", "looping", "looping/eval"])
def test_event_files(lives, name):
    ours, stock = (events(os.path.join(lives[kind].folder, name)) for kind in ("ours", "stock"))
    # A training's own curves come on top, and its loss has more points.
    more = [event for event in ours if event[0].startswith("training/") or (event[0] == "loss" and event not in stock)]
    assert len(stock) > 2 and sorted(event for event in ours if event not in more) == sorted(stock)
    assert ("training/memory_mb" in [event[0] for event in more]) == ("eval" not in name)
    losses = [event for event in ours if event[0] == "loss"]
    assert len({event[1] for event in losses}) == len(losses), "the same curve is there twice"


@pytest.mark.parametrize("name", ["model", "warm"])
def test_graphs_are_node_for_node_the_same(lives, name):
    ours, stock = (pathlib.Path(lives[kind].folder, name, "graph.pbtxt").read_text() for kind in ("ours", "stock"))
    # Functions, which are in the library, are numbered by how many the process has made before, and sorted by that.
    ours, stock = (re.sub(r"(cond_(?:true|false))_\d+", r"\1", text.split("\nlibrary {")[0]) for text in (ours, stock))
    ours, stock = ours.replace(lives["ours"].folder, ""), stock.replace(lives["stock"].folder, "")
    assert stock.count("node {") > 300
    assert ours == stock


def test_metrics(lives):
    assert len(lives["stock"].evaluated) == 4 and lives["stock"].evaluated[0]["global_step"] == 7
    assert lives["ours"].evaluated == lives["stock"].evaluated


def test_predictions_and_exported_model(lives):
    ours, stock = lives["ours"], lives["stock"]
    assert len(ours.predicted) == len(stock.predicted) == 7
    for our_values, stock_values in zip(ours.predicted, stock.predicted):
        assert_same_bits(our_values, stock_values)
    assert_same_bits(ours.served, stock.served)


def test_a_warm_start_takes_what_it_names(lives):
    assert_same_bits(lives["ours"].warm, lives["stock"].warm)
    trained = checkpoint(None, os.path.join(lives["ours"].folder, "model", "model.ckpt-13"))
    started = checkpoint(None, os.path.join(lives["ours"].folder, "warm", "model.ckpt-0"))
    np.testing.assert_array_equal(started["kernel"], trained["kernel"])
    assert not np.array_equal(started["dense/kernel"], trained["dense/kernel"])


def test_hooks_listeners_params_and_config_come_in_the_same_order(lives):
    assert lives["ours"].log == lives["stock"].log
    log = lives["ours"].log
    assert log[0] == "model_fn: train 5 5"
    assert log[1:4] == ["of the chief: begin", "given: begin", "of the spec: begin"]
    assert [line for line in log if line.startswith("listener")] == [f"listener: saved {step}" for step in (0, 5, 7)]


@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"steps": 0}, ValueError),
        ({"max_steps": -1}, ValueError),
        ({"steps": 1, "max_steps": 1}, ValueError),
        ({"steps": 1, "hooks": [1]}, TypeError),
        ({"steps": 1, "saving_listeners": [1]}, TypeError),
    ],
)
def test_refused_alike(arguments, error, tmp_path):
    for estimator_class, config_class in KINDS.values():
        estimator = estimator_class(model_fn, config=config_class(model_dir=str(tmp_path)), params={"width": 5})
        with pytest.raises(error):
            estimator.train(input_fn, **arguments)
    assert os.listdir(tmp_path) == []
