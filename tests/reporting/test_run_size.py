"""How big a batch is, as the graph of a training says, and how much memory ranks have had."""

from __future__ import annotations

import os
import socket

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.base.machine import current_memory_bytes, peak_memory
from npu_bridge.reporting.run_size import count_parameters, peak_memory_of_ranks, samples_of_batch

tf1 = tf.compat.v1
NUMBERS = tf.data.Dataset.range
CASES = {
    "the shape says": (lambda: NUMBERS(99).batch(8, drop_remainder=True).repeat().prefetch(2), 8),
    "batch says": (lambda: NUMBERS(99).batch(8), 8),
    "a map behind it": (
        lambda: NUMBERS(99).batch(7, num_parallel_calls=2).map(lambda n: (n, n + 1), 2).repeat().prefetch(1),
        7,
    ),
    "map and batch": (lambda: NUMBERS(9).apply(tf.data.experimental.map_and_batch(lambda n: n, 6)), 6),
    "padded": (lambda: NUMBERS(9).padded_batch(4), 4),
    "one element": (lambda: tf.data.Dataset.from_tensors(np.zeros([5, 2])).repeat(), 5),
    "no batch": (lambda: NUMBERS(99), None),
    "unbatched": (lambda: NUMBERS(99).batch(3).unbatch(), None),
    "of two minds": (lambda: tf.data.Dataset.from_tensors((np.zeros([5, 2]), np.zeros([4]))), None),
}


@pytest.mark.parametrize("case", CASES)
def test_samples_of_a_batch(case):
    make, expected = CASES[case]
    with tf.Graph().as_default() as graph:
        other = tf1.data.make_initializable_iterator(NUMBERS(99).batch(3, drop_remainder=True)).get_next()
        parts = tf.nest.flatten(tf1.data.make_initializable_iterator(make()).get_next())
        loss = tf.add_n([tf.reduce_sum(tf.cast(part, tf.float32)) for part in parts])
        assert other.shape == [3]  # input the loss does not see
        before = len(graph.get_operations())
        assert samples_of_batch(graph, loss) == expected
        assert len(graph.get_operations()) == before


def test_parameters():
    with tf.Graph().as_default():
        assert count_parameters([tf1.get_variable("a", [3, 4]), tf1.get_variable("b", [])]) == 13
    assert count_parameters([]) is None


def test_memory_of_this_process_and_of_others_of_its_host():
    block = np.ones(20_000_000)  # 160 MB
    assert block.nbytes < current_memory_bytes() <= peak_memory() * 1.1  # the system counts roughly on many processors
    here = {"host": socket.gethostname()[:100]}
    places = [{**here, "process": os.getpid()}, {**here, "process": os.getppid()}, {"host": "elsewhere", "process": 1}]
    assert sorted(peak_memory_of_ranks(places, 0)) == [0, 1]
    assert sorted(peak_memory_of_ranks((), 3)) == [3]
