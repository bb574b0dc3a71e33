"""`tf.contrib.opt` against numpy."""

from __future__ import annotations

import math

import numpy as np
import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib import opt
from tests.tensorflow1_compat.contrib_cases.common import close, run_updates, value

START, GRAD = np.array([1.0, -2.0, 3.0]), np.array([0.1, -0.2, 0.3])
TABLE = np.arange(8, dtype=np.float32).reshape(4, 2) + 1


def in_both_kinds(make, *args, **kwargs):
    """Results with reference and resource variables, which have to be the same."""
    found = []
    for resource in (False, True):
        with tf.Graph().as_default():
            found.append(run_updates(make(), *args, resource=resource, **kwargs))
    close(found[0][0], found[1][0], 1e-6)
    return found[0]


def adam(start, grads, rate=0.1, b1=0.9, b2=0.999, eps=1e-8, steps=1, nesterov=False):
    w, m, v = np.array(start, np.float64), 0.0, 0.0
    for t in range(1, steps + 1):
        m, v = b1 * m + (1 - b1) * grads, b2 * v + (1 - b2) * grads**2
        lr = rate * math.sqrt(1 - b2**t) / (1 - b1**t)
        w = w - lr * ((b1 * m + (1 - b1) * grads) if nesterov else m) / (np.sqrt(v) + eps)
    return w


def case_adam_w():
    found, slots = in_both_kinds(lambda: opt.AdamWOptimizer(0.01, learning_rate=0.1), START, GRAD)
    close(found, adam(START * 0.99, GRAD))
    assert {"w/AdamW", "w/AdamW_1", "beta1_power", "beta2_power"} <= set(slots)


def case_adam_w_decays_only_what_it_is_told():
    weights = [tf.get_variable(name, initializer=1.0) for name in "ab"]
    train = opt.AdamWOptimizer(0.5, 0.0).minimize(sum(weights), decay_var_list=weights[:1])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train)
        close(session.run(weights), [0.5, 1.0])


def case_adam_w_shrinks_only_rows_with_a_gradient():
    make = lambda: opt.AdamWOptimizer(0.5, learning_rate=0.0)  # noqa: E731
    found, _ = in_both_kinds(make, TABLE, (np.ones((1, 2)), [2]))
    expected = TABLE.copy()
    expected[2] *= 0.5
    close(found, expected)


def case_momentum_w():
    found, slots = in_both_kinds(lambda: opt.MomentumWOptimizer(0.1, 0.5, 0.9), START, GRAD, steps=2)
    w, m = START.copy(), 0.0
    for _ in range(2):
        w, m = w * 0.9, 0.9 * m + GRAD
        w = w - 0.5 * m
    close(found, w)
    assert "w/MomentumW" in slots


def case_any_optimizer_extended():
    cls = opt.extend_with_decoupled_weight_decay(tf.train.GradientDescentOptimizer)
    found, _ = in_both_kinds(lambda: cls(weight_decay=0.1, learning_rate=1.0), START, GRAD)
    close(found, START * 0.9 - GRAD)


def case_lars():
    make = lambda: opt.LARSOptimizer(0.5, momentum=0.9, weight_decay=0.01, eeta=0.1)  # noqa: E731
    found, slots = in_both_kinds(make, START, GRAD, steps=2)
    w, m = START.copy(), 0.0
    for _ in range(2):
        norm = np.linalg.norm(w)
        rate = 0.5 * 0.1 * norm / (np.linalg.norm(GRAD) + 0.01 * norm)
        m = 0.9 * m + rate * (GRAD + 0.01 * w)
        w = w - m
    close(found, w)
    assert "w/LARSOptimizer" in slots


def case_lars_skips():
    found, _ = in_both_kinds(lambda: opt.LARSOptimizer(0.5, momentum=0.0, skip_list=["w"]), START, GRAD)
    close(found, START - 0.5 * GRAD)


def case_lars_of_rows():
    found, _ = in_both_kinds(lambda: opt.LARSOptimizer(0.5, momentum=0.0), TABLE, (np.ones((1, 2)), [1]))
    close(found, TABLE - 0.5 * np.eye(4)[1][:, None])


