"""Low precision on a GPU: kernels in float16, losses near those of float32, and what is imitated."""

from __future__ import annotations

import pathlib
import runpy
import sys

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import amp
from npu_bridge.session.precision.rewriter import IMITATION
from tests.goldens.keras_models import fit, make_data, make_model
from tests.session.precision.small_models import Dense, dtypes_of, kernels_of, precision_of, run_with_graph, session_of

pytestmark = pytest.mark.slow("minutes on a GPU that most machines do not have")
ROOT = pathlib.Path(__file__).resolve().parents[2]
# For each mode the dtype of matrix products, and of their kernels: TensorFlow lowers to bfloat16 on no GPU.
MODES = {
    "mixed_float16": ("float16", {"GPU": "float16", "CPU": "float16"}),
    "fp16": ("float16", {"GPU": "float16", "CPU": "float16"}),
    "cube_fp16in_fp32out": ("float16", {"GPU": "float16", "CPU": "float16"}),
    "mixed_bfloat16": ("bfloat16", {"GPU": "float32", "CPU": "bfloat16"}),
    "origin": ("float32", {"GPU": "float32", "CPU": "float32"}),
}
STEPS, LAST = 100, 20
# Of the mean loss of the last steps: what two trainings in float32 differ by that add up in another order, and more.
TOLERANCES = {"digits": 0.1, "BERT tiny": 0.02}


@pytest.fixture
def losses(monkeypatch, processor):
    """Returns a function of a model and a mode, which gives the losses of 100 steps."""
    if processor == "CPU":
        monkeypatch.setenv(IMITATION, "1")  # float16 kernels of a CPU take minutes
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples" / name) for name in ("digits", "bert_pretrain")] + sys.path)
    trainings = runpy.run_path(str(ROOT / "benchmarks" / "precision_losses.py"))
    return lambda name, mode: trainings["train"](name, mode, STEPS, 1)


@pytest.mark.parametrize("mode", MODES)
def test_matrix_products_are_computed_in_the_dtype_of_the_mode(mode, processor):
    model = Dense()
    with session_of(model.graph, precision_of(precision_mode_v2=mode)) as session:
        session.run(model.init)
        nodes = run_with_graph(session, [model.train_op, model.loss], model.batch(0))[1]
    values, kernels = MODES[mode]
    if processor == "CPU" and mode == "mixed_bfloat16" and kernels_of(nodes) == {"float32": 5}:
        kernels = {"CPU": "float32"}  # imitated: this processor has no units for bfloat16
    assert dtypes_of(nodes) == {values: 5}
    assert kernels_of(nodes) == {kernels[processor]: 5}
    products = [node for node in nodes if "MatMul" in node.op]
    assert all(f"device:{processor}:" in node.device for node in products), [node.device for node in products]


@pytest.mark.parametrize("name", TOLERANCES)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "origin"])
def test_a_hundred_steps_end_where_those_in_float32_do(losses, name, mode):
    low, exact = (np.asarray(losses(name, each), np.float64) for each in (mode, "origin"))
    assert np.isfinite(low).all() and exact[-LAST:].mean() < exact[:LAST].mean()
    assert low.tolist() != exact.tolist()
    np.testing.assert_allclose(low[-LAST:].mean(), exact[-LAST:].mean(), rtol=TOLERANCES[name])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_levels_train_a_keras_model_as_float32_does(level):
    data = make_data(40)
    _, exact = fit(tf.keras.optimizers.Adam(0.05), data)
    levels = amp.configure(level, tf.keras.optimizers.Adam(0.05), make_model())
    model, low = fit(levels.optimizer, data, levels.model)
    assert all(np.isfinite(value).all() for value in model.get_weights())
    np.testing.assert_allclose(np.mean(low[-10:]), np.mean(exact[-10:]), rtol=0.05)
