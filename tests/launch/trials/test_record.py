"""A recorded start: replayed here bit for bit, and by the file that needs TensorFlow alone."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from npu_bridge.launch.record import record, replay
from tests.launch.trials.running import write_script

# Batches of a dataset, batches that are fed, and dropout. The first argument is the seed of all of it.
SESSION = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
seed = int(sys.argv[1])
tf.set_random_seed(seed)
draw = np.random.RandomState(seed)
dataset = tf.data.Dataset.from_tensor_slices(draw.randn(64, 8).astype("float32")).shuffle(64).repeat().batch(8)
features = tf.data.make_one_shot_iterator(dataset).get_next()
targets = tf.placeholder(tf.float32, [8])
hidden = tf.nn.dropout(tf.layers.dense(features, 4, tf.nn.relu), rate=0.3)
loss = tf.reduce_mean(tf.square(tf.reduce_sum(hidden, 1) - targets))
train = tf.train.AdamOptimizer(0.01).minimize(loss, tf.train.get_or_create_global_step())
"""
TRAINING = """
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for _ in range(6):
        session.run(train, {targets: draw.randn(8)})
"""
# The same on a machine that has no npu_bridge.
ELSEWHERE = """
import sys
sys.modules["npu_bridge"] = None
sys.path.append("recorded")
from replay_tf1 import Replay

replay = Replay("recorded")
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    replay.load_weights(session)
    for step in range(replay.steps):
        value, _ = session.run([loss, train], feed_dict=replay.feeds(session.graph, step))
        assert value == replay.losses[step], (step, value, replay.losses)
    after = dict(np.load("recorded/rank_0/weights_after.npz"))
    for variable in tf.global_variables():
        assert (session.run(variable) == after[variable.op.name]).all(), variable.name
print("the same", replay.steps)
"""
HOOKED = """
import sys
sys.modules["npu_bridge"] = None
sys.path.append("recorded")
from replay_tf1 import Replay
replay = Replay("recorded")
losses = []
with tf.train.MonitoredTrainingSession(hooks=[replay]) as session:
    while not session.should_stop():
        losses.append(session.run([loss, train])[0])
assert losses == replay.losses, (losses, replay.losses)
print("the same", len(losses))
"""


@pytest.fixture
def recorded(command, tmp_path):
    """A record of three steps with seed 1, in `recorded`; gives what was printed."""
    write_script(tmp_path, SESSION + TRAINING)
    code, output = command(record, "--steps", 3, "train.py", 1)
    assert code == 0, output
    return output


def test_a_record_holds_all_that_a_step_reads(recorded, tmp_path):
    assert "3 steps on 1 rank(s): initial weights, 1 tensors of batches, 1 fed tensors, 1 random tensors" in recorded
    assert "npu-run replay recorded train.py ... trains from it" in recorded
    assert "Replay('recorded')" in recorded and "not recorded" not in recorded
    folder = tmp_path / "recorded" / "rank_0"
    facts = json.loads((folder / "record.json").read_text())
    assert facts["steps"] == len(facts["losses"]) == 3 and facts["not_recorded"] == {}
    assert sorted(facts["kinds"].values()) == ["batch", "fed", "random"]
    step = np.load(folder / "step_00002.npz")
    assert set(step.files) == set(facts["kinds"]) and step["IteratorGetNext:0"].shape == (8, 8)
    weights, after = np.load(folder / "weights.npz"), np.load(folder / "weights_after.npz")
    assert {"dense/kernel", "dense/kernel/Adam", "global_step"} <= set(weights.files)
    assert weights["global_step"] == 0 and after["global_step"] == 3
    assert not (folder / "step_00003.npz").exists()


def test_it_is_replayed_bit_for_bit_whatever_the_script_would_have_drawn(recorded, command, trials):
    code, output = command(replay, "recorded", "train.py", 2)
    assert (code, "bit for bit" in output) == (0, True), output + trials.printed


def test_another_training_is_told(recorded, command, tmp_path):
    write_script(tmp_path, (SESSION + TRAINING).replace("AdamOptimizer(0.01)", "AdamOptimizer(0.0101)"), "other.py")
    code, output = command(replay, "recorded", "other.py", 1)
    assert code == 1 and "the loss of step 1 is" in output and "dense/kernel is off by" in output, output


def test_pure_tensorflow_replays_it(recorded, warm_python, tmp_path):
    for text in (ELSEWHERE, HOOKED):
        script = write_script(tmp_path, SESSION + text, "elsewhere.py")
        ended = warm_python.run([script, 5], cwd=tmp_path)
        assert "the same 3" in ended.stdout, ended.stdout + ended.stderr


# A script of TensorFlow 1.
LOOP = """
import tensorflow as tf
weight = tf.get_variable("weight", [4])
state = tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s + tf.random_normal([4]) * weight), (0, weight))[1]
train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(state ** 2))
with tf.train.MonitoredTrainingSession() as session:
    for _ in range(4):
        session.run(train)
"""


def test_what_cannot_be_recorded_is_said(command, tmp_path):
    write_script(tmp_path, LOOP)
    code, output = command(record, "--steps", 2, "train.py")
    assert code == 0 and "not recorded: while/random_normal/RandomStandardNormal:0, as it is inside a loop" in output


def test_the_same_folders_serve_again_and_what_others_have_put_there_stays(recorded, command, tmp_path):
    (tmp_path / "recorded" / "notes.txt").write_text("mine")
    assert command(record, "--steps", 2, "train.py", 1)[0] == 0
    names = {path.name for path in (tmp_path / "recorded" / "rank_0").iterdir()}
    assert "step_00001.npz" in names and "step_00002.npz" not in names
    for _ in range(2):
        code, output = command(replay, "recorded", "train.py", 7)
        assert code == 0 and "2 steps on 1 rank(s): losses and weights are those of the record" in output
    (tmp_path / "recorded" / "rank_0" / "thesis.txt").write_text("years")
    for function, arguments in ((record, ["train.py", 1]), (replay, ["--out", ".", "recorded", "train.py", 7])):
        code, output = command(function, *arguments)
        assert code == 2 and "did not make. Expected a new folder, an empty one, or one that npu-run" in output
    assert (tmp_path / "recorded" / "rank_0" / "thesis.txt").read_text() == "years"
    assert (tmp_path / "recorded" / "notes.txt").read_text() == "mine" and (tmp_path / "train.py").exists()


@pytest.mark.parametrize(
    "text, said",
    [
        ("print('nothing')", "no session run trained"),
        ("raise SystemExit(3)", "the script ended with exit code 3"),
    ],
)
def test_nothing_to_record_is_an_error(command, tmp_path, text, said):
    write_script(tmp_path, text)
    code, output = command(record, "train.py")
    assert code == 2 and said in output


def test_a_folder_without_a_record_is_an_error(command, tmp_path):
    write_script(tmp_path, SESSION)
    os.makedirs("empty")
    code, output = command(replay, "empty", "train.py")
    assert code == 2 and "holds no record" in output


def test_another_model_is_an_error(recorded, command, trials, tmp_path):
    write_script(tmp_path, (SESSION + TRAINING).replace("dense(features, 4", "dense(features, 5"), "other.py")
    code, output = command(replay, "recorded", "other.py", 1)
    assert code == 2 and "variable dense/kernel has another shape" in trials.printed, output + trials.printed
