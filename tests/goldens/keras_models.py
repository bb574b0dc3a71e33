"""A small Keras model for tests, with batches that they can poison."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

OPTIMIZERS = {
    "current adam": lambda: tf.keras.optimizers.Adam(0.05),
    "current sgd": lambda: tf.keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5),
    "legacy adam": lambda: tf.keras.optimizers.legacy.Adam(0.05),
}
BATCH_SIZE = 8


def make_model(library=tf.keras, **hidden):
    """Makes an embedding under two dense layers, with the same weights in every process."""
    library.utils.set_random_seed(1)
    return library.Sequential(
        [
            library.layers.Input([3], dtype="int32"),
            library.layers.Embedding(10, 4, name="embedding"),
            library.layers.Flatten(),
            library.layers.Dense(5, activation="tanh", name="hidden", **hidden),
            library.layers.Dense(2, dtype="float32", name="output"),
        ]
    )


def make_data(batches, poisoned=(), batch_size=BATCH_SIZE):
    """Returns tokens and labels; a poisoned batch has one label of Inf, so its gradients are not finite."""
    random = np.random.RandomState(0)
    tokens = random.randint(0, 10, [batches * batch_size, 3]).astype(np.int32)
    labels = random.randn(batches * batch_size, 2).astype(np.float32)
    for batch in poisoned:
        labels[batch * batch_size] = np.inf
    return tokens, labels


def fit(optimizer, data, model=None, batch_size=BATCH_SIZE, callbacks=(), library=tf.keras, **compile_arguments):
    """Trains one epoch, batch after batch in order; returns the model and the losses Keras shows after each batch."""
    model = make_model() if model is None else model
    losses = []
    note = library.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    model.compile(optimizer, loss="mse", **compile_arguments)
    model.fit(*data, batch_size=batch_size, shuffle=False, verbose=0, callbacks=[note, *callbacks])
    return model, losses


def state_of(model):
    """Returns every value of the model and of the optimizer that updates it, without a loss scale."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    variables = optimizer.variables
    values = [*model.variables, *(variables() if callable(variables) else variables)]
    return {str(position): tf.keras.backend.get_value(value) for position, value in enumerate(values)}
