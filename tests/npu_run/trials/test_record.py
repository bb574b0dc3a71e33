"""A recorded start: replayed here bit for bit, and by the file that needs TensorFlow alone."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.base.tf_internals.names import HAS_ESTIMATORS
from npu_run.record import record, replay
from npu_run.trials.fit import TrainStepCallback
from npu_run.trials.replay_tf1 import Replay
from tests.npu_run.launching import write_script

tf1 = tf.compat.v1

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
ALONE = """
import sys
sys.modules["npu_bridge"] = None
sys.path.append("recorded")
from replay_tf1 import Replay
replay = Replay("recorded")
"""
ELSEWHERE = f"""{ALONE}
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
HOOKED = f"""{ALONE}
losses = []
with tf.train.MonitoredTrainingSession(hooks=[replay]) as session:
    while not session.should_stop():
        losses.append(session.run([loss, train])[0])
assert losses == replay.losses, (losses, replay.losses)
print("the same", len(losses))
"""
# A loop that evaluates between steps, and never asks whether it should stop.
UNASKED = HOOKED.replace(
    "while not session.should_stop():", "for _ in range(9):\n        session.run(loss, {targets: np.ones(8)})"
)
# The behaviour of a BERT, after one's first import has loaded Keras and with it TensorFlow.
BY_HAND = """
from tensorflow.keras.layers import Dense
import numpy as np
import tensorflow as tf
from npu_bridge.npu_init import *
dataset = tf.data.Dataset.range(64).map(lambda i: tf.random_uniform([8]) + tf.cast(i, tf.float32)).repeat().batch(8)
features = tf.data.make_one_shot_iterator(dataset).get_next() / 64.0
targets = tf.placeholder(tf.float32, [8, 1])
noise = tf.raw_ops.RandomUniform(shape=[8, 1], dtype=tf.float32)  # has no seed, as some of NPU scripts have none
begin, size, _ = tf.image.sample_distorted_bounding_box([8, 8, 3], tf.zeros([1, 1, 4]), min_object_covered=0.1)
kernel = tf.get_variable("kernel", [8, 1])
loss = tf.reduce_mean((tf.matmul(features, kernel) + noise - targets) ** 2) + 0.0 * tf.cast(begin[0], tf.float32)
(gradient,) = tf.gradients(loss * 1024.0, [kernel])
moment = tf.get_variable("kernel/adam_m", initializer=tf.zeros([8, 1]), trainable=False)
step = tf.train.get_or_create_global_step()
moved = 0.9 * moment + 0.1 * gradient / 1024.0
train = tf.group(kernel.assign(kernel - 0.1 * moved), moment.assign(moved))
train = tf.group(train, step.assign(step + 1))
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for _ in range(3):
        print("loss", session.run([loss, train], {targets: [["1.5"]] * 8})[0])
        session.run(loss, {targets: np.ones([8, 1])})
"""
NO_INPUT = """
import numpy as np
import tensorflow as tf
import keras
features = np.random.RandomState({seed}).randn(64, 4).astype("float32")
init = {keras}.initializers.RandomNormal(seed={seed})
model = {keras}.Sequential([{keras}.layers.Dense(8, "relu", kernel_initializer=init), {keras}.layers.Dense(1)])
model.compile({keras}.optimizers.Adam(0.01), loss="mse")
for _ in range(4):
    stop = {keras}.callbacks.TerminateOnNaN()  # not in a list
    model.fit(features[:16], features[:16].sum(1), batch_size=8, verbose=0, shuffle=False, callbacks=stop)
"""
KERASES = ["tf.keras", *([] if HAS_ESTIMATORS else ["keras"])]
FIT = """
import numpy as np
import tensorflow as tf
tf.contrib  # of version 1
draw = np.random.RandomState(0)
model = tf.keras.Sequential([tf.keras.layers.Dense(3, activation="relu", input_shape=(2,)), tf.keras.layers.Dense(1)])
model.compile("adam", "mse")
model.fit(draw.randn(32, 2), np.ones([32, 1]), epochs=2, batch_size=4, verbose=0)
"""
MIXED = """
import numpy as np
import tensorflow as tf
from npu_bridge.npu_init import *
features = tf.data.make_one_shot_iterator(tf.data.Dataset.range(64).repeat()).get_next()
kernel = tf.get_variable("kernel", initializer=tf.constant([[1.0], [0.5]]))
loss = tf.square(tf.reduce_sum(tf.matmul([[1.0, 2049.0]], kernel)) - tf.cast(features, tf.float32))
manager = ExponentialUpdateLossScaleManager(init_loss_scale=256.0, incr_every_n_steps=1000)
train = NPULossScaleOptimizer(tf.train.GradientDescentOptimizer(1e-9), manager).minimize(loss)
config = tf.ConfigProto()
custom = config.graph_options.rewrite_options.custom_optimizers.add()
custom.name = "NpuOptimizer"
custom.parameter_map["precision_mode"].s = tf.compat.as_bytes("allow_mix_precision")
with tf.Session(config=npu_config_proto(config_proto=config)) as session:
    session.run(tf.global_variables_initializer())
    train = util.set_iteration_per_loop(session, train, 10)
    for _ in range(3):
        session.run(train)
"""


