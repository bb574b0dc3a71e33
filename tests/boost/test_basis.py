"""The basis of a subspace: principal components of the weights in checkpoints of both formats."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import boost
from npu_bridge.optimizers.subspace.basis import principal_directions, row_range_of_part

tf1 = tf.compat.v1


def points(count, width, rank, seed=0):
    """Points near a subspace, along whose directions they differ by 10, 9, 8..."""
    random = np.random.default_rng(seed)
    along = random.normal(size=(count, rank)) * np.arange(10, 10 - rank, -1)
    directions = np.linalg.qr(random.normal(size=(width, rank)))[0].T
    return (5.0 + along @ directions + 0.01 * random.normal(size=(count, width))).astype(np.float32)


@pytest.mark.parametrize("count, width, k", [(20, 300, 4), (60, 40, 8), (5, 30, 5)])
@pytest.mark.parametrize("is_exact", [False, True])
def test_directions_are_the_singular_vectors_of_numpy(count, width, k, is_exact):
    matrix = points(count, width, min(k, count - 1))
    found = principal_directions(matrix, k, is_exact=is_exact)
    expected = np.linalg.svd(matrix.astype(np.float64) - matrix.mean(axis=0, dtype=np.float64))[2][:k]
    sure = min(k, count - 1)  # as many points as directions leave the last one open
    np.testing.assert_allclose(np.abs(np.sum(found * expected, axis=1))[:sure], 1.0, atol=2e-3)
    np.testing.assert_allclose(found @ found.T, np.eye(k), atol=1e-5)
    largest = found[np.arange(k), np.abs(found).argmax(axis=1)]
    assert np.all(largest > 0)


def test_more_directions_than_points_or_values_are_still_orthonormal():
    for count, width, k in ((3, 50, 8), (12, 6, 6)):
        for is_exact in (False, True):
            found = principal_directions(points(count, width, 2), k, is_exact=is_exact)
            np.testing.assert_allclose(found @ found.T, np.eye(k), atol=1e-5)


@pytest.mark.parametrize("total, count", [(32, 8), (3, 2), (1, 4), (10, 3)])
def test_parts_follow_each_other_and_differ_by_one_at_most(total, count):
    parts = [row_range_of_part(total, number, count) for number in range(count)]
    assert parts[0][0] == 0 and parts[-1][1] == total
    assert all(before[1] == after[0] for before, after in zip(parts, parts[1:]))
    assert max(end - first for first, end in parts) - min(end - first for first, end in parts) <= 1


def checkpoints_of_a_graph(folder, values):
    """Checkpoints with slots and a step counter beside the weights, in an order that names alone do not give."""
    with tf.Graph().as_default():
        kernel = tf1.get_variable("layer/kernel", [2, 3])
        bias = tf1.get_variable("layer/bias", [3])
        tf1.train.MomentumOptimizer(0.1, 0.9).minimize(
            tf.reduce_sum(tf.square(kernel)) + tf.reduce_sum(bias**2), tf1.train.get_or_create_global_step()
        )
        with tf1.Session() as session:
            saver = tf1.train.Saver(max_to_keep=100)
            session.run(tf1.global_variables_initializer())
            for step, point in enumerate(values):
                kernel.load(point[:6].reshape(2, 3), session)
                bias.load(point[6:], session)
                saver.save(session, str(folder / "model.ckpt"), global_step=step * 5, write_meta_graph=False)
        return boost.compute_pca_basis(folder, 3)


def test_checkpoints_are_read_by_the_names_of_variables(tmp_path):
    values = points(12, 9, 3)
    of_graph = checkpoints_of_a_graph(tmp_path, values)
    assert of_graph.columns == (("layer/kernel", 6), ("layer/bias", 3))
    np.testing.assert_allclose(of_graph.rows, principal_directions(values, 3), atol=1e-4)
    model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=[2], name="layer")])
    saved = []
    for number, point in enumerate(values):
        model.set_weights([point[:6].reshape(2, 3), point[6:]])
        saved.append(tf.train.Checkpoint(model=model).write(str(tmp_path / f"object_{number}")))
    of_objects = boost.compute_pca_basis(saved, 3, model.trainable_variables)
    assert of_objects.columns == of_graph.columns
    np.testing.assert_allclose(of_objects.rows, of_graph.rows, atol=1e-4)
    turned = boost.compute_pca_basis(saved, 3, ["layer/bias", "layer/kernel"])
    np.testing.assert_allclose(np.roll(turned.rows, 6, axis=1), of_graph.rows, atol=1e-4)
    loaded = boost.Basis.load(of_graph.save(tmp_path / "basis"))
    assert loaded.columns == of_graph.columns and isinstance(loaded.rows, np.memmap)
    np.testing.assert_array_equal(loaded.rows, of_graph.rows)

    with pytest.raises(ValueError, match="lacks a variable.*Did you mean 'layer/kernel'"):
        boost.compute_pca_basis(saved, 3, ["layer/kernal"])
    with pytest.raises(ValueError, match="too few checkpoints for 13 directions. Expected at least 13; got 12"):
        boost.compute_pca_basis(saved, 13, ["layer/kernel"])
    with pytest.raises(ValueError, match="more directions than values. Expected at most 3; got 4"):
        boost.compute_pca_basis(saved, 4, ["layer/bias"])
    with pytest.raises(ValueError, match="the trained variables are unknown"):
        boost.compute_pca_basis(saved, 3)
    np.save(tmp_path / "vector.npy", np.ones(3))
    with pytest.raises(ValueError, match=r"vector.npy holds no basis.*got the shape \(3,\)"):
        boost.Basis.load(tmp_path / "vector.npy")


def test_a_description_of_somebody_elses_stays(tmp_path):
    basis = boost.Basis(np.eye(2, 3, dtype=np.float32), (("weight", 3),))
    for _ in range(2):
        assert boost.Basis.load(basis.save(tmp_path / "f.npy")).columns == basis.columns
    (tmp_path / "f.npy").unlink()
    (tmp_path / "f.json").write_text("mine")
    with pytest.raises(FileExistsError, match=r"^Basis.save: .*f.json is a file that npu_bridge did not make"):
        basis.save(tmp_path / "f.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["f.json"] and (tmp_path / "f.json").read_text() == "mine"


def test_what_holds_no_basis_is_refused_at_once(tmp_path):
    pipe, good = tmp_path / "pipe.npy", tmp_path / "good.npy"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=r"pipe\.npy is a pipe \(FIFO\).*expected a regular file"):
        boost.Basis.load(pipe)
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    with pytest.raises(ValueError, match=r"words\.npy holds no basis. Expected a \.npy file of numbers; got"):
        boost.Basis.load(tmp_path / "words.npy")
    np.save(good, np.eye(2, 3))
    np.testing.assert_array_equal(boost.Basis.load(str(good)).rows, np.eye(2, 3))
    for text in ("[", "[1]", '{"columns": 3}', '{"columns": ["abc"]}'):
        good.with_suffix(".json").write_text(text)
        with pytest.raises(ValueError, match=r"good\.json does not describe the columns"):
            boost.Basis.load(good)
    good.with_suffix(".json").unlink()
    os.mkfifo(good.with_suffix(".json"))
    with pytest.raises(OSError, match=r"good\.json is a pipe"):
        boost.Basis.load(good)
