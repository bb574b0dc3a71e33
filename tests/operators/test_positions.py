"""Scattering, non-zero elements, random choices and centroids."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator import npu_aicore_ops, npu_ops
from npu_bridge.npu_cpu import npu_cpu_ops
from tests.operators.computing import close, computed, differentiable

SPARSE = np.array([[0.0, 5.0, 0.0], [7.0, 0.0, 9.0]], np.float32)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scatter_elements(axis):
    random = np.random.default_rng(5)
    data, updates = random.normal(size=[4, 5]).astype(np.float32), random.normal(size=[2, 3]).astype(np.float32)
    indices = np.array([[0, 3, 1], [2, 1, 3]])
    expected = data.copy()
    np.put_along_axis(expected[:, :3] if axis == 0 else expected[:2], indices, updates, axis)
    close(computed(lambda *given: npu_ops.scatter_elements(*given, axis), data, indices, updates), expected)
    differentiable(lambda data, updates: npu_ops.scatter_elements(data, indices, updates, axis), data, updates)


def test_scatter_elements_checks_shapes():
    with pytest.raises(ValueError, match="scatter_elements: indices and updates differ"):
        npu_ops.scatter_elements(np.ones([3, 3]), [[0, 1]], [[1.0]])
    with pytest.raises(ValueError, match="scatter_elements: axis"):
        npu_ops.scatter_elements(np.ones([3, 3]), [[0]], [[1.0]], axis=2)


@pytest.mark.parametrize("dtype", [tf.int64, tf.int32])
def test_nonzero(dtype):
    rows = np.array([[0, 1], [1, 0], [1, 2]], dtype.as_numpy_dtype)
    close(computed(lambda x: npu_aicore_ops.nonzero(x, transpose=True, output_type=dtype), SPARSE), rows)
    close(computed(lambda x: npu_aicore_ops.nonzero(x, output_type=dtype), SPARSE), rows.T)
    assert computed(npu_aicore_ops.nonzero, np.zeros([2, 2, 2], bool)).shape == (3, 0)


@pytest.mark.parametrize("transpose, indices", [(False, "011000 102000"), (True, "011012 000000")])
def test_nonzero_with_value(transpose, indices):
    values, places, count = computed(lambda x: npu_aicore_ops.nonzerowithvalue(x, transpose), SPARSE)
    close(values, np.array([5, 7, 9, 0, 0, 0], np.float32))
    close(places, np.array([int(digit) for digit in indices.replace(" ", "")]))
    close(count, np.array([3]))
    with pytest.raises(ValueError, match="nonzerowithvalue: x is not a matrix"):
        npu_aicore_ops.nonzerowithvalue(np.ones(3))


def test_random_choice_takes_each_place_once():
    x = np.random.default_rng(6).random([20, 5]) < 0.3
    places, mask = npu_cpu_ops.randomchoicewithmask(x, 10, 1, 2)
    assert places.dtype == tf.int32 and places.shape == [10, 2] and mask.numpy().all()
    assert len(set(map(tuple, places.numpy()))) == 10 and x[tuple(places.numpy().T)].all()


def test_random_choice_fills_up():
    places, mask = npu_cpu_ops.randomchoicewithmask([True, False, True], 4)
    assert sorted(places.numpy()[:2, 0]) == [0, 2] and not places.numpy()[2:].any()
    close(mask, np.array([True, True, False, False]))


def test_random_choice_of_all():
    places, mask = npu_cpu_ops.randomchoicewithmask([[True, False], [True, True]], 0)
    assert sorted(map(tuple, places.numpy())) == [(0, 0), (1, 0), (1, 1)] and mask.numpy().all() and len(mask) == 3
    shuffled = npu_cpu_ops.randomchoicewithmask(np.ones(64, bool), 0)[0].numpy().ravel().tolist()
    assert sorted(shuffled) == list(range(64)) != shuffled
    with pytest.raises(ValueError, match="randomchoicewithmask: count is negative"):
        npu_cpu_ops.randomchoicewithmask([True], -1)


def test_random_choices_follow_their_seeds(graph):
    x = np.ones(64, bool)
    draws = [npu_cpu_ops.randomchoicewithmask(x, 32, *seeds)[0] for seeds in ((3, 4), (3, 4), (4, 4), (0, 0))]
    assert draws[0].shape == [32, 1]
    with tf.compat.v1.Session() as session:
        first, same, *others = (values.tobytes() for values in session.run(draws))
        again = session.run(draws[3]).tobytes()
    assert first == same and len({first, again, *others}) == 4


def test_stateless_random_choice():
    def draw(seed, offset):
        places, mask = computed(
            lambda x: npu_cpu_ops.stateless_random_choice_with_mask(x, 32, seed, offset), np.ones(64, bool)
        )
        assert mask.all()
        return places.tobytes()

    assert draw(1, 2) == draw(1, 2) and len({draw(1, 2), draw(1, 3), draw(2, 2)}) == 3


@pytest.mark.parametrize("actual", [False, True])
def test_k_means(actual):
    random = np.random.default_rng(7)
    rows, centroids = random.normal(size=[9, 2]).astype(np.float32), random.normal(size=[3, 2]).astype(np.float32)
    squares = ((centroids**2).sum(1)[np.newaxis], (rows**2).sum(1)[:, np.newaxis])
    sums, counts, distance = computed(
        lambda *given: npu_ops.k_means_centroids(*given, use_actual_distance=actual), rows, centroids, *squares
    )
    distances = ((rows[:, np.newaxis] - centroids) ** 2).sum(2)
    nearest = distances.argmin(1)
    close(sums, np.stack([rows[nearest == i].sum(0) for i in range(3)]))
    close(counts, np.array([[(nearest == i).sum()] for i in range(3)], np.float32))
    close(distance, np.array([distances.min(1).sum() - (0 if actual else squares[1].sum())], np.float32))
