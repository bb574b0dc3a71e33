"""A script of TensorFlow 1 started with plain `python`: eager is off, or one line says what to do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.npu_run.launching import ROOT, write_script


def run(folder, name="train.py"):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = subprocess.run([sys.executable, name], cwd=folder, env=environment, timeout=240, **streams)
    return done.returncode, done.stdout, done.stderr


def test_eager_is_off_after_npu_init_where_nothing_has_run(tmp_path):
    write_script(
        tmp_path,
        """
        from npu_bridge.npu_init import *
        x = tf.placeholder(tf.float32, [2])
        print(tf.executing_eagerly(), x.shape[0].value)
        """,
    )
    code, output, errors = run(tmp_path)
    assert (code, output) == (0, "False 2\n") and "npu-run" not in errors


@pytest.mark.slow("several starts")
def test_what_is_out_of_reach_is_one_line_that_names_npu_run(tmp_path):
    write_script(
        tmp_path,
        """
        import tensorflow as tf
        import npu_bridge.npu_init
        def build():
            return tf.contrib.layers.flatten(tf.placeholder(tf.float32, [2, 2]))
        print(tf.executing_eagerly())
        tf.constant(1)
        """,
    )
    code, output, errors = run(tmp_path)
    assert (code, output) == (0, "False\n")
    lines = [line for line in errors.splitlines() if "npu-run" in line]
    assert len(lines) == 1
    assert lines[0].startswith("npu_bridge: ") and lines[0].endswith("start it with npu-run train.py")
    assert "train.py:5" in lines[0] and "tf.contrib.layers.flatten" in lines[0]


@pytest.mark.slow("starts Python several times")
def test_what_has_run_eagerly_and_scripts_of_tensorflow_2_are_left_alone(tmp_path):
    write_script(
        tmp_path,
        """
        import tensorflow as tf
        total = tf.constant(1) + 1
        from npu_bridge.npu_init import tf as v1
        print(tf.executing_eagerly(), int(total))
        def build(): return v1.placeholder(v1.float32), v1.Session()
        """,
    )
    code, output, errors = run(tmp_path)
    assert (code, output) == (0, "True 2\n")
    assert [line for line in errors.splitlines() if "has run eagerly" in line and "npu-run train.py" in line]
    write_script(
        tmp_path,
        """
        import tensorflow as tf
        from npu_bridge.npu_init import npu_keras_optimizer
        print(tf.executing_eagerly(), tf.random.set_seed(1))
        """,
        name="second.py",
    )
    code, output, errors = run(tmp_path, "second.py")
    assert (code, output) == (0, "True None\n") and "npu-run" not in errors
