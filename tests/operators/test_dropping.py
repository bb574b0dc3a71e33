"""Dropout: what is kept, how it is scaled, and what its gradient drops."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.base.errors import say_once
from npu_bridge.estimator import helper, npu_aicore_ops, npu_ops
from npu_bridge.npu_cpu import npu_cpu_ops

tf1 = tf.compat.v1
ONES = np.ones([100, 100], np.float32)
# A binomial of 10,000 draws stays this near to its mean, but for one case in 10^9.
AWAY = 6 * 0.5 / 100


@pytest.mark.parametrize("dropout", [npu_ops.dropout, npu_aicore_ops.dropout_v3])
@pytest.mark.parametrize(
    "dtype, keep_prob",
    [(tf.float16, 0.8), (tf.bfloat16, np.float32(0.8)), (tf.float32, tf.constant(0.8)), (tf.float64, tf.constant(0.8))],
)
def test_kept_elements_are_scaled(dropout, dtype, keep_prob):
    dropped = dropout(tf.cast(ONES, dtype), keep_prob)
    assert dropped.dtype == dtype and dropped.shape == ONES.shape
    values = tf.cast(dropped, tf.float32).numpy()
    is_kept = values != 0
    assert abs(is_kept.mean() - 0.8) < AWAY
    np.testing.assert_allclose(values[is_kept], 1.25, rtol=1e-2 if dtype == tf.bfloat16 else 2e-3)


def test_gradient_drops_the_same_and_leaves_the_probability_alone(graph):
    x, keep_prob = tf.constant(ONES), tf1.placeholder(tf.float32, [])
    dropped = npu_ops.dropout(x, keep_prob, seed=3)
    of_x, of_probability = tf.gradients(2 * dropped, [x, keep_prob])
    assert of_probability is None
    with tf1.Session() as session:
        forwards, backwards = session.run([dropped, of_x], {keep_prob: 0.5})
    np.testing.assert_array_equal(backwards, 2 * forwards)
    assert set(np.unique(forwards)) == {0.0, 2.0}


def test_seeds_are_those_of_the_graph_and_the_operator():
    def draw(graph_seed, seed):
        with tf.Graph().as_default(), tf1.Session() as session:
            tf1.set_random_seed(graph_seed)
            return session.run(npu_ops.dropout(ONES, 0.5, seed=seed)).tobytes()

    assert draw(1, 2) == draw(1, 2)
    assert len({draw(1, 2), draw(1, 3), draw(2, 2)}) == 3


def test_noise_shape_drops_whole_rows():
    rows = npu_ops.dropout(ONES, 0.5, noise_shape=[100, 1]).numpy()
    assert {tuple(np.unique(row)) for row in rows} == {(0.0,), (2.0,)}


def test_a_probability_of_one_keeps_everything():
    x = tf.constant(ONES)
    assert npu_ops.dropout(x, 1.0) is x
    np.testing.assert_array_equal(npu_ops.dropout(x, 1), ONES)
    np.testing.assert_array_equal(npu_ops.dropout(x, tf.constant(1.0)), ONES)


@pytest.mark.parametrize("x, keep_prob", [(ONES, 0.0), (ONES, 1.5), (ONES, -0.1), (ONES, float("nan")), ([1, 2], 0.5)])
@pytest.mark.parametrize("operator", [npu_ops.dropout, npu_aicore_ops.dropout_v3, npu_aicore_ops.dropout_v4])
def test_illegal_arguments(operator, x, keep_prob):
    with pytest.raises(ValueError, match=f"{operator.__name__}: .*Expected .* got "):
        operator(x, keep_prob)


@pytest.mark.parametrize("dtype, shape", [(tf.bool, None), (tf.uint8, [100, 1])])
def test_mask_alone(dtype, shape):
    mask = npu_aicore_ops.dropout_v4(tf.ones([100, 100]), 0.5, shape, output_dtype=dtype)
    assert mask.dtype == dtype and mask.shape == (shape or [100, 100])
    assert set(np.unique(mask)) == {0, 1} and 0.2 < np.mean(mask) < 0.8


def test_stateless_dropout_repeats_itself():
    def drop(seed, offset, x=ONES):
        return npu_cpu_ops.stateless_dropout(x, None, 0.25, seed, offset).numpy()

    first = drop(1, 2)
    np.testing.assert_array_equal(first, drop(tf.constant([1], tf.int64), tf.constant(2)))
    assert abs((first == 0).mean() - 0.25) < AWAY and set(np.unique(first)) == {0, np.float32(1 / 0.75)}
    assert (first != drop(1, 3)).any() and (first != drop(2, 2)).any()
    assert drop(1, 2, ONES.astype(np.float16)).dtype == np.float16
    assert npu_cpu_ops.stateless_dropout(ONES, None, 0.0, 1, 2).numpy().min() == 1
    rows = npu_cpu_ops.stateless_dropout(ONES, [100, 1], 0.5, 1, 2).numpy()
    assert {tuple(np.unique(row)) for row in rows} == {(0.0,), (2.0,)}
    with pytest.raises(ValueError, match="stateless_dropout"):
        npu_cpu_ops.stateless_dropout(ONES, None, 1.0, 1, 2)


def test_what_scripts_carry_over_from_other_dropouts_is_followed(caplog):
    say_once.cache_clear()
    assert npu_ops.dropout(ONES, 0.5, is_training=False).numpy().min() == 1.0
    for flag in (True, tf.constant(True)):
        assert npu_ops.dropout(ONES, 0.5, is_training=flag).numpy().min() == 0.0
    assert npu_ops.dropout(ONES, keep_prob=0.5, training=tf.constant(False)).numpy().min() == 1.0
    assert len(caplog.messages) == 2 and "is_training is not an argument" in caplog.messages[0]
    with pytest.raises(TypeError, match="rate"):
        npu_ops.dropout(ONES, 0.5, rate=0.5)


def test_packed_masks_have_the_length_of_a_device_and_leave_the_probability_alone():
    gen = helper.get_gen_ops()
    for count in (1, 128, 130):
        assert gen.drop_out_gen_mask([count], 0.5).shape == [-(-count // 128) * 16]
    x, keep_prob = tf.ones([130]), tf.constant(0.5)
    with tf.GradientTape() as tape:
        tape.watch([x, keep_prob])
        kept = gen.drop_out_do_mask(x, gen.drop_out_gen_mask([130], 0.5, 1, 2), keep_prob)
    of_x, of_probability = tape.gradient(kept, [x, keep_prob])
    assert of_probability is None and set(of_x.numpy()) == {0.0, 2.0}
