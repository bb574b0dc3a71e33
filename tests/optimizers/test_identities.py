"""Which stock optimizer is the same maths, and which is not: both are held, the second with a number."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.optimizers import keras
from tests.goldens.two_layers import tfa

_DECAYING = tf.keras.optimizers.schedules.ExponentialDecay(0.05, 4, 0.5)
_v1 = tf.compat.v1.train
_new = tf.keras.optimizers
_legacy = tf.keras.optimizers.legacy


def _gradients(steps, smallest=-3, seed=5):
    random = np.random.RandomState(seed)
    return [random.randn(3, 4) * 10.0 ** random.uniform(smallest, 1, (3, 4)) for _ in range(steps)]


def _trained(optimizer, gradients, dtype=np.float64):
    variable = tf.Variable(np.random.RandomState(6).randn(3, 4).astype(dtype), name="kernel")
    for gradient in gradients:
        optimizer.apply_gradients([(tf.constant(gradient.astype(dtype)), variable)])
    return variable.numpy()


def _difference(one, other, gradients=None):
    gradients = gradients or _gradients(12)
    return np.max(np.abs(_trained(one, gradients) - _trained(other, gradients)))


ALIKE = {
    "SGD is Keras' SGD": lambda: (keras.SGD(0.05), _new.SGD(0.05)),
    "SGD is v1 GradientDescent": lambda: (keras.SGD(0.05), _v1.GradientDescentOptimizer(0.05)),
    "momentum is v1 Momentum": lambda: (keras.SGD(0.05, 0.9), _v1.MomentumOptimizer(0.05, 0.9)),
    "Nesterov is v1 Nesterov": lambda: (
        keras.SGD(0.05, 0.9, nesterov=True),
        _v1.MomentumOptimizer(0.05, 0.9, use_nesterov=True),
    ),
    "momentum is Keras' SGD at a constant rate": lambda: (keras.SGD(0.05, 0.9), _new.SGD(0.05, 0.9)),
    "RMSProp is Keras' RMSprop": lambda: (keras.RMSProp(0.05, epsilon=1e-7), _new.RMSprop(0.05, epsilon=1e-7)),
    "RMSProp with momentum, centered, is Keras'": lambda: (
        keras.RMSProp(0.05, momentum=0.9, centered=True, epsilon=1e-7),
        _new.RMSprop(0.05, momentum=0.9, centered=True, epsilon=1e-7),
    ),
    "RMSProp from 1 is v1 RMSProp": lambda: (
        keras.RMSProp(0.05, momentum=0.5, epsilon=1e-10, initial_accumulator=1.0),
        _v1.RMSPropOptimizer(0.05, momentum=0.5),
    ),
    "RMSProp with epsilon outside is legacy RMSprop": lambda: (
        keras.RMSProp(0.05, epsilon=1e-7, epsilon_inside=False),
        _legacy.RMSprop(0.05, epsilon=1e-7),
    ),
    "Adagrad is Keras' Adagrad from 0": lambda: (
        keras.Adagrad(0.05),
        _new.Adagrad(0.05, initial_accumulator_value=0.0, epsilon=1e-8),
    ),
    "Adadelta is Keras' Adadelta": lambda: (keras.Adadelta(1.0), _new.Adadelta(1.0, rho=0.9, epsilon=1e-6)),
    "Adam is v1 Adam": lambda: (keras.Adam(0.05), _v1.AdamOptimizer(0.05)),
    "Adam is Keras' Adam": lambda: (keras.Adam(0.02, epsilon=1e-7), _new.Adam(0.02)),
    "AdamW is Keras' AdamW": lambda: (
        keras.AdamW(0.02, weight_decay=0.1, epsilon=1e-7),
        _new.AdamW(0.02, weight_decay=0.1),
    ),
    "coupled decay is Keras' weight_decay for plain SGD": lambda: (
        keras.SGD(0.05, weight_decay=0.1),
        _new.SGD(0.05, weight_decay=0.1),
    ),
}
if tfa is not None:
    ALIKE["LAMB is tensorflow-addons' LAMB"] = lambda: (
        keras.LAMB(0.05, weight_decay=0.1),
        tfa.optimizers.LAMB(0.05, weight_decay=0.1),
    )


@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE)
def test_is_the_stock_optimizer(make):
    assert _difference(*make()) <= 2e-6


# The least that they differ by after twelve steps, about half of what was measured.
DIFFERENT = {
    "momentum under a decaying rate is not Keras' SGD": (
        lambda: (keras.SGD(_DECAYING, 0.9), _new.SGD(_DECAYING, 0.9)),
        0.1,
    ),
    "coupled decay with momentum is not Keras' weight_decay": (
        lambda: (keras.SGD(0.05, 0.9, weight_decay=0.1), _new.SGD(0.05, 0.9, weight_decay=0.1)),
        0.01,
    ),
    "coupled decay in Adam is not Keras' weight_decay": (
        lambda: (keras.Adam(0.05, weight_decay=0.1, epsilon=1e-7), _new.Adam(0.05, weight_decay=0.1)),
        0.01,
    ),
    "RMSProp from 0 is not v1 RMSProp": (
        lambda: (keras.RMSProp(0.05, epsilon=1e-10), _v1.RMSPropOptimizer(0.05)),
        0.01,
    ),
}


@pytest.mark.parametrize("make, least", DIFFERENT.values(), ids=DIFFERENT)
def test_is_not_the_stock_optimizer(make, least):
    assert _difference(*make()) > least


def test_where_adams_epsilon_stands_matters_for_tiny_gradients_only():
    def placed(placement):
        return keras.Adam(0.05, epsilon_placement=placement)

    tiny = [gradient * 1e-7 for gradient in _gradients(12, smallest=0)]
    assert _difference(placed("tf"), placed("corrected")) < 1e-3
    assert _difference(placed("tf"), placed("corrected"), tiny) > 1e-2
