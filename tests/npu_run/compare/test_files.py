"""Event files and checkpoints are read as TensorFlow has written them, and damaged ones are one sentence."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.reporting.tensorboard import TensorBoardWriter
from npu_run.compare.arrays import read_pieces
from npu_run.compare.checkpoint_files import checkpoints_in, read_checkpoint
from npu_run.compare.events import read_scalars
from npu_run.compare.losses import read_losses
from npu_run.compare.verdict import NotComparableError

tf1 = tf.compat.v1


def write_tensors(prefix, tensors):
    """Writes a checkpoint of these tensors by their names; returns its prefix."""
    slices = [""] * len(tensors)
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=[*tensors], shape_and_slices=slices, tensors=[*tensors.values()])
    return prefix


def write_events(folder, losses, tag="loss"):
    with tf.Graph().as_default(), tf1.summary.FileWriter(str(folder)) as writer:
        writer.add_graph(tf1.get_default_graph())
        for step, loss in enumerate(losses, 1):
            writer.add_summary(tf1.Summary(value=[tf1.Summary.Value(tag=tag, simple_value=loss)]), step)


@pytest.mark.slow("writes files of every kind")
def test_scalars_of_both_generations_and_of_ours(tmp_path):
    write_events(tmp_path / "one", [3.0, 2.0, float("nan")])
    with tf.summary.create_file_writer(str(tmp_path / "two" / "train")).as_default():
        for step in range(300):
            tf.summary.scalar("epoch_loss", 1.0 / (step + 1), step)
            tf.summary.histogram("weights", [1.0, 2.0], step)
    ours = TensorBoardWriter(str(tmp_path / "ours"))
    ours.begin(0)
    ours.write(7, {"loss": 0.5, "steps_per_sec": 3.0}, "float16")
    ours.close()
    one = read_scalars(str(tmp_path / "one"))["loss"]
    assert list(one) == [1, 2, 3] and one[2] == 2.0 and np.isnan(one[3])
    losses = read_losses(str(tmp_path / "two"))
    assert len(losses.steps) == 300 and losses.values[3] == 0.25
    assert read_losses(str(tmp_path / "ours")).values == [0.5]
    assert read_losses(str(tmp_path / "ours"), "global_step/sec").values == [3.0]
    with pytest.raises(NotComparableError, match="no event with the tag 'nothing'; its tags are .*loss"):
        read_losses(str(tmp_path / "ours"), "nothing")


def test_an_event_file_that_was_cut_off_gives_what_came_before(tmp_path):
    write_events(tmp_path, [5.0, 4.0, 3.0])
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        found = read_scalars(str(tmp_path)).get("loss", {})
        assert found == dict(list({1: 5.0, 2: 4.0, 3: 3.0}.items())[: len(found)])
    path.write_bytes(b"\xff" * 1000)
    assert read_scalars(str(tmp_path)) == {}


def write_checkpoint(folder, step=3, scale=1.0, extra=()):
    with tf.Graph().as_default():
        tf1.get_variable("dense/kernel", initializer=np.arange(12, dtype=np.float32).reshape(3, 4) * np.float32(scale))
        tf1.get_variable("half", initializer=np.ones(5, np.float16))
        tf1.get_variable("brain", initializer=tf.cast([0.5, 1.5], tf.bfloat16))
        tf1.get_variable("count", initializer=np.int64(9))
        for number in range(400):  # several blocks of the index
            tf1.get_variable(f"layer_{number}/beta", initializer=np.float32([number]))
        for name, value in extra:
            tf1.get_variable(name, initializer=value)
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            return tf1.train.Saver().save(session, str(folder / "model.ckpt"), step)


def test_a_checkpoint_is_what_tensorflow_reads(tmp_path):
    prefix = write_checkpoint(tmp_path)
    tensors = read_checkpoint(prefix)
    reader = tf.train.load_checkpoint(prefix)
    assert set(tensors) == set(reader.get_variable_to_shape_map())
    for name, array in tensors.items():
        (values,) = read_pieces(array)
        expected = np.asarray(reader.get_tensor(name), np.float64)
        np.testing.assert_array_equal(values.reshape(array.shape).astype(np.float64), expected, name)
    assert checkpoints_in(str(tmp_path)) == {3: prefix} and checkpoints_in(prefix) == {3: prefix}


@pytest.mark.parametrize(
    "names, expected",
    [
        (["cp-0001.ckpt", "cp-0002.ckpt"], [1, 2]),
        (["weights.01-0.55", "weights.02-0.5"], [1, 2]),
        (["model_v1.5.ckpt-7", "best.ckpt", "2/model.ckpt-7", "2/model.ckpt-8"], [-1, 7, 8]),
        (["model.ckpt-100", "2/model.ckpt-100", "3/model.ckpt-100"], [100]),
        (["G/model.ckpt-100", "D/model.ckpt-100"], "D/model.ckpt-100 and .*/G/model.ckpt-100 have the same number"),
        (["best.ckpt", "last.ckpt", "cp-1.ckpt", "2/cp-2.ckpt"], [1, 2]),
        (["best.ckpt", "last.ckpt"], "best.ckpt and .*last.ckpt have the same number, or none"),
    ],
)
def test_every_checkpoint_of_a_folder_has_a_number_of_its_own(tmp_path, names, expected):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.index").touch()
    if isinstance(expected, str):
        with pytest.raises(NotComparableError, match=expected):
            checkpoints_in(str(tmp_path))
    else:
        assert [*checkpoints_in(str(tmp_path))] == expected


def test_a_checkpoint_of_objects_and_one_in_slices(tmp_path):
    model = tf.train.Checkpoint(layer=tf.train.Checkpoint(kernel=tf.Variable([1.0, 2.0])), text=tf.Variable("words"))
    tensors = read_checkpoint(model.save(str(tmp_path / "ckpt")))
    assert set(tensors) == {"layer/kernel", "save_counter"}, "texts are left out"
    with tf.Graph().as_default():
        tf1.get_variable("parts", [10, 2], partitioner=tf1.fixed_size_partitioner(2))
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            prefix = tf1.train.Saver().save(session, str(tmp_path / "sliced"), 1)
    tensors = read_checkpoint(prefix)
    assert {name: (one.shape, len(one.read())) for name, one in tensors.items()} == {"parts": ((10, 2), 20)}


DAMAGE = {
    "cut off": (".data-00000-of-00001", lambda content: content[:100]),
    "another byte": (".data-00000-of-00001", lambda content: b"\x01" + content[1:]),
    "no data": (".data-00000-of-00001", lambda content: None),
    "no index": (".index", lambda content: None),
    "empty index": (".index", lambda content: b""),
    "half an index": (".index", lambda content: content[: len(content) // 2]),
    "holes": (".index", lambda content: b"\0" * (len(content) - 60) + content[-60:]),
    "noise": (".index", lambda content: b"\xf7" * (len(content) - 48) + content[-48:]),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_one_sentence(tmp_path, kind):
    suffix, change = DAMAGE[kind]
    prefix = str(tmp_path / "model.ckpt-3")
    write_tensors(prefix, {"a": tf.ones([100]), "b": tf.zeros([3, 3])})
    path = tmp_path / f"model.ckpt-3{suffix}"
    content = change(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(NotComparableError, match=r"model\.ckpt-3 cannot be read: \S") as caught:
        for tensor in read_checkpoint(prefix).values():
            tensor.read()
    assert "\n" not in str(caught.value)
