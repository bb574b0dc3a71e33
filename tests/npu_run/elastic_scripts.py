"""Trainings of four kinds, the same with any number of ranks, that do harm to themselves at certain steps."""

from __future__ import annotations

import numpy as np

from tests.npu_run.launching import npu_run, write_script

# The beginning of every script; faults are rank:step:signal, each once, and signal 0 offers more slots.
BEGINNING = """
import os, signal, sys, time
import numpy as np
import tensorflow as tf
from npu_bridge.npu_init import ExponentialUpdateLossScaleManager, get_rank_id
from npu_bridge.session import GlobalBatches, ResumableLoop, ResumeCallback, StopHook, updates_dealt

folder, steps, faults = sys.argv[1], 120, sys.argv[2:]
random = np.random.RandomState(0)
x = random.randn(600, 12).astype("f")
y = np.sin(x).sum(1, keepdims=True)
batches = GlobalBatches(rows=600, batch=48, micro=8, seed=1)  # 6 micro-batches
was_sent = []


def manager():
    return ExponentialUpdateLossScaleManager(2.0**127, 20, 1, 2.0, 0.5)  # the first steps overflow


def suffer(step):
    if was_sent:
        time.sleep(0.1)  # a busy machine takes a while until the launcher has heard
    for fault in faults:
        rank, when, number = map(int, fault.split(":"))
        if rank == get_rank_id() and step == when and not os.path.exists(f"{folder}.{fault}"):
            open(f"{folder}.{fault}", "w").close()
            print("suffers", fault, flush=True)
            was_sent.append(number)
            if number:
                os.kill(os.getppid() if number == 15 else os.getpid(), abs(number))
            else:
                with open("slots", "w") as file:
                    file.write("localhost:6")
"""
OF_TENSORFLOW_1 = """
from npu_bridge.npu_init import *


class Faults(tf.train.SessionRunHook):
    def after_run(self, context, values):
        suffer(int(context.session.run(tf.train.get_global_step())))


def train_op(features, labels):
    init = tf.glorot_uniform_initializer(seed=1)
    hidden = tf.layers.dense(features, 16, tf.nn.tanh, kernel_initializer=init)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(hidden, 1, kernel_initializer=init))
    optimizer = NPUOptimizer(
        tf.train.AdamOptimizer(0.01), manager(), is_loss_scale=True, is_distributed=True, stages=batches.stages()
    )
    return loss, optimizer.minimize(loss, tf.train.get_or_create_global_step())


def tell_weights():
    if get_rank_id() == 0:
        reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(folder))
        names = [name for name in reader.get_variable_to_shape_map() if "dense" in name and "accum" not in name]
        np.savez(folder + ".npz", **{name: reader.get_tensor(name) for name in names})
"""
OF_KERAS = """
from npu_bridge.npu_init import npu_callbacks_append, npu_keras_optimizer

tf.keras.utils.set_random_seed(1)
layers = [tf.keras.layers.Input([12]), tf.keras.layers.Dense(16, "tanh"), tf.keras.layers.Dense(1)]
model = tf.keras.Sequential(layers)
optimizer = npu_keras_optimizer(tf.keras.optimizers.Adam(0.01), manager(), stages=batches.stages())
"""
# For `npu-run`, which looks for slots more often.
QUICK = "from npu_run.job import elastic\nelastic.STEADY_SECS, elastic._POLL_SECS = 0.0, 0.1\n"
SCRIPTS = {
    "estimator": BEGINNING
    + OF_TENSORFLOW_1
    + """
def model_fn(features, labels, mode):
    loss, op = train_op(features, labels)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=op)


config = NPURunConfig(model_dir=folder, save_checkpoints_steps=25)
NPUEstimator(model_fn, config=config).train(lambda: batches.dataset((x, y), folder), [Faults()], max_steps=steps)
tell_weights()
""",
    "session": BEGINNING
    + OF_TENSORFLOW_1
    + """
class SaveWithinUpdates(tf.train.SessionRunHook):
    runs = 0

    def after_run(self, context, values):
        self.runs += 1
        if self.runs % 25 == 0 and get_rank_id() == 0:  # of two or three in an update
            saver = tf.get_collection(tf.GraphKeys.SAVERS)[0]
            saver.save(context.session, folder + "/model.ckpt", tf.train.get_global_step())


loss, op = train_op(*tf.data.make_one_shot_iterator(batches.dataset((x, y), folder)).get_next())
hooks = [NPUBroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=steps)]
hooks += [Faults(), StopHook(), SaveWithinUpdates()]
where = {"checkpoint_dir": folder, "save_checkpoint_steps": 1000} if get_rank_id() == 0 else {}
with tf.train.MonitoredTrainingSession(hooks=hooks, **where) as session:
    while not session.should_stop():
        session.run(op)
tell_weights()
""",
    "keras": BEGINNING
    + OF_KERAS
    + """
model.compile(optimizer, loss="mse")
resume = ResumeCallback(folder + "/model.keras", every_n_steps=25)
resume.restore(model)
runs = (steps - updates_dealt(model)) * batches.batches_per_update


class Faults(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        suffer(int(model.optimizer.iterations))


callbacks = npu_callbacks_append([Faults(), resume])
model.fit(batches.dataset((x, y), model), steps_per_epoch=runs, callbacks=callbacks, verbose=0)
if get_rank_id() == 0:
    np.savez(folder + ".npz", *model.get_weights())
""",
    "loop": BEGINNING
    + OF_KERAS
    + """
@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    optimizer.minimize(loss, model.trainable_variables, tape)


loop = ResumableLoop(folder, model, optimizer, every_n_steps=25)
data = iter(batches.dataset((x, y), folder))
for _ in loop.until(steps):
    train_step(*next(data))
    suffer(int(optimizer.iterations))
if get_rank_id() == 0:
    np.savez(folder + ".npz", *model.get_weights())
""",
}


def train_undisturbed(place, face):
    """Trains on one rank; returns the weights."""
    write_script(place, SCRIPTS[face])
    code, output = npu_run("train.py", face, cwd=place)
    assert code == 0, output
    with np.load(place / f"{face}.npz") as weights:
        return dict(weights)


def assert_alike(path, expected):
    """Compares the weights that a training has left with those of another one, up to rounding."""
    with np.load(path) as found:
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert np.max(np.abs(found[name] - value)) <= 1e-5 * max(np.max(np.abs(value)), 1e-3), name
