"""`tensorflow.python.framework.test_util` for tests written for TensorFlow 1.15."""

from __future__ import annotations

from npu_bridge.base.tf_internals.contrib import in_both_modes


def run_in_graph_and_eager_modes(func=None, reset_test=True, **options):
    """Makes a test method run in both modes; the second begins with a fresh test, whatever `reset_test` says."""
    return in_both_modes(func, **options) if func else lambda method: in_both_modes(method, **options)
