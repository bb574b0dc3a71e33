"""Replaces `tensorflow.python.framework.test_util` for tests written for TensorFlow 1.15."""

from __future__ import annotations

from npu_bridge.base.tf_internals.contrib import run_in_both_modes


def run_in_graph_and_eager_modes(func=None, reset_test=True, **options):
    """Makes a test method run in graph mode and in eager mode; `reset_test` is ignored: the test is always reset."""
    return run_in_both_modes(func, **options) if func else lambda method: run_in_both_modes(method, **options)
