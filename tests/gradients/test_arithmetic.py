"""Sums over gradients have the same bits in every run, and so on every rank."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.gradients.arithmetic import sum_in_order

tf1 = tf.compat.v1
# Added to 1 one by one, the small ones are lost; added to each other first, they are not.
NUMBERS = np.float32([1.0, 2.0**-24, 2.0**-24])


def sums(add):
    """Returns the sums of three kept numbers, and of three of which the sum can overwrite only the last."""
    with tf.Graph().as_default(), tf1.Session() as session:
        fed = [tf1.placeholder(tf.float32, []) for _ in NUMBERS]
        freed = [*fed[:2], tf.sqrt(tf.square(fed[2]))]
        return session.run([add(fed), add(freed)], dict(zip(fed, NUMBERS)))


@pytest.mark.parametrize(("add", "is_same"), [(sum_in_order, True), (tf.add_n, False)])
def test_a_sum_does_not_depend_on_which_number_is_freed_first(add, is_same):
    first, second = sums(add)
    assert (first == second) == is_same
