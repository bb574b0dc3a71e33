"""Channels between sessions of one process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from npu_bridge.estimator import npu_ops

tf1 = tf.compat.v1


def result_of(call):
    """Returns the result or error of a call, in its own thread, as a wait that never ends cannot be interrupted."""
    results = []

    def run():
        try:
            results.append(call())
        except tf.errors.OpError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert results, "still waiting"
    return results[0]


def test_what_one_session_writes_another_reads(graph):
    value = tf1.placeholder(tf.float32, [2])
    write = npu_ops.outfeed_enqueue_op("numbers", [value, tf.constant("text")])
    read = npu_ops.outfeed_dequeue_op("numbers", [tf.float32, tf.string], [[2], ()])
    stop = npu_ops.stop_outfeed_dequeue_op("numbers")
    assert [tensor.shape.as_list() for tensor in read] == [[2], []] and isinstance(write, tf.Operation)
    seen = []

    def read_all():
        with tf1.Session(graph=graph) as session:
            while True:
                seen.append(session.run(read))

    with tf1.Session(graph=graph) as session, ThreadPoolExecutor(1) as other:
        reading = other.submit(result_of, read_all)
        for number in range(3):
            session.run(write, {value: [number, -number]})
        session.run(stop)
        assert isinstance(reading.result(), tf.errors.OutOfRangeError)
        assert isinstance(result_of(lambda: session.run(read)), tf.errors.OutOfRangeError)
    np.testing.assert_array_equal([numbers for numbers, _ in seen], [[0, 0], [1, -1], [2, -2]])
    assert {text for _, text in seen} == {b"text"}


def test_channels_are_apart():
    npu_ops.outfeed_enqueue_op("one", [tf.constant(1)])
    npu_ops.outfeed_enqueue_op("two", [tf.constant(2)])
    (two,) = npu_ops.channel_get_next("two", [tf.int32], [()])
    (one,) = npu_ops.channel_get_next("one", [tf.int32], [()])
    assert (int(one), int(two)) == (1, 2)


def test_nothing_comes_on_the_channel_of_prints(graph):
    printed = tf.print(npu_ops.outfeed_dequeue_op("_npu_log", [tf.string], [()]))
    session = tf1.Session()
    assert isinstance(result_of(lambda: session.run(printed)), tf.errors.OutOfRangeError)
    session.close()
