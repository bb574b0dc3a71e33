"""Random training steps: networks with shared variables, sparse gradients, conditions, loops and control edges."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

tf1 = tf.compat.v1
ROWS = 2
WORDS = 5
WIDTHS = (3, 4)
CLIPS = {
    "none": lambda gradients: gradients,
    "value": lambda gradients: [tf.clip_by_value(grad, -0.5, 0.5) for grad in gradients],
    "norm": lambda gradients: [tf.clip_by_norm(grad, 0.5) for grad in gradients],
    "global norm": lambda gradients: tf.clip_by_global_norm(gradients, 0.5)[0],
}

LAYERS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["dense", "dense", "embedding", "cond", "while"]),
        "source": st.integers(0, 9),
        "width": st.sampled_from(WIDTHS),
        "is_shared": st.booleans(),
        "waits_for": st.none() | st.integers(0, 9),
    }
)
NETWORKS = st.lists(LAYERS, min_size=2, max_size=6)


class Network:
    """A network in the default TF 1 graph.

    Args:
      layers: a list drawn from `NETWORKS`; numbers in it are taken modulo what there is.
    Attributes:
      loss: a scalar.
      feeds: a function of a random state and a poison that gives what to feed; the poison becomes part of the gradient
        of a variable.
    """

    def __init__(self, layers):
        self._matrices, self._tables = [], []
        inputs = tf1.placeholder(tf.float32, [ROWS, WIDTHS[0]])
        words = tf1.placeholder(tf.int32, [ROWS])
        poison = tf1.placeholder(tf.float32, [])
        values = [inputs]
        for number, layer in enumerate(layers):
            # Two trainers need two variables.
            layer = {**layer, "is_shared": layer["is_shared"] and number > 1}
            waits_for = [] if layer["waits_for"] is None else [values[layer["waits_for"] % len(values)]]
            with tf1.variable_scope(f"layer_{number}"), tf.control_dependencies(waits_for):
                values.append(self._layer(layer, values[layer["source"] % len(values)], words))
        poisoned = tf.reduce_sum((self._matrices + self._tables)[-1])
        self.loss = tf.add_n([tf.reduce_mean(tf.square(value)) for value in values[1:]]) + poison * poisoned

        def feeds(random, poison_now):
            return {
                inputs: random.randn(*inputs.shape),
                words: random.randint(0, WORDS, ROWS),
                poison: np.float32(poison_now),
            }

        self.feeds = feeds

    def _layer(self, layer, source, words):
        if layer["kind"] == "embedding":
            table = self._variable(self._tables, [WORDS, layer["width"]], layer["is_shared"])
            return tf.nn.embedding_lookup(table, words)
        is_loop = layer["kind"] == "while"
        width = source.shape[-1] if is_loop else layer["width"]
        matrix = self._variable(self._matrices, [source.shape[-1], width], layer["is_shared"])
        if layer["kind"] == "cond":
            return tf.cond(
                tf.reduce_sum(source) > 0.0, lambda: tf.tanh(tf.matmul(source, matrix)), lambda: source @ matrix * 0.5
            )
        if is_loop:
            return tf1.while_loop(
                lambda turn, _: turn < 2, lambda turn, value: (turn + 1, tf.tanh(value @ matrix)), (0, source)
            )[1]
        return tf.tanh(tf.matmul(source, matrix))

    @staticmethod
    def _variable(known, shape, is_shared):
        fitting = [variable for variable in known if variable.shape == tf.TensorShape(shape)]
        if fitting and is_shared:
            return fitting[-1]
        initializer = tf1.random_normal_initializer(stddev=0.5, seed=len(known))
        known.append(tf1.get_variable("weights", shape, initializer=initializer, use_resource=True))
        return known[-1]
