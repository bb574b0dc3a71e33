"""`NPUSaver`: TensorFlow's saver wherever no ranks share an update."""

from __future__ import annotations

import inspect
import os

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_saver import NPUBulkSaverBuilder, NPUSaver

tf1 = tf.compat.v1


@pytest.mark.parametrize("method", ["__init__", "save", "restore"])
def test_signatures_are_those_of_the_stock_saver(method):
    assert inspect.signature(getattr(NPUSaver, method)) == inspect.signature(getattr(tf1.train.Saver, method))


def test_an_ordinary_graph_is_saved_and_restored(graph, tmp_path):
    variable = tf1.get_variable("variable", initializer=[1.0, 2.0])
    saver = NPUSaver(max_to_keep=2, builder=NPUBulkSaverBuilder())
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        paths = [saver.save(session, str(tmp_path / "model"), global_step=step) for step in range(3)]
        assert [os.path.exists(path + ".index") for path in paths] == [False, True, True]
        session.run(variable.assign([0.0, 0.0]))
        saver.restore(session, paths[-1])
        np.testing.assert_array_equal(session.run(variable), [1.0, 2.0])
