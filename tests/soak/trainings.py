"""Trainings of three faces that write down which rows each of their runs computes; faults come from outside.

Arguments: the folder of checkpoints, that of everything else, and how many steps to make. In the latter, `diary` has a
file for each rank of each start, and with the file `hurry` there the training does not pause between steps.
"""

from __future__ import annotations

ROWS, BATCH, MICRO = 600, 48, 8

BEGINNING = (
    f"""
import hashlib, os, sys, time
import numpy as np
import tensorflow as tf
from npu_bridge.npu_init import ExponentialUpdateLossScaleManager, get_rank_id, get_rank_size
from npu_bridge.session import GlobalBatches, ResumeCallback, StopHook, updates_dealt

folder, out, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
random = np.random.RandomState(0)
x = random.randn({ROWS}, 12).astype("f")
y = np.sin(x).sum(1, keepdims=True)
numbers = np.arange({ROWS})
batches = GlobalBatches(rows={ROWS}, batch={BATCH}, micro={MICRO}, seed=1)
"""
    """

def manager():
    return ExponentialUpdateLossScaleManager(2.0**127, 20, 1, 2.0, 0.5)  # the first steps overflow


class Diary:
    \"\"\"A line for each run that was made: its update, which run of it, when, and the rows.\"\"\"

    def __init__(self):
        start = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or str(os.getpid())  # it holds the secret of the start
        start = hashlib.sha256(start.encode()).hexdigest()[:8]
        self.name = f"{time.monotonic_ns()}.{start}.{get_rank_id()}.{get_rank_size()}.{os.getpid()}"
        self.file, self.runs, self.first = None, 0, 0

    def begin(self, after):
        self.first = updates_dealt(after)
        self.file = os.open(f"{out}/diary/{self.name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)

    def note(self, rows):
        parts = batches.batches_per_update
        number, part = self.runs // parts + self.first, self.runs % parts
        self.runs += 1
        rows = ",".join(map(str, rows))
        os.write(self.file, f"{number} {part} {time.monotonic_ns()} {rows}\\n".encode())
        if not os.path.exists(out + "/hurry"):
            time.sleep(0.04 / parts * steps / max(1, steps - number))  # slower and slower, for faults to find it


diary = Diary()
"""
)

OF_TENSORFLOW_1 = """
from npu_bridge.npu_init import *


class DiaryHook(tf.train.SessionRunHook):
    def __init__(self, rows):
        self.rows = rows

    def before_run(self, context):
        return tf.train.SessionRunArgs(self.rows)

    def after_run(self, context, values):
        diary.note(values.results)


def train_op(features, labels):
    init = tf.glorot_uniform_initializer(seed=1)
    hidden = tf.layers.dense(features, 16, tf.nn.tanh, kernel_initializer=init)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(hidden, 1, kernel_initializer=init))
    # A sum over all updates, which forgets none of them.
    tally = tf.get_variable("tally", [12, 1], initializer=tf.zeros_initializer())
    loss += tf.reduce_mean(tf.matmul(features, tally))
    optimizer = NPUOptimizer(
        tf.train.AdamOptimizer(0.003), manager(), is_loss_scale=True, is_distributed=True, stages=batches.stages()
    )
    return loss, optimizer.minimize(loss, tf.train.get_or_create_global_step())


def tell_weights():
    if get_rank_id() == 0:
        reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(folder))
        names = [name for name in reader.get_variable_to_shape_map() if name.startswith(("dense", "tally"))]
        names = [name for name in names if "accum" not in name]
        np.savez(out + "/weights.npz", **{name: reader.get_tensor(name) for name in names})
"""

FACES = {
    "estimator": BEGINNING
    + OF_TENSORFLOW_1
    + """
def model_fn(features, labels, mode):
    loss, op = train_op(features["x"], labels)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=op, training_hooks=[DiaryHook(features["row"])])


def input_fn():
    diary.begin(folder)
    return batches.dataset(({"x": x, "row": numbers}, y), folder)


config = NPURunConfig(model_dir=folder, save_checkpoints_steps=25)
NPUEstimator(model_fn, config=config).train(input_fn, max_steps=steps)
tell_weights()
""",
    "session": BEGINNING
    + OF_TENSORFLOW_1
    + """
dataset = batches.dataset((x, y, numbers), folder)
features, labels, rows = tf.data.make_one_shot_iterator(dataset).get_next()
diary.begin(folder)
loss, op = train_op(features, labels)
hooks = [NPUBroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=steps), DiaryHook(rows), StopHook()]
hooks += [NPUCheckpointSaverHook(folder, save_steps=25)] if get_rank_id() == 0 else []
where = {"checkpoint_dir": folder, "save_checkpoint_secs": None} if get_rank_id() == 0 else {}
with tf.train.MonitoredTrainingSession(hooks=hooks, log_step_count_steps=None, **where) as session:
    while not session.should_stop():
        session.run(op)
tell_weights()
""",
    "keras": BEGINNING
    + """
from npu_bridge.npu_init import npu_callbacks_append, npu_keras_optimizer

tf.keras.utils.set_random_seed(1)
seen = tf.Variable(np.zeros([8], np.int64))  # no attribute of the model, which would save it


class Model(tf.keras.Model):
    def train_step(self, data):
        (features, rows), labels = data
        seen.assign(rows)
        return super().train_step((features, labels))


inputs = tf.keras.layers.Input([12])
hidden = tf.keras.layers.Dense(16, "tanh")(inputs)
tally = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
model = Model(inputs, [tf.keras.layers.Dense(1)(hidden), tally(inputs)])
optimizer = npu_keras_optimizer(tf.keras.optimizers.Adam(0.003), manager(), stages=batches.stages())


@tf.keras.utils.register_keras_serializable()
def sum_of(labels, output):
    return output


model.compile(optimizer, loss=["mse", sum_of])
resume = ResumeCallback(folder + "/model.keras", every_n_steps=25 * batches.batches_per_update)
resume.restore(model)
runs = (steps - updates_dealt(model)) * batches.batches_per_update


class DiaryCallback(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        diary.note(seen.numpy())


diary.begin(model)
callbacks = npu_callbacks_append([DiaryCallback(), resume])
data = batches.dataset(((x, numbers), (y, y)), model)
model.fit(data, steps_per_epoch=runs, callbacks=callbacks, verbose=0)
if get_rank_id() == 0:
    np.savez(out + "/weights.npz", *model.get_weights())
""",
}
