"""`tensorflow.python.framework.test_util` for tests that were written for TensorFlow 1.15."""

from __future__ import annotations

from tensorflow.python.framework import test_util


def run_in_graph_and_eager_modes(func=None, config=None, use_gpu=True, reset_test=True, assert_no_eager_garbage=False):
    """A test method that runs in both modes; the second begins with a fresh test, whatever `reset_test` says."""

    def decorate(method):
        return test_util.run_in_graph_and_eager_modes(method, config, use_gpu, assert_no_eager_garbage)

    return decorate if func is None else decorate(func)
