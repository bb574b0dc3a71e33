"""A small model for tests, with gradients that they can choose."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective

tf1 = tf.compat.v1

try:
    with warnings.catch_warnings():  # tensorflow-addons announces its end of life at import
        warnings.simplefilter("ignore")
        import tensorflow_addons as tfa
    LAMB = tfa.optimizers.LAMB
except ModuleNotFoundError:  # it is for TensorFlow 2.15
    from npu_bridge.optimizers.keras_legacy import LAMB

    tfa = None
beside_addons = pytest.mark.skipif(tfa is None, reason="tensorflow-addons is for TensorFlow 2.15")

OPTIMIZERS = {
    "sgd": lambda: tf1.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: tf1.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: tf1.train.AdamOptimizer(0.1),
    "lamb": lambda: LAMB(0.1, weight_decay=0.01, exclude_from_weight_decay=["embedding"]),
    "keras_legacy_adam": lambda: tf.keras.optimizers.legacy.Adam(0.1),
    "keras_adam": lambda: tf.keras.optimizers.Adam(0.1),
}
TF1_OPTIMIZERS = ("sgd", "momentum", "adam")


def in_graph(function):
    """Runs a function, with any arguments, while a new TF 1 graph is the default one."""

    @functools.wraps(function)
    def run(*arguments):
        with tf.Graph().as_default():
            return function(*arguments)

    return run


def as_built():
    """Returns settings of a session that does not optimize graphs, which takes longer than running small ones."""
    config = tf1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


def as_built_by_many():
    """Returns `as_built()` on more than two ranks, which share the cores; on one and two, users' own settings."""
    return as_built() if collective.current().size > 2 else None


class TwoLayers:
    """A dense layer on top of an embedding, in the default TF 1 graph; the embedding's gradient is sparse.

    Attributes:
      loss: scalar; `poison` is added to it multiplied by the kernel, so that it becomes part of the gradient.
    """

    def __init__(self, use_resource=True, seed=1):
        initializer = tf1.random_normal_initializer(seed=seed)
        self.embedding = tf1.get_variable("embedding", [20, 4], initializer=initializer, use_resource=use_resource)
        self.kernel = tf1.get_variable("kernel", [4, 3], initializer=initializer, use_resource=use_resource)
        self.unused = tf1.get_variable("unused", [2], initializer=initializer, use_resource=use_resource)
        self.tokens = tf1.placeholder(tf.int32, [None])
        self.poison = tf1.placeholder_with_default(0.0, [])
        features = tf.nn.embedding_lookup(self.embedding, self.tokens)
        self.loss = tf.reduce_mean(tf.square(tf.matmul(features, self.kernel))) + self.poison * tf.reduce_sum(
            self.kernel
        )

    def variables(self):
        return [self.embedding, self.kernel, self.unused]


def token_batches(steps, batch_size=8, seed=0):
    """Returns one batch of token ids per step."""
    random = np.random.RandomState(seed)
    return [random.randint(0, 20, batch_size) for _ in range(steps)]


def train(make_optimizer, steps=10, use_resource=True, batches=None, poisons=None, change=None, fetch=()):
    """Trains `TwoLayers` in a graph of its own.

    Args:
      make_optimizer: called in the graph; gives an object with compute_gradients and apply_gradients.
      batches: token ids per step; `token_batches(steps)` by default.
      poisons: number per step added to every element of the kernel's gradient.
      change: function of grads_and_vars, applied between compute and apply.
      fetch: names of tensors or collections' first tensors to fetch in every step.
    Returns:
      The values of all global variables by name after the last step, and a list of fetched tuples per step.
    """
    batches = token_batches(steps) if batches is None else batches
    poisons = [0.0] * len(batches) if poisons is None else poisons
    with tf.Graph().as_default():
        model = TwoLayers(use_resource)
        global_step = tf1.train.get_or_create_global_step()
        optimizer = make_optimizer()
        grads_and_vars = optimizer.compute_gradients(model.loss)
        if change is not None:
            grads_and_vars = change(grads_and_vars)
        train_op = optimizer.apply_gradients(grads_and_vars, global_step=global_step)
        fetched_tensors = [_tensor(name) for name in fetch]
        trace = []
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for tokens, poison in zip(batches, poisons):
                _, *values = session.run([train_op, *fetched_tensors], {model.tokens: tokens, model.poison: poison})
                trace.append(tuple(values))
            return session.run({variable.name: variable for variable in tf1.global_variables()}), trace


def _tensor(name):
    collected = tf1.get_collection(name)
    return collected[0] if collected else tf1.get_default_graph().get_tensor_by_name(name)


def assert_same_bits(actual, expected):
    """Checks that `actual` has every variable of `expected` with the same bits; names the first that differs."""
    for name, value in expected.items():
        assert name in actual, f"{name} is missing; there are {sorted(actual)}"
        if actual[name].tobytes() != value.tobytes():
            difference = np.max(np.abs(np.asarray(actual[name], np.float64) - np.asarray(value, np.float64)))
            raise AssertionError(f"{name} differs by up to {difference}")


def assert_all_finite(variables):
    for name, value in variables.items():
        assert np.all(np.isfinite(np.asarray(value, np.float64))), f"{name} is not finite: {value}"
