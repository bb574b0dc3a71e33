"""Dumps hold what the run computed, and the run computes what it would have computed."""

from __future__ import annotations

import csv
import pathlib
import time

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_config import DumpConfig, NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.session.dump_files import DumpedTensor, DumpFolder, write_statistics, write_tensors
from tests.goldens.two_layers import assert_same_bits
from tests.session.models import (
    FEATURES,
    LABELS,
    build,
    dataset,
    index_of,
    model_fn,
    session_config,
    step_folders,
    train_in_session,
    train_npu_estimator,
)
from tests.session.precision.small_models import classic_loops

tf1 = tf.compat.v1


def _dump(folder, **values):
    return session_config(enable_dump=True, dump_path=str(folder), **values)


def test_outputs_are_those_of_the_step(graph, tmp_path):
    x = tf1.placeholder(tf.float32, [2], "x")
    tf.identity(tf.square(x, name="squared") + 1.0, name="scope/sum")
    with tf1.Session(config=_dump(tmp_path, dump_step="1|3-4")) as session:
        for step in range(6):
            session.run("scope/sum:0", {"x:0": [step, 10.0]})
    folders = step_folders(tmp_path, "scope_sum")
    assert sorted(folders) == [1, 3, 4]
    for step, folder in folders.items():
        arrays = index_of(folder)
        np.testing.assert_array_equal(arrays["squared", "output", 0], [step**2, 100.0])
        np.testing.assert_array_equal(arrays["scope/sum", "output", 0], [step**2 + 1, 101.0])
        assert (folder / "Identity.scope_sum.output.0.npy").exists()


@pytest.mark.parametrize("mode, sides", [("input", {"input"}), ("output", {"output"}), ("all", {"input", "output"})])
def test_sides_and_layers(tmp_path, mode, sides):
    train_in_session(_dump(tmp_path, dump_mode=mode, dump_layer="project activate", dump_step="0"))
    arrays = index_of(step_folders(tmp_path, "update")[0])
    assert {op for op, *_ in arrays} == {"project", "activate"}
    assert {side for _, side, _ in arrays} == sides
    if "input" in sides:
        np.testing.assert_array_equal(arrays["project", "input", 0], FEATURES[:4])
    if len(sides) == 2:
        np.testing.assert_array_equal(arrays["project", "output", 0], arrays["activate", "input", 0])


@pytest.mark.parametrize("is_classic", [False, True])
def test_training_has_the_same_bits(tmp_path, is_classic):
    def make(*data):
        with classic_loops(is_classic):
            return build(*data)

    expected = train_in_session(make=make)
    assert_same_bits(train_in_session(_dump(tmp_path, dump_mode="all"), make=make), expected)
    assert sorted(step_folders(tmp_path, "update")) == [0, 1, 2, 3, 4]


def test_estimators_count_training_steps(tmp_path):
    folder = tmp_path / "dump"
    folder.mkdir()
    dump = DumpConfig(enable_dump=True, dump_path=str(folder), dump_step="0|3", dump_layer="project mean_loss")
    plain = train_npu_estimator(tmp_path / "plain", save_summary_steps=2, log_step_count_steps=2)
    dumped = train_npu_estimator(tmp_path / "dumped", dump_config=dump, save_summary_steps=2, log_step_count_steps=2)
    assert_same_bits(dumped, plain)
    folders = step_folders(folder, "train")
    assert sorted(folders) == [0, 3]
    assert set(index_of(folders[3])) == {("project", "output", 0), ("mean_loss", "output", 0)}


@pytest.mark.slow("an estimator in three modes")
def test_evaluation_and_prediction_have_folders_of_their_own(tmp_path):
    dump = DumpConfig(enable_dump=True, dump_path=str(tmp_path), dump_layer="project", dump_step="0")
    estimator = NPUEstimator(model_fn, config=NPURunConfig(model_dir=str(tmp_path / "model"), dump_config=dump))
    estimator.train(dataset, steps=1)
    estimator.evaluate(dataset, steps=1)
    next(estimator.predict(dataset, yield_single_examples=False))
    for name in ("train", "eval", "infer"):
        assert list(tmp_path.glob(f"*/0/{name}/0/0/index.json")), name


def test_each_step_of_keras_in_a_graph_is_dumped(tmp_path):
    with tf.Graph().as_default(), tf1.Session(config=_dump(tmp_path, dump_layer="project/MatMul")):
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,), name="project")])
        model.compile(tf1.train.GradientDescentOptimizer(0.1), "mse")
        model.fit(FEATURES, LABELS, batch_size=4, shuffle=False, verbose=0)
    dumped = [index_of(file.parent) for file in tmp_path.rglob("index.json")]
    assert [list(arrays) for arrays in dumped if arrays] == [[("project/MatMul", "output", 0)]] * 3


