"""Whatever the gradients are, no variable and no slot becomes non-finite, and a skipped step changes nothing."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager, FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.gradients import collections
from npu_bridge.gradients.arithmetic import has_finite_norm
from tests.goldens.two_layers import OPTIMIZERS, assert_all_finite, assert_same_bits

tf1 = tf.compat.v1
DTYPES = {"half": tf.float16, "brain": tf.bfloat16, "single": tf.float32, "double": tf.float64}
# Finite in every dtype, yet awkward: zeros, values that vanish in 16 bits, values whose squares overflow there.
AWKWARD = [0.0, -0.0, 1e-45, 1.2e-38, 6e-8, 1e-3, -1.0, 300.0, -3000.0, 30000.0]
POISON = [np.nan, np.inf, -np.inf, 1e19, 3e38, -3e38, 1e300]
USABLE = st.one_of(st.sampled_from(AWKWARD), st.floats(-10, 10))
ANYTHING = st.one_of(st.sampled_from(AWKWARD + POISON), st.floats(width=64))


class MixedModel:
    """Variables of every floating dtype, one empty, one sparse, one unused; each gradient is what is fed for it."""

    def __init__(self, name):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.feeds, terms = {}, []
            for label, dtype in DTYPES.items():
                variable = tf1.get_variable(label, [3], dtype, tf1.constant_initializer(0.5))
                self.feeds[label] = tf1.placeholder(tf.float64, [3])
                terms.append(tf.reduce_sum(tf.cast(variable * tf.cast(self.feeds[label], dtype), tf.float64)))
            table = tf1.get_variable("table", [5, 2], initializer=tf1.constant_initializer(0.5))
            self.feeds["table"] = tf1.placeholder(tf.float64, [3, 2])
            rows = tf.nn.embedding_lookup(table, [1, 3, 1])
            terms.append(tf.reduce_sum(tf.cast(rows * tf.cast(self.feeds["table"], tf.float32), tf.float64)))
            empty = tf1.get_variable("empty", [0, 2])
            terms.append(tf.cast(tf.reduce_sum(empty), tf.float64))
            tf1.get_variable("unused", [2])
            # A scale of 1 that stays: the fed values are the gradients.
            manager = ExponentialUpdateLossScaleManager(1.0, 10**6, 1, 1, 1)
            optimizer = NPUOptimizer(OPTIMIZERS[name](), manager, is_loss_scale=True)
            self.train_op = optimizer.minimize(tf.add_n(terms), tf1.train.get_or_create_global_step())
            self.skipped = tf1.get_collection(collections.STEP_SKIPPED)[0]
            self.variables = tf1.global_variables()
            self.session = tf1.Session()
            self.initialize = tf1.global_variables_initializer()

    def state(self):
        return self.session.run({variable.name: variable for variable in self.variables})


SHAPES = {**dict.fromkeys(DTYPES, (3,)), "table": (3, 2)}


def gradients_of(elements):
    return st.fixed_dictionaries(
        {label: hnp.arrays(np.float64, shape, elements=elements) for label, shape in SHAPES.items()}
    )


# Mostly steps that happen: a test in which every step is skipped shows little.
GRADIENTS = st.one_of(gradients_of(USABLE), gradients_of(USABLE), gradients_of(ANYTHING))


@pytest.mark.few_fast(1, "the other optimizer takes the same way")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_variable_or_slot_becomes_non_finite(name):
    model = MixedModel(name)
    happened = []

    @hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @hypothesis.given(st.lists(GRADIENTS, min_size=1, max_size=3))
    def check(steps):
        model.session.run(model.initialize)
        for gradients in steps:
            before = model.state()
            feed = {model.feeds[label]: value for label, value in gradients.items()}
            _, was_skipped = model.session.run([model.train_op, model.skipped], feed)
            after = model.state()
            assert_all_finite(after)
            if any(not np.all(np.isfinite(value)) for value in gradients.values()):
                assert was_skipped
            if was_skipped:
                assert_same_bits(
                    {key: after[key] for key in before if "steps" not in key},
                    {key: value for key, value in before.items() if "steps" not in key},
                )
            happened.append(not was_skipped)
            assert after["global_step:0"] == before["global_step:0"] + (not was_skipped)

    check()
    assert 0.3 < np.mean(happened) < 0.95


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True, database=None)
@hypothesis.given(hnp.arrays(np.float32, 4, elements=st.floats(width=32)))
def test_the_norm_is_finite_exactly_when_numpy_says_so(values):
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.isfinite(np.sum(np.square(values), dtype=np.float32) * np.float32(0.5))
    assert bool(has_finite_norm([tf.constant(values)])) == expected


def test_repeated_rows_that_overflow_together_are_found():
    """In float16 each row is finite and their sum is not."""
    rows = tf.IndexedSlices(tf.constant([[40000.0], [40000.0]], tf.float16), tf.constant([7, 7]), tf.constant([9, 1]))
    assert not bool(has_finite_norm([rows]))
    apart = tf.IndexedSlices(rows.values, tf.constant([7, 8]), rows.dense_shape)
    assert bool(has_finite_norm([apart]))


def test_nothing_to_judge_is_usable():
    assert bool(has_finite_norm([]))
    assert bool(has_finite_norm([tf.zeros([0, 3])]))


@pytest.mark.usefixtures("graph")
def test_a_scale_beyond_float16_is_divided_out_of_float16_gradients():
    """2**20 is infinite in float16 and its reciprocal is lost there; the gradient must come through."""
    variable = tf1.get_variable("variable", [2], tf.float16, tf1.zeros_initializer())
    slopes = tf1.placeholder(tf.float32, [2])
    optimizer = NPUOptimizer(
        tf1.train.GradientDescentOptimizer(1.0), FixedLossScaleManager(2.0**20), is_loss_scale=True
    )
    (gradient, _), *_ = optimizer.compute_gradients(tf.reduce_sum(tf.cast(variable, tf.float32) * slopes))
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        fed = np.float16([2.0**-10, 2.0**-14])
        np.testing.assert_array_equal(session.run(gradient, {slopes: fed}), fed)