@pytest.fixture
def recorder(command, trials, tmp_path):
    """Records some steps of a script, in `recorded`; gives what was printed."""

    def run(text, *arguments, steps=3, options=()):
        write_script(tmp_path, text)
        code, output = command(record, *options, "--steps", steps, "train.py", *arguments)
        assert code == 0, output + trials.printed
        return output

    return run


@pytest.fixture
def recorded(recorder):
    """Records three steps with seed 1; gives what was printed."""
    return recorder(SESSION + TRAINING, 1)


def test_the_command_that_trains_from_a_record_can_be_pasted(command, trials, tmp_path):
    write_script(tmp_path, SESSION + TRAINING, "my train.py")
    code, said = command(record, "--steps", 3, "my train.py", 1)
    assert code == 0 and "npu-run replay recorded 'my train.py' ... trains from it" in said, said + trials.printed


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
    assert code == 1 and "the loss of step 1 is" in output and "dense/kernel differs by" in output, output


def test_pure_tensorflow_replays_it(recorded, warm_python, tmp_path):
    for text in (ELSEWHERE, HOOKED, UNASKED):
        script = write_script(tmp_path, SESSION + text, "elsewhere.py")
        ended = warm_python.run([script, 5], cwd=tmp_path)
        assert "the same 3" in ended.stdout, ended.stdout + ended.stderr


def test_weights_go_into_variables_that_start_from_a_checkpoint(tmp_path):
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0/record.json").write_text(json.dumps({"steps": 0, "losses": []}))
    np.savez(tmp_path / "rank_0/weights.npz", w=[3.0])
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = tf1.get_variable("w", initializer=[1.0], use_resource=False)
        session.run(variable.initializer)
        tf1.train.Saver().save(session, f"{tmp_path}/model")
        tf1.train.init_from_checkpoint(f"{tmp_path}/model", {"w": variable})
        Replay(str(tmp_path)).load_weights(session)
        assert session.run(variable) == [3.0]


def test_many_weights_are_loaded_in_one_run(monkeypatch, tmp_path):
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0/record.json").write_text(json.dumps({"steps": 0, "losses": []}))
    np.savez(tmp_path / "rank_0/weights.npz", a=[5.0], b=[6.0], c=[7.0], d=[8.0])
    with tf.Graph().as_default(), tf1.Session() as session:
        shared = tf.zeros([1])
        variables = [tf1.Variable(start, name=name) for name, start in zip("abcd", ([1.0], [2.0], shared, shared))]
        sizes, run = [], session.run
        monkeypatch.setattr(session, "run", lambda targets, feeds: sizes.append(len(targets)) or run(targets, feeds))
        Replay(str(tmp_path)).load_weights(session)
        assert np.ravel(run(variables)).tolist() == [5, 6, 7, 8]
    assert sizes == [3, 1]  # two start from one tensor, which has one value in a run


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


def test_what_cannot_be_recorded_is_said(recorder):
    output = recorder(LOOP, steps=2)
    assert "not recorded: while/random_normal/RandomStandardNormal:0, as it is inside a loop" in output


# Draws in conditions: one that a placeholder decides, and both branches of a constant one.
CONDITIONS = """
import sys
import tensorflow as tf
tf.set_random_seed(int(sys.argv[1]))
is_training, phase = tf.placeholder(tf.bool, []), tf.equal("train", "train")
weight = tf.get_variable("weight", initializer=[1.0, 2.0, 3.0, 4.0])
masked = tf.layers.dropout(weight, 0.5, training=is_training, name="masked")
noise = tf.cond(phase, lambda: tf.random_normal([4], name="noise"), lambda: tf.random_uniform([4], name="none"))
train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum((masked + noise) ** 2))
with tf.train.MonitoredTrainingSession() as session:
    for _ in range(4):
        session.run(train, {is_training: True})
        session.run(masked, {is_training: False})
"""


def test_what_is_drawn_in_a_condition_is_recorded(recorder, command, trials):
    output = recorder(CONDITIONS, 1)
    assert "2 random tensors" in output and "not recorded" not in output, output
    code, output = command(replay, "recorded", "train.py", 2)
    assert (code, "bit for bit" in output) == (0, True), output + trials.printed