def case_lazy_adam():
    found, slots = in_both_kinds(lambda: opt.LazyAdamOptimizer(0.1), TABLE, (np.full((1, 2), 0.5), [2]), steps=3)
    expected = TABLE.copy()
    expected[2] = adam(TABLE[2], np.full(2, 0.5), steps=3)
    close(found, expected)
    assert {"w/Adam", "w/Adam_1"} <= set(slots)
    dense, _ = in_both_kinds(lambda: opt.LazyAdamOptimizer(0.1), START, GRAD, steps=2)
    close(dense, adam(START, GRAD, steps=2))


def case_nadam():
    found, _ = in_both_kinds(lambda: opt.NadamOptimizer(0.1), START, GRAD, steps=3)
    close(found, adam(START, GRAD, steps=3, nesterov=True))
    found, _ = in_both_kinds(lambda: opt.NadamOptimizer(0.1), TABLE, (np.full((1, 2), 0.5), [2]), steps=2)
    grads = np.zeros_like(TABLE)
    grads[2] = 0.5
    close(found, adam(TABLE, grads, steps=2, nesterov=True))


def case_ada_max():
    found, slots = in_both_kinds(lambda: opt.AdaMaxOptimizer(0.1), START, GRAD, steps=2)
    w, m, v = START.copy(), 0.0, 0.0
    for t in (1, 2):
        m, v = 0.9 * m + 0.1 * GRAD, np.maximum(0.999 * v, np.abs(GRAD))
        w = w - 0.1 / (1 - 0.9**t) * m / (v + 1e-8)
    close(found, w)
    close(slots["beta1_power"], 0.9**3)
    found, _ = in_both_kinds(lambda: opt.AdaMaxOptimizer(0.1), TABLE, (np.ones((1, 2)), [3]))
    close(found, TABLE - 0.1 * np.eye(4)[3][:, None])


def case_moving_average():
    optimizer = opt.MovingAverageOptimizer(tf.train.GradientDescentOptimizer(1.0), average_decay=0.5)
    weights = tf.get_variable("w", initializer=np.float32(4.0))
    train = optimizer.apply_gradients([(tf.constant(2.0), weights)])
    saver = optimizer.swapping_saver()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train)
        average = next(var for var in tf.global_variables() if var.op.name == "w/ExponentialMovingAverage")
        close(session.run([weights, average]), [2.0, 3.0])
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            path = saver.save(session, f"{folder}/model")
            close(tf.train.load_variable(path, "w"), 3.0)
            close(tf.train.load_variable(path, "w/ExponentialMovingAverage"), 2.0)


def case_clipped_variables():
    weights = tf.get_variable("w", initializer=np.array([[3.0, 4.0], [0.3, 0.4]], np.float32))
    inner = tf.train.GradientDescentOptimizer(0.0)
    optimizer = opt.VariableClippingOptimizer(inner, [(weights, [1])], 1.0)
    train = optimizer.apply_gradients([(tf.zeros([2, 2]), weights)])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train)
        close(session.run(weights), [[0.6, 0.8], [0.3, 0.4]])


def case_multitask():
    weights = [tf.get_variable(name, initializer=1.0) for name in "ab"]
    optimizer = opt.MultitaskOptimizerWrapper(tf.train.MomentumOptimizer(1.0, 0.9))
    gradient = tf.placeholder(tf.float32, [2])
    train = optimizer.apply_gradients(zip(tf.unstack(gradient), weights))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train, {gradient: [1, 1]})
        session.run(train, {gradient: [1, 0]})
        close(session.run(weights), [-1.9, 0.0])


def case_global_norm():
    pairs = opt.clip_gradients_by_global_norm([(tf.constant([3.0]), "a"), (tf.constant([4.0]), "b")], 1.0)
    close(value([grad for grad, _ in pairs], start=False), [[0.6], [0.8]])
    assert [var for _, var in pairs] == ["a", "b"]
