"""A model small enough to look at every number, trained in each way there is."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import tensorflow as tf

from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.options import with_optimizer_entry

tf1 = tf.compat.v1
FEATURES = np.random.RandomState(3).randn(12, 4).astype(np.float32)
LABELS = FEATURES.sum(axis=1, keepdims=True)


def build(features, labels):
    """Loss and train op of two layers with dropout, a condition and a loop; resource and reference variables."""
    hidden_kernel = tf1.get_variable("hidden", [4, 5], initializer=tf1.random_normal_initializer(seed=1))
    kernel = tf1.get_variable("kernel", [5, 1], initializer=tf1.random_normal_initializer(seed=2), use_resource=False)
    hidden = tf.nn.relu(tf.matmul(features, hidden_kernel, name="project"), name="activate")
    hidden = tf1.nn.dropout(hidden, rate=0.2, seed=4)
    looped = tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 0.9), (0, hidden))[1]
    chosen = tf.cond(tf.reduce_sum(looped) > 0.0, lambda: looped * 2.0, lambda: looped)
    loss = tf.reduce_mean(tf.square(tf.matmul(chosen, kernel) - labels), name="mean_loss")
    step = tf1.train.get_or_create_global_step()
    return loss, tf1.train.AdamOptimizer(0.1).minimize(loss, step, name="update")


def dataset():
    return tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).repeat().batch(4)


def model_fn(features, labels, mode):
    loss, train_op = build(features, 0.0 if labels is None else labels)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, predictions=loss)


def train_in_session(config=None, steps=5, make=build):
    """All variables after some steps of `session.run`."""
    with tf.Graph().as_default():
        tf1.set_random_seed(7)
        features, labels = tf1.data.make_one_shot_iterator(dataset()).get_next()
        loss, train_op = make(features, labels)
        variables = tf1.global_variables()
        with tf1.Session(config=config) as session:
            session.run(tf1.global_variables_initializer())
            for _ in range(steps):
                session.run([train_op, loss])
            return session.run({variable.name: variable for variable in variables})


def train_npu_estimator(folder, steps=5, **options):
    """All variables after some steps of an NPUEstimator."""
    estimator = NPUEstimator(model_fn, config=NPURunConfig(model_dir=str(folder), tf_random_seed=7, **options))
    estimator.train(dataset, steps=steps)
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


def session_config(**values):
    """Session settings with an entry that holds these session keys."""
    return with_optimizer_entry(None, values)


def step_folders(root, graph_name):
    """The step folders of the only graph of that name, by step."""
    (graph,) = pathlib.Path(root).glob(f"*/0/{graph_name}/*")
    return {int(folder.name): folder for folder in graph.iterdir() if folder.is_dir()}


def index_of(folder):
    """(operator, side, slot) -> array, for a step folder."""
    listed = json.loads((folder / "index.json").read_text())["tensors"]
    return {(row["op"], row["side"], row["slot"]): np.load(folder / row["file"]) for row in listed}