# A frozen batch normalisation. It leaves the statistics of its batch unset, outputs 1 to 4, and nothing reads them.
FROZEN = """
import tensorflow as tf
hidden = tf.layers.conv2d(tf.random_normal([2, 4, 4, 3]), 3, 1, name="before")
hidden = tf.layers.batch_normalization(hidden, training=False, fused=True, name="frozen")
train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(hidden ** 2))
with tf.train.MonitoredTrainingSession() as session:
    for _ in range(3):
        session.run(train)
"""


def test_tensors_are_those_that_something_reads(recorder, tmp_path):
    recorder(FROZEN, steps=2, options=["--tensors"])
    kept = np.load(tmp_path / "recorded/rank_0/tensors_00001.npz").files
    assert "before/Conv2D:0" in kept
    assert "frozen/FusedBatchNormV3:0" in kept
    assert not {f"frozen/FusedBatchNormV3:{output}" for output in range(1, 5)} & set(kept)


# One loss after another, as where batches of several lengths have a graph each.
TWO_LOSSES = """
import tensorflow as tf
weight = tf.get_variable("weight", initializer=[1.0, 2.0])
data = [tf.placeholder(tf.float32, [2], name=name) for name in ("short", "long")]
losses = [tf.reduce_sum((weight - each) ** 2, name=each.op.name + "_loss") for each in data]
train = [tf.train.GradientDescentOptimizer(0.1).minimize(loss) for loss in losses]
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for step in range(4):
        session.run(train[step % 2], {data[step % 2]: [0.5, 0.5]})
"""


def test_each_step_has_its_own_loss(recorder, tmp_path):
    recorder(TWO_LOSSES)
    facts = json.loads((tmp_path / "recorded/rank_0/record.json").read_text())
    assert facts["loss_names"] == ["short_loss:0", "long_loss:0", "short_loss:0"]
    assert facts["losses"] == pytest.approx([2.5, 1.6, 1.024])


def test_an_optimizer_of_assignments_is_recorded(recorder, command, trials, tmp_path):
    assert "not recorded" not in recorder(BY_HAND, steps=5)
    facts = json.loads((tmp_path / "recorded/rank_0/record.json").read_text())
    printed = [float(line.split()[1]) for line in trials.printed.splitlines() if line.startswith("loss ")]
    assert facts["losses"] == pytest.approx(printed, rel=1e-6) and len(printed) == 3, "without the scale"
    assert facts["updates"] == ["Assign"] and facts["kinds"]["Placeholder:0"] == "fed"
    assert sorted(set(facts["kinds"].values())) == ["batch", "fed", "random"] and "RandomUniform:0" in facts["kinds"]
    assert np.load(tmp_path / "recorded/rank_0/weights_after.npz")["global_step"] == 3, "the training was shorter"
    code, output = command(replay, "recorded", "train.py")
    assert code == 0, output + trials.printed


def test_fit_of_keras_in_a_graph_is_recorded(recorder, command, trials, tmp_path):
    output = recorder(FIT, steps=5)
    assert "5 steps" in output and "3 fed tensors" in output, output
    write_script(tmp_path, FIT.replace("RandomState(0)", "RandomState(1)"))
    assert command(replay, "recorded", "train.py")[0] == 0, trials.printed


@pytest.mark.slow("sessions have fast cases")
def test_fit_of_tensorflow_2_is_recorded(recorder, command, trials, tmp_path):
    text = FIT.replace("tf.contrib  # of version 1", "import npu_device")
    text = text.replace("Dense(1)])", "Dense(1), tf.keras.layers.Dropout(0.2)])")
    output = recorder(text, steps=5)
    assert "5 steps" in output and "2 tensors of batches" in output, output
    assert "not recorded: RandomUniform, as it is inside the function that trains" in output and "Replay" not in output
    write_script(tmp_path, text.replace("RandomState(0)", "RandomState(1)"))
    assert command(replay, "recorded", "train.py")[0] == 0, trials.printed
    write_script(tmp_path, text.replace('"adam"', '"sgd"'))
    code, output = command(replay, "recorded", "train.py")
    assert code == 1 and "the loss of step 1 is" in output, output + trials.printed


