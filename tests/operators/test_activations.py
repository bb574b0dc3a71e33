"""Activations and normalisations against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator import helper
from npu_bridge.estimator.npu_aicore_ops import npu_aicore_ops
from npu_bridge.estimator.npu_unary_ops import npu_unary_ops
from tests.operators.computing import close, computed, differentiable

DTYPES = (np.float16, np.float32)
POINTS = np.array([[-30.0, -3.0, -1.0, -0.1], [0.0, 0.5, 1.702, 30.0]])


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def fast_gelu(x):
    return x * np.exp(0.851 * (x - abs(x))) / (1 + np.exp(-1.702 * abs(x)))


def polynomial_gelu(x):
    return x * (np.sign(x) * (-0.1444 * (np.minimum(abs(x) / math.sqrt(2), 1.769) - 1.769) ** 2 + 0.5) + 0.5)


FORMULAS = [
    (npu_unary_ops.gelu, gelu),
    (npu_aicore_ops.fast_gelu, fast_gelu),
    (npu_aicore_ops.fast_gelu_v2, polynomial_gelu),
    (lambda x: npu_aicore_ops.prelu(x, [0.25, 0.5, 0.0, 2.0]), lambda x: np.where(x > 0, x, [0.25, 0.5, 0, 2] * x)),
    (lambda x: npu_aicore_ops.centralization(x, [1]), lambda x: x - x.mean(axis=1, keepdims=True)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator, formula", FORMULAS)
def test_formula(operator, formula, dtype):
    close(computed(operator, POINTS.astype(dtype)), formula(POINTS.astype(dtype).astype(np.float64)).astype(dtype))


@pytest.mark.parametrize("operator, formula", FORMULAS)
def test_gradient(operator, formula):
    differentiable(operator, np.array([[-2.5, -0.7, 0.3, 1.9]]))


def test_the_gradient_of_prelu_at_zero_is_its_weight():
    x = tf.zeros([2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = npu_aicore_ops.prelu(x, [0.25, 0.5])
    assert tape.gradient(y, x).numpy().tolist() == [0.25, 0.5]


def test_the_gradient_by_its_own_name_is_that_of_the_operator():
    x, dy = tf.constant(POINTS), tf.constant([[2.0, -1.0, 0.5, 3.0], [1.0, 1.0, -4.0, 0.25]], tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = npu_aicore_ops.fast_gelu(x)
    close(helper.get_gen_ops().fast_gelu_grad(dy, x), tape.gradient(y, x, dy).numpy())


def test_the_polynomial_stays_as_near_to_gelu_as_documented():
    x = np.linspace(-6, 6, 2001)
    exact = x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
    away = np.abs(computed(npu_aicore_ops.fast_gelu_v2, x) - exact).max()
    assert 0.018 < away < 0.019


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_axis, params_axis", [(1, 2), (-1, -1), (0, 0), (2, 1)])
def test_layer_norm(norm_axis, params_axis, dtype):
    random = np.random.default_rng(3)
    x = random.normal(2.0, 3.0, [2, 3, 4]).astype(dtype)
    gamma, beta = random.normal(size=(2, *x.shape[params_axis % 3 :])).astype(dtype)
    axes = tuple(range(norm_axis % 3, 3))
    wide = x.astype(np.float64)
    mean, variance = wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True)

    def operator(x, gamma, beta):
        return npu_aicore_ops.layer_norm(x, gamma, beta, norm_axis, params_axis)

    y, y_mean, y_variance = computed(operator, x, gamma, beta)
    close(y, (gamma * ((wide - mean) / np.sqrt(variance + 1e-7)) + beta).astype(dtype))
    close(y_mean, mean.astype(dtype))
    close(y_variance, variance.astype(dtype))


def test_layer_norm_of_large_halves_does_not_overflow():
    x = np.array([[200.0, -200.0, 600.0, -600.0]], np.float16)  # their squares are beyond float16
    y, _, _ = computed(lambda x: npu_aicore_ops.layer_norm(x, [1.0] * 4, [0.0] * 4, 1, 1), x)
    close(y, (x / np.sqrt((x.astype(np.float64) ** 2).mean())).astype(np.float16))


def test_layer_norm_has_a_gradient():
    x, ones = np.random.default_rng(4).normal(size=[2, 3]), np.ones(3)
    differentiable(lambda *given: npu_aicore_ops.layer_norm(*given, 1, 1)[0] ** 2, x, 2 * ones, ones)


@pytest.mark.parametrize("axes, gamma", [((2, 1), 3), ((1, -3), 3), ((1, 1), 4)])
def test_layer_norm_checks_its_arguments(axes, gamma):
    with pytest.raises(ValueError, match="layer_norm: .*Expected .* got "):
        npu_aicore_ops.layer_norm(np.ones([2, 3]), np.ones(gamma), np.ones(gamma), *axes)