def test_statistics_are_a_table(graph, tmp_path):
    x = tf1.placeholder(tf.float32, [4], "x")
    tf.cast(tf.identity(x, "i"), tf.bfloat16, name="b")
    with tf1.Session(config=_dump(tmp_path, dump_data="stats")) as session:
        session.run(["b:0", "i:0"], {x: [1.0, 3.0, np.nan, np.inf]})
    with open(step_folders(tmp_path, "b")[0] / "statistics.csv", newline="") as file:
        rows = {row["op"]: row for row in csv.DictReader(file)}
    assert rows["i"]["dtype"] == "float32" and rows["b"]["dtype"] == "bfloat16"
    for row in rows.values():
        assert (row["shape"], row["nan"], row["inf"]) == ("4", "1", "1")
        assert (float(row["min"]), float(row["max"]), float(row["mean"])) == (1.0, 3.0, 2.0)


def test_bfloat16_is_written_as_float32_and_remembered(graph, tmp_path):
    tf.cast(tf1.placeholder(tf.float32, [], "x"), tf.bfloat16, name="b")
    with tf1.Session(config=_dump(tmp_path)) as session:
        session.run("b:0", {"x:0": 1.5})
    folder = step_folders(tmp_path, "b")[0]
    value = index_of(folder)["b", "output", 0]
    assert (value.dtype, value) == (np.float32, 1.5)
    assert '"dtype": "bfloat16"' in (folder / "index.json").read_text()


def test_alike_and_long_names_get_files_of_their_own(graph, tmp_path):
    long = "n" * 300
    x = tf1.placeholder(tf.float32, [], "x")
    for name in ("a/b", "a_b", long, long + "m"):
        x = tf.negative(x, name=name)
    with tf1.Session(config=_dump(tmp_path)) as session:
        session.run(x, {"x:0": 1.0})
    folder = next(pathlib.Path(tmp_path).glob("*/0/*/0/0"))
    arrays = index_of(folder)
    assert [float(arrays[name, "output", 0]) for name in ("a/b", "a_b", long, long + "m")] == [-1, 1, -1, 1]
    assert len(list(folder.glob("*.npy"))) == len(arrays) == 4


def test_unknown_layer_is_named_with_the_nearest(tmp_path, caplog):
    train_in_session(_dump(tmp_path, dump_layer="projekt"), steps=2)
    assert caplog.text.count("no operator 'projekt'") == 1
    assert "Did you mean 'project'?" in caplog.text
    assert not list(tmp_path.glob("*/0/*/*/*"))


def test_a_failed_run_is_no_step(graph, tmp_path):
    batch = tf1.data.make_one_shot_iterator(tf.data.Dataset.range(2)).get_next()
    tf.identity(batch, name="out")
    with tf1.Session(config=_dump(tmp_path)) as session:
        session.run("out:0")
        session.run("out:0")
        with pytest.raises(tf.errors.OutOfRangeError):
            session.run("out:0")
    assert sorted(step_folders(tmp_path, "out")) == [0, 1]


def test_nothing_is_written_through_links_that_were_there_before(tmp_path):
    victim, folder = tmp_path / "victim.txt", tmp_path / "folder"
    victim.write_text("mine")
    folder.mkdir()
    tensors = [DumpedTensor("a", "Abs", "output", 0, "a:0", np.ones(3, np.float32))]
    for name in ("Abs.a.output.0.npy", "index.json", "statistics.csv"):
        (folder / name).symlink_to(victim)
    write_tensors(str(folder), tensors)
    write_statistics(str(folder), tensors)
    assert victim.read_text() == "mine"
    np.testing.assert_array_equal(np.load(folder / "Abs.a.output.0.npy"), np.ones(3))
    assert sorted(path.name for path in folder.iterdir()) == ["Abs.a.output.0.npy", "index.json", "statistics.csv"]
    assert (folder / "index.json").stat().st_mode == victim.stat().st_mode  # as any file that is opened to write


@pytest.mark.parametrize("level", ["time", "rank", "graph", "step"])
def test_a_folder_of_a_dump_is_no_link_to_another_folder(tmp_path, level):
    root, elsewhere = tmp_path / "dumps", tmp_path / "elsewhere"
    elsewhere.mkdir()
    dumps = DumpFolder(str(root), 0, clock=lambda: 0.0)
    names = {"time": time.strftime("%Y%m%d%H%M%S", time.localtime(0)), "rank": "0", "graph": "loss", "step": "7"}
    root.mkdir()
    if level == "step":
        pathlib.Path(dumps.make_step_folder("loss", "graph", 1)).with_name("7").symlink_to(elsewhere)
    else:
        *above, last = [*names.values()][: [*names].index(level) + 1]
        link = root.joinpath(*above)
        link.mkdir(parents=True, exist_ok=True)
        (link / last).symlink_to(elsewhere)
    with pytest.raises(FileExistsError, match="dumps do not follow links"):
        dumps.make_step_folder("loss", "graph", 7)
    assert not list(elsewhere.iterdir())
