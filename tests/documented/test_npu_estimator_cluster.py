"""`NPUEstimator` in a cluster of TensorFlow: a parameter server, a chief and a worker that share a model folder."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

from tests.npu_run.launching import kept_addresses

REPOSITORY = pathlib.Path(__file__).parents[2]
SCRIPT = """
import json, os, time
from npu_bridge.npu_init import *

tf.disable_eager_execution()
tf.logging.set_verbosity("INFO")

def input_fn():
    return tf.data.Dataset.from_tensors((tf.ones([2, 4]), tf.ones([2]))).repeat()

def model_fn(features, labels, mode):
    loss = tf.losses.mean_squared_error(labels, tf.squeeze(tf.layers.dense(features, 1), 1))
    train_op = tf.train.GradientDescentOptimizer(0.05).minimize(loss, tf.train.get_global_step())
    return NPUEstimatorSpec(mode, loss=loss, train_op=train_op)

class Together(tf.train.SessionRunHook):
    # Neither trains alone, however much later the other one starts: one that found the last step saved would not train.
    def after_run(self, run_context, run_values):
        kind = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
        open(f"{kind}.trains", "w").close()
        while not (os.path.exists("chief.trains") and os.path.exists("worker.trains")):
            time.sleep(0.01)

strategy = tf.distribute.experimental.ParameterServerStrategy()
config = NPURunConfig(model_dir="model", distribute=strategy, mix_compile_mode=True, save_checkpoints_steps=20)
tf.estimator.train_and_evaluate(
    NPUEstimator(model_fn, config=config),
    tf.estimator.TrainSpec(input_fn, max_steps=60, hooks=[Together()]),
    tf.estimator.EvalSpec(input_fn, steps=1),
)
"""


def start(folder, cluster, kind):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environment["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})
    with open(folder / f"{kind}.txt", "w") as log:
        return subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=folder, env=environment, stdout=log, stderr=log)


@pytest.mark.slow("three processes of a cluster of TensorFlow")
def test_the_chief_alone_saves(tmp_path):
    kinds = ("ps", "worker", "chief")
    with kept_addresses(3) as addresses:
        cluster = {kind: [address] for kind, address in zip(kinds, addresses)}
        processes = {kind: start(tmp_path, cluster, kind) for kind in kinds}
        try:
            ended = {kind: processes[kind].wait(timeout=600) for kind in ("chief", "worker")}
        finally:
            for process in processes.values():
                process.kill()  # a parameter server waits for ever
                process.wait()
    said = {kind: (tmp_path / f"{kind}.txt").read_text() for kind in kinds}
    assert ended == {"chief": 0, "worker": 0}, said["chief"][-3000:] + said["worker"][-3000:]
    # The worker may have trained a step before the chief saves for the first time.
    assert "Saving checkpoints for" in said["chief"] and "Saving checkpoints" not in said["worker"]
    assert all("Loss for final step" in said[kind] for kind in ended)
    assert tf.train.load_variable(str(tmp_path / "model"), "global_step") >= 60
