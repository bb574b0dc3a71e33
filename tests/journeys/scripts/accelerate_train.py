"""A classifier whose first steps run in low precision, as the documentation of accelerate_train_mode has it."""

import json
import os
import sys

import numpy as np

sys.path.insert(0, os.getcwd())
from npu_bridge.estimator.npu.npu_config import ExperimentalConfig, NPURunConfig  # noqa: E402
from npu_bridge.estimator.npu.npu_hook import TellMeStepOrLossHook  # noqa: E402
from npu_bridge.npu_init import *  # noqa: E402,F403

flags = tf.flags  # noqa: F405
FLAGS = flags.FLAGS
flags.DEFINE_string("model_dir", None, "folder of the checkpoints")
flags.DEFINE_string("accelerate_train_mode", "fast|step|0.5", "how the training starts")
flags.DEFINE_integer("train_steps", 12, "steps of the training")
flags.DEFINE_float("final_loss", None, "loss to reach, for the loss way")


def input_fn():
    random = np.random.RandomState(3)
    features = random.randn(256, 6).astype(np.float32)
    labels = (features @ random.randn(6, 3)).argmax(axis=1).astype(np.int32)
    return tf.data.Dataset.from_tensor_slices((features, labels)).repeat().batch(32)  # noqa: F405


def model_fn(features, labels, mode):
    hidden = tf.layers.dense(features, 16, tf.nn.relu)  # noqa: F405
    logits = tf.layers.dense(hidden, 3)  # noqa: F405
    loss = tf.identity(tf.losses.sparse_softmax_cross_entropy(labels, logits), name="loss")  # noqa: F405
    optimizer = tf.train.AdamOptimizer(0.03)  # noqa: F405
    return NPUEstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, tf.train.get_global_step()))  # noqa: F405


class Kernels(tf.train.SessionRunHook):  # noqa: F405
    """Which dtypes the matrix products of every step really ran in."""

    seen, losses = [], []

    def before_run(self, run_context):
        options = tf.RunOptions(output_partition_graphs=True)  # noqa: F405
        return tf.train.SessionRunArgs("loss:0", options=options)  # noqa: F405

    def after_run(self, run_context, run_values):
        nodes = [node for graph in run_values.run_metadata.partition_graphs for node in graph.node]
        self.seen.append(sorted({tf.as_dtype(n.attr["T"].type).name for n in nodes if "MatMul" in n.op}))  # noqa: F405
        self.losses.append(float(run_values.results))


def main(_):
    tf.disable_eager_execution()  # noqa: F405
    tf.logging.set_verbosity(tf.logging.INFO)  # noqa: F405
    experimental_config = ExperimentalConfig(accelerate_train_mode=FLAGS.accelerate_train_mode)
    config = NPURunConfig(model_dir=FLAGS.model_dir, tf_random_seed=5, experimental_config=experimental_config)
    estimator = NPUEstimator(model_fn=model_fn, config=config)  # noqa: F405
    if FLAGS.final_loss is None:
        hook = TellMeStepOrLossHook(step="global_step:0", total_step=FLAGS.train_steps)
    else:
        hook = TellMeStepOrLossHook(loss="loss:0", final_loss=FLAGS.final_loss)
    estimator.train(input_fn=input_fn, hooks=[hook, Kernels()], max_steps=FLAGS.train_steps)
    result = estimator.evaluate(input_fn=input_fn, steps=1, hooks=[Kernels()])
    told = {name: os.environ.get(name) for name in ("STEP_NOW", "TOTAL_STEP", "LOSS_NOW", "TARGET_LOSS")}
    print(json.dumps({"kernels": Kernels.seen, "losses": Kernels.losses, "loss": float(result["loss"]), **told}))


if __name__ == "__main__":
    tf.app.run()  # noqa: F405
