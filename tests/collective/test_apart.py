"""Operations in a graph of their own: what they give, and that they leave a process as it is."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from npu_bridge.collective.apart import SeparateGraph, run_in_separate_graph

# Three functions wait for each other, so a session with fewer threads would never get through them.
AFTER_ONE_APART = """
import threading
import numpy as np, tensorflow as tf
from npu_bridge.collective.apart import run_in_separate_graph
tf1 = tf.compat.v1
run_in_separate_graph(lambda number: number + 1, np.float32(1))
barrier = threading.Barrier(3, timeout=200)
with tf.Graph().as_default():
    waits = [tf1.py_func(lambda: float(barrier.wait()), [], tf.float64) for _ in range(3)]
    with tf1.Session(config=tf1.ConfigProto(inter_op_parallelism_threads=4)) as session:
        print(sorted(map(float, session.run(waits))))
"""


def test_operations_run_at_once_also_while_a_graph_is_built(graph):
    total, twice = run_in_separate_graph(lambda a, b: [tf.reduce_sum(a), 2 * b], np.array([1, 2, 3]), np.float32(4))
    assert (total, twice) == (6, 8.0)
    assert not graph.get_operations()


def test_one_graph_is_run_as_often_as_one_likes():
    apart = SeparateGraph(lambda number: number * number, np.int64(0))
    assert [apart.run(number) for number in range(3)] == [0, 1, 4]
    apart.close()


def test_sessions_of_the_script_have_as_many_threads_as_it_says(warm_python, tmp_path):
    (tmp_path / "script.py").write_text(AFTER_ONE_APART)
    done = warm_python.run([tmp_path / "script.py"], tmp_path)
    assert done.stdout.strip() == "[0.0, 1.0, 2.0]", done.stderr
