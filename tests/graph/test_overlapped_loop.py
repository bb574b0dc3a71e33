"""A loop whose steps overlap, on one rank: what the end of the data leaves behind."""

from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge.graph.overlapped_loop import put_in_overlapped_loop

tf1 = tf.compat.v1


def test_the_end_of_the_data_waits_for_the_whole_step_before():
    """Where an operator fails, TensorFlow cancels functions that have not begun: here the last one of a slow update."""
    last = tf.function(lambda value: value + 1.0, experimental_attributes={"_noinline": True})
    with tf.Graph().as_default() as graph:
        iterator = tf1.data.make_initializable_iterator(tf.data.Dataset.range(3))
        weight = tf1.get_variable("weight", [], initializer=tf1.zeros_initializer(), use_resource=True)
        values = tf.fill([400, 400], tf.cast(iterator.get_next(), tf.float32))
        for _ in range(40):
            values = tf.tanh(tf.matmul(values, values))
        step = weight.assign_add(last(tf.reduce_sum(values) * 1e-30)).op
        loop = put_in_overlapped_loop(graph, [step], [], {})
        with tf1.Session() as session:
            session.run([iterator.initializer, weight.initializer])
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(loop.op, {loop.count: 10})
            assert session.run(weight) == 3.0
