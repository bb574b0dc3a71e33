"""A training of one face, model and seed that does harm to itself at certain steps; `elastic_matrix.py` starts it.

    npu-run --tf2 elastic_training.py FACE MODEL SEED FOLDER STEPS [RANK:STEP:SIGNAL ...]

Each rank notes for each of its batches the rows that the model got and the loss. Rank 0 leaves the weights of the end.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT / "examples" / example) for example in ("digits", "bert_pretrain")]

import npu_bridge.npu_init  # noqa: E402, F401 - before TensorFlow

# isort: split
import tensorflow as tf2  # noqa: E402
from digits import load  # noqa: E402
from lamb import LAMBOptimizer, WarmupThenLinearDecay  # noqa: E402
from model import ModelSize, masked_language_model  # noqa: E402
from network import logits_of  # noqa: E402

from npu_bridge.npu_init import (  # noqa: E402
    ExponentialUpdateLossScaleManager,
    NPUBroadcastGlobalVariablesHook,
    NPUEstimator,
    NPUOptimizer,
    NPURunConfig,
    get_rank_id,
    get_rank_size,
    hccl_ops,
    npu_callbacks_append,
    npu_keras_optimizer,
    tf,
)
from npu_bridge.session import (  # noqa: E402
    GlobalBatches,
    ResumableLoop,
    ResumeCallback,
    StopHook,
    run_with_hooks,
    updates_dealt,
)
from npu_bridge.stages import ClipByGlobalNorm  # noqa: E402

BATCH, MICRO = 48, 8
SAVE_STEPS = 25
SCALE = 128.0  # of the loss: the loss scale then meets its limit now and then, and steps are skipped
LENGTH = 32
FACE, MODEL, SEED, FOLDER, STEPS, *FAULTS = sys.argv[1:]
SEED, STEPS = int(SEED), int(STEPS)


class Notes:
    """Writes what a batch was made of, and suffers what the command line says."""

    def __init__(self, updates: int, runs: int):
        self._updates, self._runs, self._count = updates, runs, 0
        self._has_offered = False
        self._path = pathlib.Path(f"{FOLDER}.notes.{os.getpid()}")

    def note(self, rows, loss, step):
        """Notes, after a batch, the numbers of its rows, the loss, and the updates so far; then causes a due fault."""
        update, own = divmod(self._count, self._runs)
        micro = own * get_rank_size() + get_rank_id()
        self._count += 1
        if micro < BATCH // MICRO:  # others repeat one
            row = [self._updates + update, micro, float(loss), *map(int, rows)]
            with self._path.open("a") as file:
                file.write(f"{json.dumps(row)}\n")
        for fault in FAULTS:
            rank, when, number = map(int, fault.split(":"))
            if rank == get_rank_id() and step == when and not os.path.exists(f"{FOLDER}.{fault}"):
                pathlib.Path(f"{FOLDER}.{fault}").touch()
                self.suffer(number)
        if self._has_offered:
            time.sleep(0.1)  # a busy machine takes a while until the launcher has heard

    def suffer(self, number):
        """Sends a signal that ends this process or the job; for 0, offers more slots."""
        if number == 0:
            pathlib.Path("slots").write_text("localhost:6")
            self._has_offered = True
        else:
            os.kill(os.getppid() if number == signal.SIGTERM else os.getpid(), number)


# The trained models, for TensorFlow 1 and for Keras.


class Digits:
    """The pictures and the network of examples/digits, with Adam."""

    def __init__(self):
        (pictures, digits), _ = load()
        self.arrays = {"pictures": pictures, "targets": digits, "rows": np.arange(len(digits))}

    def loss(self, features):
        return tf.losses.sparse_softmax_cross_entropy(features["targets"], logits_of(features["pictures"]))

    def optimizer(self):
        return tf.train.AdamOptimizer(2e-3)

    def keras_arrays(self):
        targets = np.stack([self.arrays["targets"], self.arrays["rows"]], axis=1).astype(np.float32)
        return self.arrays["pictures"], targets

    def keras_model(self, keras):
        layers = keras.layers
        return keras.Sequential(
            [
                layers.Input([8, 8, 1]),
                layers.Conv2D(16, 3, 2, padding="same", activation="relu"),
                layers.Conv2D(32, 3, 2, padding="same", activation="relu"),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
            ]
        )

    def keras_loss(self, targets, logits):
        digits = tf.cast(targets[:, 0], tf.int32)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=digits, logits=logits))

    def keras_optimizer(self, keras):
        return keras.optimizers.Adam(2e-3), []


class Bert:
    """The model of examples/bert_pretrain in a small size, on one page of the docs, with LAMB; a row has one mask."""

    def __init__(self):
        from corpus import make_rows, read_documents
        from masking import mask_row
        from vocabulary import load_or_build

        documents = read_documents([str(ROOT / "docs" / "stages.md")])
        vocabulary = load_or_build(f"{FOLDER}.vocabulary", documents, 512, True, write=False)
        rows = make_rows(documents, vocabulary, LENGTH)
        masked = [
            mask_row(tokens, len(vocabulary), np.random.default_rng([SEED, row]))
            for row, tokens in enumerate(rows.token_ids)
        ]
        names = {"token_ids": "token_ids", "target_positions": "positions", "target_ids": "labels"}
        names["target_weights"] = "weights"
        self.arrays = {name: np.stack([getattr(row, field) for row in masked]) for name, field in names.items()}
        self.arrays.update(segment_ids=rows.segment_ids, rows=np.arange(len(masked)))
        self.size = ModelSize(len(vocabulary), 64, 2, 2, 128, LENGTH)
        self.schedule = WarmupThenLinearDecay(0.02, STEPS // 10, STEPS)

    def loss(self, features):
        return masked_language_model(features, self.size, training=True).loss

    def optimizer(self):
        excluded = ["LayerNorm", "layer_norm", "bias"]
        rate = self.schedule(tf.train.get_or_create_global_step())
        return LAMBOptimizer(rate, weight_decay_rate=0.01, exclude_from_weight_decay=excluded)

    def keras_arrays(self):
        names = ("token_ids", "segment_ids", "target_positions")
        targets = [self.arrays["target_ids"], self.arrays["target_weights"], self.arrays["rows"][:, np.newaxis]]
        return {name: self.arrays[name] for name in names}, np.concatenate(targets, axis=1).astype(np.float32)

    def keras_model(self, keras):
        layers, size, slots = keras.layers, self.size, self.arrays["target_ids"].shape[1]
        tokens = layers.Input([LENGTH], dtype="int32", name="token_ids")
        segments = layers.Input([LENGTH], dtype="int32", name="segment_ids")
        positions = layers.Input([slots], dtype="int32", name="target_positions")
        hidden = layers.Embedding(size.vocab_size, size.hidden_size)(tokens)
        hidden = layers.add([hidden, layers.Embedding(2, size.hidden_size)(segments)])
        hidden = layers.LayerNormalization()(hidden)
        for _ in range(size.num_layers):
            attended = layers.MultiHeadAttention(size.num_heads, size.hidden_size // size.num_heads)(hidden, hidden)
            hidden = layers.LayerNormalization()(layers.add([hidden, attended]))
            inner = layers.Dense(size.ffn_size, activation="gelu")(hidden)
            inner = layers.Dense(size.hidden_size)(inner)
            hidden = layers.LayerNormalization()(layers.add([hidden, inner]))
        chosen = layers.Lambda(
            lambda pair: tf.gather(pair[0], pair[1], batch_dims=1), output_shape=(slots, size.hidden_size)
        )([hidden, positions])
        return keras.Model([tokens, segments, positions], layers.Dense(size.vocab_size)(chosen))

    def keras_loss(self, targets, logits):
        slots = logits.shape[1]
        labels, weights = tf.cast(targets[:, :slots], tf.int32), targets[:, slots : 2 * slots]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        return tf.reduce_sum(losses * weights) / tf.maximum(tf.reduce_sum(weights), 1.0)

    def keras_optimizer(self, keras):
        if keras is tf2.keras:
            from npu_bridge.optimizers.keras import LAMB

            part = 4
        else:
            from npu_bridge.optimizers.keras3 import LAMB

            part = 8

        class Rate(keras.optimizers.schedules.LearningRateSchedule):
            """A part of that of TensorFlow 1: at the whole one, rounding errors double every dozen updates here.

            In Keras 3 they do so at a quarter, too, in one of three seeds: undisturbed ranks were 2e-5 apart.
            """

            def __call__(_, step):
                return self.schedule(step) / part

            def get_config(_):
                return {}

        lamb = LAMB(Rate(), weight_decay=0.01, exclude_from_weight_decay=["normalization", "bias"])
        return lamb, [ClipByGlobalNorm(1.0)]


MODELS = {"digits": Digits, "bert": Bert}
WHAT = MODELS[MODEL]()
BATCHES = GlobalBatches(rows=len(WHAT.arrays["rows"]), batch=BATCH, micro=MICRO, seed=SEED)


def manager():
    """Makes a loss scale that begins so high that the first steps overflow, and some later ones."""
    return ExponentialUpdateLossScaleManager(2.0**127, 20, 1, 2.0, 0.5)


# TensorFlow 1.


class NotesHook(tf.train.SessionRunHook):
    def __init__(self, rows, loss):
        self._watched = [rows, loss]
        self._notes = Notes(updates_dealt(FOLDER), BATCHES.batches_per_update)

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(self._watched)

    def after_run(self, run_context, run_values):
        self._notes.note(*run_values.results, int(run_context.session.run(tf.train.get_global_step())))


def make_train_op(features):
    """The loss, and the op of a step, gradients being clipped between as in examples/bert_pretrain."""
    loss, step = SCALE * WHAT.loss(features), tf.train.get_or_create_global_step()
    options = {"is_loss_scale": True, "is_distributed": True, "stages": BATCHES.stages()}
    optimizer = NPUOptimizer(WHAT.optimizer(), manager(), **options)
    grads, variables = zip(*optimizer.compute_gradients(loss, tf.trainable_variables()))
    clipped, _ = tf.clip_by_global_norm(grads, 1.0)
    np.savez(f"{FOLDER}.names.npz", [variable.op.name for variable in variables])
    return loss, optimizer.apply_gradients(list(zip(clipped, variables)), step)


def features_and_op():
    tf.disable_eager_execution()
    tf.set_random_seed(SEED)
    features = tf.data.make_one_shot_iterator(BATCHES.dataset(WHAT.arrays, FOLDER)).get_next()
    return (features["rows"], *make_train_op(features))


def train_estimator():
    def model_fn(features, labels, mode):
        loss, op = make_train_op(features)
        hooks = [NotesHook(features["rows"], loss)]
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=op, training_hooks=hooks)

    config = NPURunConfig(model_dir=FOLDER, save_checkpoints_steps=SAVE_STEPS, tf_random_seed=SEED)
    NPUEstimator(model_fn, config=config).train(lambda: BATCHES.dataset(WHAT.arrays, FOLDER), max_steps=STEPS)
    tell_weights_of_checkpoint()


class SaveWithinUpdates(tf.train.SessionRunHook):
    """Saves in the middle of an update, too, which is of two or three runs here."""

    _runs = 0

    def after_run(self, run_context, run_values):
        self._runs += 1
        if self._runs % SAVE_STEPS == 0 and get_rank_id() == 0:
            saver = tf.get_collection(tf.GraphKeys.SAVERS)[0]
            saver.save(run_context.session, f"{FOLDER}/model.ckpt", tf.train.get_global_step())


def train_monitored():
    rows, loss, op = features_and_op()
    hooks = [NPUBroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=STEPS)]
    hooks += [NotesHook(rows, loss), StopHook(), SaveWithinUpdates()]
    where = {"checkpoint_dir": FOLDER, "save_checkpoint_steps": 10**6} if get_rank_id() == 0 else {}
    with tf.train.MonitoredTrainingSession(hooks=hooks, **where) as session:
        while not session.should_stop():
            session.run(op)
    tell_weights_of_checkpoint()


def train_session():
    rows, loss, op = features_and_op()
    notes = Notes(updates_dealt(FOLDER), BATCHES.batches_per_update)
    step, variables, saver, stop = tf.train.get_global_step(), tf.global_variables(), tf.train.Saver(), StopHook()
    from_rank_0 = tf.group(*map(tf.assign, variables, hccl_ops.broadcast(variables, 0)))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        if get_rank_id() == 0 and tf.train.latest_checkpoint(FOLDER):
            saver.restore(session, tf.train.latest_checkpoint(FOLDER))
        session.run(from_rank_0)
        run_with_hooks(session, [stop])
        stop.begin()
        reached = saved = session.run(step)
        while reached < STEPS and not stop.was_stopped:
            _, *seen = session.run([op, rows, loss])
            reached = session.run(step)
            notes.note(*seen, reached)
            if get_rank_id() == 0 and (reached >= saved + SAVE_STEPS or reached == STEPS or stop.was_stopped):
                saver.save(session, f"{FOLDER}/model.ckpt", reached)
                saved = reached
    tell_weights_of_checkpoint()


def tell_weights_of_checkpoint():
    if get_rank_id() == 0:
        reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(FOLDER))
        with np.load(f"{FOLDER}.names.npz") as names:
            np.savez(f"{FOLDER}.npz", **{name: reader.get_tensor(name) for name in names["arr_0"]})


# Keras, and a self-written loop.


class KerasTraining:
    """A model, its optimizer, and a loss that remembers what it was of."""

    def __init__(self, keras):
        self.keras = keras
        keras.utils.set_random_seed(SEED)
        self.model = WHAT.keras_model(keras)
        optimizer, stages = WHAT.keras_optimizer(keras)
        self.optimizer = npu_keras_optimizer(optimizer, manager(), stages=[*BATCHES.stages(), *stages])
        self.rows, self.latest = tf2.Variable([0] * MICRO, trainable=False), tf2.Variable(0.0, trainable=False)

    def loss(self, targets, outputs):
        self.rows.assign(tf.cast(targets[:, -1], tf.int32))
        loss = SCALE * WHAT.keras_loss(targets, outputs)
        self.latest.assign(loss)
        return loss

    def note(self, notes):
        notes.note(self.rows.numpy(), self.latest, int(self.optimizer.iterations))

    def tell_weights(self):
        if get_rank_id() == 0:
            names = [getattr(variable, "path", variable.name) for variable in self.model.weights]
            values = map(np.asarray, self.model.get_weights())
            np.savez(f"{FOLDER}.npz", **dict(zip(names, values)))


def train_keras(keras):
    training = KerasTraining(keras)
    model = training.model
    model.compile(training.optimizer, loss=training.loss, jit_compile=False)
    resume = ResumeCallback(f"{FOLDER}/model.keras", every_n_steps=SAVE_STEPS)
    resume.restore(model)
    done = updates_dealt(model)
    notes = Notes(done, BATCHES.batches_per_update)

    class Noting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            training.note(notes)
            if int(training.optimizer.iterations) >= STEPS:  # skipped steps take batches, too
                self.model.stop_training = True

    data = BATCHES.dataset(WHAT.keras_arrays(), model)
    callbacks = npu_callbacks_append([Noting(), resume])
    model.fit(data, steps_per_epoch=10**6, callbacks=callbacks, verbose=0)
    training.tell_weights()


def train_loop(keras):
    training = KerasTraining(keras)
    model, optimizer = training.model, training.optimizer

    @tf2.function
    def train_step(inputs, targets):
        with tf2.GradientTape() as tape:
            loss = training.loss(targets, model(inputs, training=True))
            differentiated = loss if keras is tf2.keras else optimizer.scale_loss(loss)
        if keras is tf2.keras:
            optimizer.minimize(loss, model.trainable_variables, tape)
        else:
            optimizer.apply(tape.gradient(differentiated, model.trainable_variables), model.trainable_variables)

    loop = ResumableLoop(FOLDER, model, optimizer, every_n_steps=SAVE_STEPS)
    data = iter(BATCHES.dataset(WHAT.keras_arrays(), FOLDER))
    notes = Notes(updates_dealt(FOLDER), BATCHES.batches_per_update)
    for _ in loop.until(STEPS):
        train_step(*next(data))
        training.note(notes)
    training.tell_weights()


def keras3():
    import keras

    return keras


FACES = {
    "estimator": train_estimator,
    "session": train_session,
    "monitored": train_monitored,
    "keras": lambda: train_keras(tf2.keras),
    "loop": lambda: train_loop(tf2.keras),
    "keras3": lambda: train_keras(keras3()),
    "loop3": lambda: train_loop(keras3()),
}

if __name__ == "__main__":
    FACES[FACE]()
