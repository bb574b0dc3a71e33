"""The small model of `keras_models.py` in Keras 3, on the same batches; empty if `keras` is Keras 2."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from tests.canaries import of_keras3
from tests.goldens import keras_models
from tests.goldens.keras_models import BATCH_SIZE

beside_keras3 = pytest.mark.skipif(not of_keras3.IS_BESIDE, reason=of_keras3.REASON)

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.05, use_ema=True, ema_overwrite_frequency=3),
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5),
    "adamw": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1, gradient_accumulation_steps=2),
}


def make_model():
    """Makes the model with a constraint."""
    return keras_models.make_model(keras, kernel_constraint="max_norm")


def dynamic(optimizer, init=2.0**10, growth=3, **arguments):
    """Returns our loss scaling with the rule of Keras: halved at an overflow, doubled after some good steps."""
    return npu_keras_optimizer(optimizer, ExponentialUpdateLossScaleManager(init, growth, 1, 2, 0.5), **arguments)


class Trace(keras.callbacks.Callback):
    """Keeps the result of `read(optimizer)` after every batch."""

    def __init__(self, read):
        super().__init__()
        self._read, self.values = read, []

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(self._read(self.model.optimizer))


def fit(optimizer, data, model=None, **arguments):
    """Trains one epoch as `keras_models.fit` does."""
    return keras_models.fit(optimizer, data, model or make_model(), library=keras, **arguments)


def loop(optimizer, data, decorate=tf.function, scales=True, batch_size=BATCH_SIZE):
    """Trains in a self-written loop; gradients of the scaled loss are given to `apply`."""
    model, (tokens, labels) = make_model(), data
    model.optimizer = optimizer

    @decorate
    def step(tokens, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(tokens) - labels))
            differentiated = optimizer.scale_loss(loss) if scales else loss
        gradients = tape.gradient(differentiated, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    for start in range(0, len(tokens), batch_size):
        step(*(tf.constant(part[start : start + batch_size]) for part in (tokens, labels)))
    return model


def state_of(model):
    """Returns every value of the model and of the optimizer that updates it, without a loss scale."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    values = [*model.variables, *optimizer.variables]
    return {str(position): value.numpy() for position, value in enumerate(values)}
