"""The first operator that made NaN or Inf is found, and nothing else is blamed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_config import DumpConfig
from npu_bridge.session import overflow_hook
from tests.goldens.two_layers import assert_same_bits
from tests.session.models import (
    build,
    index_of,
    session_config,
    step_folders,
    train_in_session,
    train_npu_estimator,
)

tf1 = tf.compat.v1


def _debug(folder, **values):
    return session_config(enable_dump_debug=True, dump_path=str(folder), **values)


def _chain(x):
    """exp of a large number is Inf, Inf - Inf is NaN, and from there on everything is."""
    big = tf.exp(tf.identity(x, "start"), name="big")
    nothing = tf.subtract(big, big, name="nothing")
    return tf.reduce_sum(nothing * 2.0, name="end")


def _run_chain(folder, value, **values):
    with tf.Graph().as_default():
        end = _chain(tf1.placeholder(tf.float32, [2], "x"))
        with tf1.Session(config=_debug(folder, **values)) as session:
            session.run(end, {"x:0": [1.0, 2.0]})
            session.run(end, {"x:0": value})


def test_first_operator_is_named_and_dumped(tmp_path, caplog):
    _run_chain(tmp_path, [1.0, 1000.0])
    folders = step_folders(tmp_path, "end")
    assert sorted(folders) == [1], "the finite step is not reported"
    report = json.loads((folders[1] / "overflow.json").read_text())
    assert (report["op"], report["type"], report["step"]) == ("big", "Exp", 1)
    assert report["operators_with_nan_or_inf"][:2] == ["big", "nothing"]
    assert "start" not in report["operators_with_nan_or_inf"]
    assert __file__ in report["made_at"]
    arrays = index_of(folders[1])
    np.testing.assert_array_equal(arrays["big", "input", 0], [1.0, 1000.0])
    assert np.isinf(arrays["big", "output", 0][1])
    assert "the first NaN or Inf comes from Exp 'big'" in caplog.text


def test_what_is_fed_is_not_the_fault_of_an_operator_behind(tmp_path):
    _run_chain(tmp_path, [1.0, np.nan])
    report = json.loads((step_folders(tmp_path, "end")[1] / "overflow.json").read_text())
    assert report["op"] == "x"


def test_statistics_instead_of_tensors(tmp_path):
    _run_chain(tmp_path, [1.0, 1000.0], dump_data="stats")
    folder = step_folders(tmp_path, "end")[1]
    assert "big,Exp,output,0,big:0,float32,2," in (folder / "statistics.csv").read_text()
    assert not list(folder.glob("*.npy"))


def test_infinite_constants_are_nobodys_fault_but_nan_from_them_is(graph, tmp_path):
    mask = tf.constant([0.0, -np.inf], name="mask")
    x = tf1.placeholder(tf.float32, [2], "x")
    masked = tf.add(x, mask, name="masked")
    tf.nn.softmax(masked, name="weights")
    with tf1.Session(config=_debug(tmp_path)) as session:
        session.run("weights:0", {"x:0": [1.0, 2.0]})
        session.run("weights:0", {"x:0": [1.0, np.inf]})
    (folder,) = step_folders(tmp_path, "weights").values()
    assert folder.name == "1"
    assert json.loads((folder / "overflow.json").read_text())["op"] == "x"


def test_overflow_of_half_precision(graph, tmp_path):
    x = tf1.placeholder(tf.float32, [], "x")
    tf.cast(tf.multiply(tf.cast(x, tf.float16), 100.0, name="scaled"), tf.float32, name="wide")
    with tf1.Session(config=_debug(tmp_path)) as session:
        session.run("wide:0", {"x:0": 1000.0})
    assert json.loads((step_folders(tmp_path, "wide")[0] / "overflow.json").read_text())["op"] == "scaled"


def test_training_has_the_same_bits_and_finite_training_writes_nothing(tmp_path):
    assert_same_bits(train_in_session(_debug(tmp_path)), train_in_session())
    assert list(tmp_path.iterdir()) == []


def test_looking_ends_after_some_reports(graph, tmp_path, caplog):
    end = _chain(tf1.placeholder(tf.float32, [2], "x"))
    with tf1.Session(config=_debug(tmp_path)) as session:
        for _ in range(overflow_hook.MOST_REPORTS + 3):
            session.run(end, {"x:0": [1.0, 1000.0]})
    assert len(step_folders(tmp_path, "end")) == overflow_hook.MOST_REPORTS
    assert "no further step is examined" in caplog.text


def test_nan_in_a_gradient_of_an_estimator(tmp_path, monkeypatch):
    """sqrt is finite at 0 and its gradient is not: the forward pass looks healthy."""

    def sick_build(features, labels):
        variable = tf1.get_variable("sick", [], initializer=tf1.zeros_initializer())
        loss, _ = build(features, labels)
        loss = loss + tf.sqrt(tf.square(variable), name="root")
        step = tf1.train.get_global_step()
        return loss, tf1.train.GradientDescentOptimizer(0.1).minimize(loss, step, name="again")

    monkeypatch.setattr("tests.session.models.build", sick_build)
    folder = tmp_path / "dump"
    folder.mkdir()
    dump = DumpConfig(enable_dump_debug=True, dump_path=str(folder))
    with pytest.raises(tf.estimator.NanLossDuringTrainingError):
        train_npu_estimator(tmp_path / "model", dump_config=dump)
    report = json.loads((step_folders(folder, "train")[0] / "overflow.json").read_text())
    assert "root_grad" in report["op"], report
