"""Keras scripts as the migration guides write them, one function each; facts about every training go to a file."""

# ruff: noqa: F401, F403, F405, I001 (imports are as they are in such scripts)
from npu_bridge.npu_init import *
from npu_bridge.estimator.npu import npu_convert_dropout
from npu_bridge.estimator.npu.keras_to_npu import model_to_npu_estimator
from npu_bridge.estimator.npu.npu_callbacks import NPUBroadcastGlobalVariablesCallback
from hccl.manage.api import get_rank_id
from hccl.manage.api import get_rank_size

import json
import sys

import numpy as np

OUT = sys.argv[1]
STEPS = 8
facts = {}


def make_dataset():
    features = np.random.RandomState(0).randn(128, 4).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((features, features.sum(axis=1, keepdims=True)))
    return dataset.shard(get_rank_size(), get_rank_id()).repeat().batch(8, drop_remainder=True)


def make_model():
    """Weights that differ on every rank until they are sent."""
    np.random.seed(get_rank_id())
    tf.set_random_seed(get_rank_id())
    return tf.keras.Sequential([tf.keras.layers.Input([4]), tf.keras.layers.Dense(1)])


def fit(name, model, callbacks):
    history = model.fit(make_dataset(), steps_per_epoch=STEPS, epochs=3, callbacks=callbacks, verbose=0).history
    weights = np.concatenate([array.ravel() for array in model.get_weights()])
    facts[name] = {"losses": [float(loss) for loss in history["loss"]], "weights": weights.tolist()}


def keras_optimizer():
    """A session with the settings, `npu_keras_optimizer`, and the callback that sends rank 0's variables."""
    config = tf.ConfigProto()
    custom_op = config.graph_options.rewrite_options.custom_optimizers.add()
    custom_op.name = "NpuOptimizer"
    custom_op.parameter_map["precision_mode"].s = tf.compat.as_bytes("must_keep_origin_dtype")
    npu_keras_sess = set_keras_session_npu_config(config=config)
    model = make_model()
    optimizer = npu_keras_optimizer(tf.keras.optimizers.legacy.SGD(learning_rate=0.5))
    model.compile(loss="mse", optimizer=optimizer)
    schedule = tf.keras.callbacks.LearningRateScheduler(lambda epoch: 0.05)  # reaches the optimizer inside
    fit("keras_optimizer", model, [schedule, NPUBroadcastGlobalVariablesCallback(0)])
    if get_rank_id() == 0:
        model.save_weights(os.path.join(OUT, "keras_optimizer.h5"))
    close_session(npu_keras_sess)


def wrapped_by_name():
    """An optimizer that has only a name; the callback comes from the porting tool."""
    npu_keras_sess = set_keras_session_npu_config()
    model = make_model()
    model.compile(loss="mse", optimizer=npu_distributed_optimizer_wrapper("adam"))
    model.optimizer.learning_rate = 0.05
    fit("wrapped_by_name", model, npu_callbacks_append(callbacks_list=[]))
    close_session(npu_keras_sess)


def loss_scale():
    """With a loss-scale manager; one batch of one rank overflows, and no rank takes that step."""
    npu_clear_session()
    manager = ExponentialUpdateLossScaleManager(
        init_loss_scale=2**10, incr_every_n_steps=1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5
    )
    model = make_model()
    model.compile(loss="mse", optimizer=npu_keras_optimizer(tf.keras.optimizers.legacy.SGD(0.05), manager))
    fit("loss_scale", model, [NPUBroadcastGlobalVariablesCallback(0)])
    before, steps = model.get_weights(), model.optimizer.iterations
    huge = np.full([8, 4], 1e20 if get_rank_id() == get_rank_size() - 1 else 1, np.float32)
    model.train_on_batch(huge, np.ones([8, 1], np.float32))
    facts["loss_scale"]["is_skipped"] = all(np.array_equal(*pair) for pair in zip(before, model.get_weights()))
    scale, steps = backend.get_value(model.optimizer.loss_scale), backend.get_value(steps)
    facts["loss_scale"].update(scale=float(scale), step=int(steps))


def as_estimator():
    """A Keras model with dropout as an NPUEstimator, which trains five steps in a run."""
    npu_clear_session()
    np.random.seed(get_rank_id())
    tf.set_random_seed(get_rank_id())
    layers = [tf.keras.layers.Input([4]), tf.keras.layers.Dense(16), tf.keras.layers.Dropout(0.1)]
    model = tf.keras.Sequential([*layers, tf.keras.layers.Dense(1)])
    model.compile(loss="mse", optimizer=npu_keras_optimizer(tf.keras.optimizers.legacy.SGD(0.02)))
    steps = 20 if get_rank_id() == 0 else 0
    run_config = NPURunConfig(
        model_dir=os.path.join(OUT, "as_estimator"),
        save_checkpoints_steps=steps,
        iterations_per_loop=5,
        tf_random_seed=1,
    )
    estimator = model_to_npu_estimator(keras_model=model, config=run_config)
    estimator.train(input_fn=make_dataset, max_steps=5)
    losses = [float(estimator.evaluate(input_fn=make_dataset, steps=8)["loss"])] if get_rank_id() == 0 else []
    estimator.train(input_fn=make_dataset, max_steps=60)
    if get_rank_id() == 0:
        losses.append(float(estimator.evaluate(input_fn=make_dataset, steps=8)["loss"]))
    facts["as_estimator"] = {"losses": losses}


def main():
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    (npu_sess, npu_shutdown) = init_resource()
    for pattern in (keras_optimizer, wrapped_by_name, loss_scale, as_estimator):
        pattern()
    shutdown_resource(npu_sess, npu_shutdown)
    close_session(npu_sess)
    with open(os.path.join(OUT, f"rank_{get_rank_id()}.json"), "w") as file:
        json.dump(facts, file)


if __name__ == "__main__":
    main()
