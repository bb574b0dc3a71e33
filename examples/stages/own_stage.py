"""Uses a self-written stage in the three ways to train: TF 1 graph, Keras, and a loop around a gradient tape.

    python examples/stages/own_stage.py
    npu-run -np 2 examples/stages/own_stage.py

All of them train the same layer with the same batches, and end with the same weights.
"""

from __future__ import annotations

import numpy as np

from npu_bridge.npu_init import FixedLossScaleManager, NPUOptimizer, npu_keras_optimizer
from npu_bridge.stages import Accumulate, Stage, explain, pipeline

# isort: split
import tensorflow as tf  # after npu_bridge, which hides TensorFlow's notes about its own build


class NormalizeEach(Stage):
    """Gives the gradient of each variable the same norm, as normalised gradient descent does.

    Args:
      norm: the norm, above 0.
    """

    place = "transform"  # after the reduction, the decision about overflows, and clipping
    needs = ("a verdict",)  # so that an Inf skips the step

    def __init__(self, norm: float):
        if not norm > 0:
            raise ValueError(f"NormalizeEach: norm is out of range. Expected a number above 0; got {norm}.")
        self._norm = norm

    def get_config(self):
        return {"norm": self._norm}

    def after_reduce(self, step):
        step.map(lambda grad: grad * (self._norm / tf.maximum(tf.norm(grad), 1e-12)))


BATCHES, BATCH_ROWS, RATE = 40, 8, 0.5
START = np.zeros([3, 1], np.float32)


def stages():
    return [NormalizeEach(0.1), Accumulate(2)]  # in any order


def data():
    random = np.random.RandomState(0)
    features = random.randn(BATCHES * BATCH_ROWS, 3).astype(np.float32)
    return features, features @ np.array([[1.0], [-2.0], [0.5]], np.float32)


def loss_of(kernel, features, labels):
    return tf.reduce_mean(tf.square(tf.matmul(features, kernel) - labels))


# Names of TensorFlow 1 are spelled out: with `import tensorflow.compat.v1`, or a shorter name, this would be a script
# of TensorFlow 1, which executes nothing eagerly.
def train_in_a_graph():
    with tf.Graph().as_default():
        kernel = tf.compat.v1.get_variable("kernel", initializer=START)
        features, labels = (tf.compat.v1.placeholder(tf.float32, [BATCH_ROWS, columns]) for columns in (3, 1))
        optimizer = NPUOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(RATE),
            FixedLossScaleManager(1024),
            is_distributed=True,
            is_loss_scale=True,
            stages=stages(),
        )
        train_op = optimizer.minimize(loss_of(kernel, features, labels), tf.compat.v1.train.get_or_create_global_step())
        print(explain(optimizer))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for batch in zip(*(np.split(array, BATCHES) for array in data())):
                session.run(train_op, dict(zip((features, labels), batch)))
            return session.run(kernel)


def train_in_keras():
    layer = tf.keras.layers.Dense(1, use_bias=False, input_shape=[3], kernel_initializer="zeros")
    model = tf.keras.Sequential([layer])
    optimizer = npu_keras_optimizer(tf.keras.optimizers.SGD(RATE), FixedLossScaleManager(1024), stages=stages())
    model.compile(optimizer, loss="mse")
    model.fit(*data(), batch_size=BATCH_ROWS, shuffle=False, verbose=0)
    return layer.kernel.numpy()


def train_in_a_loop():
    kernel = tf.Variable(START)
    optimizer = tf.keras.optimizers.legacy.SGD(RATE)
    steps = pipeline("loop", FixedLossScaleManager(1024), is_distributed=True, stages=stages())

    @tf.function
    def train(features, labels):
        step = steps.begin()
        with tf.GradientTape() as tape:
            loss = steps.scale(loss_of(kernel, features, labels), step)
        grads_and_vars = steps.combine(step, zip(tape.gradient(loss, [kernel]), [kernel]))
        steps.apply(step, grads_and_vars, optimizer.apply_gradients)

    for batch in tf.data.Dataset.from_tensor_slices(data()).batch(BATCH_ROWS):
        train(*batch)
    return kernel.numpy()


def main():
    results = {"graph": train_in_a_graph(), "Keras": train_in_keras(), "loop": train_in_a_loop()}
    for way, kernel in results.items():
        print(f"{way}: {', '.join(f'{value:.4f}' for value in kernel[:, 0])}")
    return results


if __name__ == "__main__":
    main()
