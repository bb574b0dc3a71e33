"""After `tf.disable_v2_behavior()`: shapes hold `Dimension`s, and Keras compiles with legacy optimizers alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from npu_bridge.base.tf_internals.names import HAS_ESTIMATORS
from tests.npu_run.launching import ROOT, write_script
from tests.tensorflow1_compat.test_plain_python import run

BEGIN = """
    from npu_bridge.npu_init import *
    import numpy as np
    import tensorflow
    from npu_bridge import amp
    from npu_bridge.optimizers import keras, keras_legacy, tf1
    tensorflow.compat.v1.disable_v2_behavior()
    assert type(tensorflow.zeros([2]).shape[0]).__name__ == "Dimension"
    K, v1 = tensorflow.keras.optimizers, tensorflow.compat.v1
    x, y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")

    def make():
        layer = tensorflow.keras.layers.Dense(2, kernel_initializer="zeros", input_shape=(3,))
        return tensorflow.keras.Sequential([layer])

    def fitted(model, optimizer):
        model.compile(optimizer, "mse")
        model.fit(x, y, epochs=2, verbose=0)
        return model.get_weights()[0]
"""
OF_AMP = """
    expected = fitted(make(), K.legacy.Adam(0.25))
    for level in ("O0", "O1", "O2"):
        scale = 1.0 if level == "O0" else 128.0
        model, optimizer = amp.initialize(make(), K.Adam(0.25), opt_level=level, loss_scale=scale)
        np.testing.assert_allclose(fitted(model, optimizer), expected, rtol=0.02)
        exported = amp.export_float32(model)
        np.testing.assert_allclose(exported.get_weights()[0], model.get_weights()[0])
"""
OF_KERAS = """
    make_manager = lambda: ExponentialUpdateLossScaleManager(1024.0, 10)
    halving = K.schedules.ExponentialDecay(0.25, 1, 0.5)
    pairs = [
        (K.SGD, K.legacy.SGD, {"learning_rate": 0.125, "momentum": 0.5}),
        (K.SGD, K.legacy.SGD, {"learning_rate": halving}),
        (keras.LAMB, keras_legacy.LAMB, {"learning_rate": 0.1, "weight_decay": 0.5}),
        (keras.AdamW, keras_legacy.AdamW, {"learning_rate": halving, "weight_decay": 0.5}),
    ]
    for kind, legacy, settings in pairs:
        for make_scale in (lambda: None, make_manager):
            expected = fitted(make(), npu_keras_optimizer(legacy(**settings), make_scale()))
            got = fitted(make(), npu_keras_optimizer(kind(**settings), make_scale()))
            np.testing.assert_array_equal(got, expected)
    for optimizer in (K.AdamW(0.1), K.Adam(0.1, weight_decay=0.5)):
        try:
            fitted(make(), npu_keras_optimizer(optimizer))
        except ValueError as error:
            assert "tf.keras.optimizers.legacy" in str(error), error
        else:
            raise AssertionError("Keras has compiled it")
"""
OF_HCCL = """
    from npu_bridge.hccl import hccl_ops
    with tensorflow.Graph().as_default():
        rows = v1.placeholder(tensorflow.float32, [None, 2])
        parts = [hccl_ops.reduce_scatter(rows, "sum", 1), hccl_ops.allgather(rows, 1)]
        with v1.Session() as session:
            assert [value.shape for value in session.run(parts, {rows: x[:, :2]})] == [(4, 2), (4, 2)]
"""


@pytest.mark.skipif(not HAS_ESTIMATORS, reason="Keras 2 of this TensorFlow is the same; one is enough")
@pytest.mark.slow("a start of TensorFlow each; the case below has some of these shapes")
@pytest.mark.parametrize("calls", [OF_AMP, OF_KERAS, OF_HCCL], ids=["amp", "keras", "hccl"])
def test_scripts_without_version_2(tmp_path, calls):
    write_script(tmp_path, BEGIN.replace("\n    ", "\n") + calls.replace("\n    ", "\n") + "\nprint('done')\n")
    code, output, errors = run(tmp_path)
    assert (code, output[-5:]) == (0, "done\n"), errors


def run_cases(*arguments: str) -> None:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.version_1_shapes", "-p", "no:cacheprovider"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, timeout=600, **streams)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


def test_some_cases_with_shapes_of_version_1():
    run_cases("-m", "not slow and not ranks", "-k", "bfgs or unwrapped", "tests/boost/test_subspace_newton.py")


@pytest.mark.slow("all cases of some rooms again")
@pytest.mark.parametrize("room", ["boost", "amp", "optimizers", "gradients/test_pipeline.py"])
def test_all_cases_with_shapes_of_version_1(room):
    run_cases("-m", "not slow and not ranks", f"tests/{room}")