@pytest.mark.slow("sessions have fast cases")
@pytest.mark.parametrize("keras", KERASES)
def test_fit_of_a_model_without_an_input_shape_is_recorded(recorder, command, trials, tmp_path, keras):
    """As README's: it has no weights before its first batch."""
    assert "3 steps" in recorder(NO_INPUT.format(keras=keras, seed=0))
    start, end = (dict(np.load(f"recorded/rank_0/{name}.npz")) for name in ("weights", "weights_after"))
    assert start.keys() == end.keys() and any((start[name] != end[name]).any() for name in start)
    write_script(tmp_path, NO_INPUT.format(keras=keras, seed=1))
    code, output = command(replay, "recorded", "train.py")
    assert code == 0 and "bit for bit" in output, output + trials.printed


RAGGED = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0], [5.0]])
AS_TENSOR = tf.keras.layers.Lambda(lambda rows: rows.to_tensor(shape=[None, 2]))


@pytest.mark.parametrize("rows, begin", [(tf.sparse.eye(4, 3), []), (RAGGED, [AS_TENSOR])], ids=["sparse", "ragged"])
def test_batches_stay_sparse_or_ragged(rows, begin):
    weights = []
    for kind in (TrainStepCallback, lambda *_: tf.keras.callbacks.Callback()):
        model = tf.keras.Sequential([*begin, tf.keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse")
        data = tf.data.Dataset.from_tensor_slices((rows, [1.0, 2.0, 3.0, 4.0])).batch(2)
        model.fit(data, verbose=0, callbacks=[kind(model, 0)])
        weights.append(model.get_weights())
    assert all(map(np.array_equal, *weights))


def test_float32_whatever_a_script_asks_for(recorder, command, trials, tmp_path):
    losses = []
    for options in ([], ["--float32"]):
        assert "not recorded" not in recorder(MIXED, options=options)  # one step in each run
        losses.append(json.loads((tmp_path / "recorded/rank_0/record.json").read_text())["losses"])
    assert losses[1][0] == 1025.5**2 and losses[0][0] == 1025.0**2, "float16 has no number 2049"
    assert np.load(tmp_path / "recorded/rank_0/weights.npz")["loss_scale"] == 256, "as it is called on an NPU"
    assert command(replay, "recorded", "train.py")[0] == 0, trials.printed


def test_a_script_that_races_with_itself_is_told(recorder, command, tmp_path):
    text = (SESSION + TRAINING).replace("Optimizer(0.01)", "Optimizer(0.01 / (1.0 + tf.cast(step, tf.float32)))")
    text = text.replace("hidden =", "step = tf.train.get_or_create_global_step()\nhidden =", 1)
    text = text.replace(
        "(loss, tf.train.get_or_create_global_step())", "(loss)\ntrain = tf.group(train, step.assign(step + 1))"
    )
    assert "record: not repeatable: a step writes global_step (" in recorder(text, 1)
    write_script(tmp_path, text.replace("0.01 /", "0.02 /"))
    code, output = command(replay, "recorded", "train.py", 1)
    assert code == 1 and "not repeatable, not even on the recording machine: a step writes global_step (" in output


@pytest.mark.parametrize(
    "text, said",
    [
        ("print('nothing')", "no run of a session was a training step"),
        ("raise SystemExit(3)", "the script ended with exit code 3"),
    ],
)
def test_nothing_to_record_is_an_error(command, tmp_path, text, said):
    write_script(tmp_path, text)
    code, output = command(record, "train.py")
    assert code == 2 and said in output


EAGER = """
import tensorflow as tf
import keras
tf.keras.Sequential([tf.keras.layers.Dense(1)]).predict(tf.ones([8, 2]), verbose=0)
weights = tf.Variable(1.0)
optimizer = {}.SGD(0.1)
for step in range(3):
    with tf.GradientTape() as tape:
        loss = weights**2
    optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
    print("made step", step)
"""


@pytest.mark.parametrize("name", ["tf.keras.optimizers", "tf.keras.optimizers.legacy", "keras.optimizers"])
def test_a_loop_of_its_own_is_refused_at_its_first_step(command, trials, tmp_path, name):
    write_script(tmp_path, EAGER.format(name))
    code, output = command(record, "train.py")
    assert code == 2 and "nothing was recorded: " in output and "not eager code" in output, output
    assert "made step" not in trials.printed and trials.runs == 1


def test_a_folder_without_a_record_is_an_error(command, tmp_path):
    write_script(tmp_path, SESSION)
    os.makedirs("empty")
    code, output = command(replay, "empty", "train.py")
    assert code == 2 and "holds no record" in output


def test_another_model_is_an_error(recorded, command, trials, tmp_path):
    write_script(tmp_path, (SESSION + TRAINING).replace("dense(features, 4", "dense(features, 5"), "other.py")
    code, output = command(replay, "recorded", "other.py", 1)
    assert code == 2 and "variable dense/kernel has another shape" in trials.printed, output + trials.printed
