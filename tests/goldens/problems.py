"""Problems of goldens: start values, feeds for each rank, losses in TensorFlow, and raw gradients in numpy."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

LAYERS, WIDTH, ROWS = 4, 3, 4
NOT_FINITE = {(7, 0, "kernel"): np.inf, (20, 1, "kernel"): np.nan, (38, 0, "kernel"): np.nan}


def _with_bad(fed, rank, bad):
    for (step, of_rank, key), value in bad.items():
        if of_rank == rank and step < len(fed):
            fed[step][key].flat[4 % fed[step][key].size] = value
    return fed


class Fed:
    """A problem whose gradients are fed, whatever the variables; those of the table are rows with repeated indices.

    Args:
      losses: 1, or 2, of which the second has no `vector`; its keys end with `_1`.
      bad: replacements of one value of a gradient, by (step, rank, key).
    """

    shapes = {"kernel": (4, 3), "vector": (3,), "table": (6, 2)}
    rtol = atol = 2e-5

    def __init__(self, steps=51, seed=0, bad=NOT_FINITE, losses=1):
        self.steps, self._seed, self._bad = steps, seed, bad
        self._suffixes = ("", "_1")[:losses]

    def start_values(self):
        """Returns the variables before the first step."""
        random = np.random.RandomState(100)
        return {name: random.randn(*shape).astype(np.float32) for name, shape in self.shapes.items()}

    def fed_to(self, rank, steps=None):
        """Returns a dict of arrays for each step."""
        random, fed = np.random.RandomState([self._seed, rank]), []
        for _ in range(steps or self.steps):
            grads = {"vector": random.randn(3).astype(np.float32)}
            for suffix in self._suffixes:
                grads[f"kernel{suffix}"] = random.randn(4, 3).astype(np.float32)
                grads[f"rows{suffix}"] = random.randint(0, 6, 5)
                grads[f"table{suffix}"] = random.randn(5, 2).astype(np.float32)
            fed.append(grads)
        return _with_bad(fed, rank, self._bad)

    def losses_of(self, variables, fed, mark=None):
        """Computes the losses in TensorFlow."""
        losses = []
        for suffix in self._suffixes:
            read = tf.gather(variables["table"], fed[f"rows{suffix}"])
            products = [variables["kernel"] * fed[f"kernel{suffix}"], read * fed[f"table{suffix}"]]
            products += [] if suffix else [variables["vector"] * fed["vector"]]
            losses.append(tf.add_n([tf.reduce_sum(product) for product in products]))
        return losses

    def gradients_of(self, values, fed):
        """Returns, for each loss, dense gradients by name, and the rows of the table that have gradients."""
        found = []
        for suffix in self._suffixes:
            table, rows = np.zeros(self.shapes["table"]), np.zeros(6, bool)
            np.add.at(table, fed[f"rows{suffix}"], fed[f"table{suffix}"])
            rows[fed[f"rows{suffix}"]] = True
            vector = np.zeros(3) if suffix else fed["vector"].astype(np.float64)
            kernel = fed[f"kernel{suffix}"].astype(np.float64)
            found.append(({"kernel": kernel, "vector": vector, "table": table}, rows))
        return found


class Layers:
    """The mean squared error of four layers of tanh.

    Args:
      is_poisonable: gradients of each layer's kernel get an addend, which has no way through another layer.
    """

    shapes = {
        f"layer_{number}/{kind}": shape
        for number in range(LAYERS)
        for kind, shape in (("kernel", (WIDTH, WIDTH)), ("bias", (WIDTH,)))
    }
    rtol, atol = 1e-4, 1e-5

    def __init__(self, steps=51, bad=None, is_poisonable=False):
        self.steps, self._bad, self._is_poisonable = steps, bad or {}, is_poisonable

    def start_values(self):
        """Returns the variables before the first step."""
        random = np.random.RandomState(1)
        return {name: random.randn(*shape).astype(np.float32) for name, shape in self.shapes.items()}

    def fed_to(self, rank, steps=None):
        """Returns a dict of arrays for each step."""
        random, fed = np.random.RandomState(10 + rank), []
        for _ in range(steps or self.steps):
            fed.append({key: random.randn(ROWS, WIDTH).astype(np.float32) for key in ("x", "y")})
            if self._is_poisonable:
                fed[-1].update({f"poison_{number}": np.zeros([], np.float32) for number in range(LAYERS)})
        return _with_bad(fed, rank, self._bad)

    def losses_of(self, variables, fed, mark=None):
        """Computes the loss in TensorFlow; `mark(x, i, j)` wraps the tensor between two layers, or the output."""
        mark = mark or (lambda x, i, j: x)
        x = fed["x"]
        for number in range(LAYERS):
            with tf.name_scope(f"layer_{number}"):
                kernel, bias = (variables[f"layer_{number}/{kind}"] for kind in ("kernel", "bias"))
                # A layer's output instead of its input, so that the first layer has a gradient to mark, too.
                x = tf.tanh(mark(tf.matmul(x, kernel) + bias, number, number + 1))
        loss = tf.reduce_mean(tf.square(x - fed["y"]))
        if self._is_poisonable:
            kernels = [variables[f"layer_{number}/kernel"] for number in range(LAYERS)]
            read = [mark(kernel * fed[f"poison_{number}"], number, LAYERS) for number, kernel in enumerate(kernels)]
            loss += tf.add_n([tf.reduce_sum(each) for each in read])
        return [loss]

    def gradients_of(self, values, fed):
        """Returns the dense gradients of the one loss by name, and no rows."""
        outputs = [fed["x"].astype(np.float64)]
        for number in range(LAYERS):
            kernel, bias = (values[f"layer_{number}/{kind}"] for kind in ("kernel", "bias"))
            outputs.append(np.tanh(outputs[-1] @ kernel + bias))
        grads = {}
        with np.errstate(invalid="ignore"):
            signal = 2 * (outputs[-1] - fed["y"]) / fed["y"].size
            for number in reversed(range(LAYERS)):
                signal = signal * (1 - outputs[number + 1] ** 2)
                grads[f"layer_{number}/kernel"] = outputs[number].T @ signal + fed.get(f"poison_{number}", 0.0)
                grads[f"layer_{number}/bias"] = signal.sum(axis=0)
                signal = signal @ values[f"layer_{number}/kernel"].T
        return [({name: grads[name] for name in self.shapes}, np.zeros(0, bool))]
