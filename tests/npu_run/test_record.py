"""`npu-run record` and `replay` on two real ranks, which start alike and see other batches and other random numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from npu_run.record import read_verdicts
from tests.goldens.keras3_models import beside_keras3
from tests.npu_run.launching import needs_horovod, npu_run, write_script

TRAIN = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
from npu_bridge.npu_init import FixedLossScaleManager, NPUOptimizer, get_rank_id
seed = int(sys.argv[1]) + get_rank_id()
draw = np.random.RandomState(seed)
tf.set_random_seed(seed)
rows = draw.randn(64, 8).astype("float32")
inputs = tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(rows).repeat().batch(8)).get_next()
hidden = tf.nn.dropout(tf.layers.dense(inputs, 4), rate=0.3)
loss = tf.reduce_mean(tf.square(hidden - 1.0))
inner = tf.train.AdamOptimizer(0.01)
train = NPUOptimizer(inner, FixedLossScaleManager(8.0), is_distributed=True, is_loss_scale=True).minimize(
    loss, tf.train.get_or_create_global_step()
)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for _ in range(4):
        session.run(train)
"""


def test_verdicts_of_many_ranks_keep_their_numbers(tmp_path):
    for rank in (0, 1, 2, 10, 11):
        (tmp_path / f"replay_rank_{rank}.json").write_text(json.dumps({"of": rank}))
    assert {rank: found["of"] for rank, found in read_verdicts(tmp_path).items()} == {n: n for n in (0, 1, 2, 10, 11)}


@pytest.mark.slow("three trainings on two ranks; test_record.py of trials has them on one")
@needs_horovod
def test_a_job_of_two_ranks_is_replayed_bit_for_bit(tmp_path):
    write_script(tmp_path, TRAIN)
    code, output = npu_run("record", "--steps", 3, "-np", 2, "train.py", 1, cwd=tmp_path)
    assert code == 0 and "3 steps on 2 rank(s)" in output, output
    folders = [tmp_path / "recorded" / f"rank_{rank}" for rank in (0, 1)]
    facts = [json.loads((folder / "record.json").read_text()) for folder in folders]
    assert facts[0]["losses"] != facts[1]["losses"]
    first, second = (dict(np.load(folder / "weights_after.npz")) for folder in folders)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    code, output = npu_run("replay", "recorded", "-np", 2, "train.py", 7, cwd=tmp_path)
    assert code == 0 and "bit for bit" in output, output
    code, output = npu_run("replay", "--json", "recorded", "-np", 2, "train.py", 7, cwd=tmp_path)
    facts = json.loads(output[output.index("{\n") :])
    assert (code, facts["steps"], facts["ranks"], facts["differences"]) == (0, 3, 2, [])


# Keras 3 keeps the state of a dropout's seed in a variable.
FIT = """
import sys
import keras
import numpy as np
from npu_bridge.npu_init import get_rank_id, npu_callbacks_append, npu_keras_optimizer
assert keras.__version__.startswith("3.")
seed = int(sys.argv[1]) + get_rank_id()
keras.utils.set_random_seed(seed)
layers = [keras.layers.Input([2]), keras.layers.Dense(3, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
model = keras.Sequential(layers)
model.compile(npu_keras_optimizer(getattr(keras.optimizers, sys.argv[2])(0.01)), "mse")
features = np.random.RandomState(seed).randn(32, 2)
model.fit(features, np.ones([32, 1]), batch_size=4, verbose=0, callbacks=npu_callbacks_append())
"""


@needs_horovod
@beside_keras3
def test_fit_of_keras_3_is_replayed_bit_for_bit(tmp_path):
    write_script(tmp_path, FIT)
    code, output = npu_run("record", "--steps", 3, "-np", 2, "train.py", 1, "Adam", cwd=tmp_path)
    assert code == 0 and "3 steps on 2 rank(s)" in output and "2 tensors of batches" in output, output
    with np.load(tmp_path / "recorded/rank_0/weights_after.npz") as after:
        assert {"2/seed_generator_state", "7/sequential_dense_kernel_momentum"} <= set(after.files)
    code, output = npu_run("replay", "recorded", "-np", 2, "train.py", 7, "Adam", cwd=tmp_path)
    assert code == 0 and "bit for bit" in output, output
    code, output = npu_run("replay", "recorded", "-np", 2, "train.py", 1, "SGD", cwd=tmp_path)
    assert code == 1 and "the loss of step 1 is" in output, output


@beside_keras3
def test_a_script_may_import_keras_2_before_tensorflow(tmp_path):
    """The changes of `record` in TensorFlow must not need a Keras that is half loaded."""
    text = FIT.replace("import keras", "import tf_keras as keras").replace('"3."', '"2."')
    write_script(tmp_path, text.replace("layers.Input([2])", "layers.InputLayer([2])"))
    code, output = npu_run("record", "--steps", 2, "train.py", 1, "Adam", cwd=tmp_path)
    assert code == 0 and "2 steps on 1 rank(s)" in output, output
