"""Estimator scripts as the migration guides write them, one function each; facts about every training go to a file."""

# ruff: noqa: F403, F405, I001 (imports are as they are in such scripts)
from npu_bridge.npu_init import *
from npu_bridge.estimator import npu_ops
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer
from hccl.manage.api import get_rank_id
from hccl.manage.api import get_rank_size

import json
import sys

import numpy as np

OUT = sys.argv[1]
BATCH = 8
facts = {}


class Watch(tf.train.SessionRunHook):
    """Keeps the loss of every run, and the weights that a rank ends with."""

    def __init__(self, loss):
        self.loss = loss

    def begin(self):
        self.losses = []
        self.step = tf.train.get_global_step()
        self.weights = tf.concat([tf.reshape(v, [-1]) for v in tf.trainable_variables()], axis=0)

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(self.loss)

    def after_run(self, run_context, run_values):
        self.losses.append(float(run_values.results))

    def end(self, session):
        self.weights, self.step = session.run([self.weights, self.step])

    def facts(self):
        return {"losses": self.losses, "step": int(self.step), "weights": self.weights.tolist()}


def make_input_fn(has_overflow=False):
    def input_fn():
        features = np.random.RandomState(0).randn(64, 4).astype(np.float32)
        labels = features.sum(axis=1, keepdims=True)
        if has_overflow:
            features[41] = 1e20  # on two ranks only the second one sees it
        dataset = tf.data.Dataset.from_tensor_slices((features, labels))
        dataset = dataset.shard(get_rank_size(), get_rank_id())
        return dataset.repeat().batch(BATCH, drop_remainder=True)

    return input_fn


def only_rank_0(steps):
    return steps if get_rank_id() == 0 else 0


def npu_estimator():
    """An NPUEstimator whose optimizer is wrapped in model_fn; five steps in a run; evaluated and asked."""
    watches = []

    def model_fn(features, labels, mode, params):
        # Weights that differ on every rank until they are sent.
        tf.set_random_seed(get_rank_id())
        prediction = tf.layers.dense(features, 1)
        if mode == tf.estimator.ModeKeys.PREDICT:
            return NPUEstimatorSpec(mode, predictions={"sum": prediction})
        loss = tf.losses.mean_squared_error(labels, prediction)
        if mode == tf.estimator.ModeKeys.EVAL:
            metrics = {"error": tf.metrics.mean_absolute_error(labels, prediction)}
            return NPUEstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
        optimizer = npu_distributed_optimizer_wrapper(tf.train.MomentumOptimizer(params["rate"], 0.9))
        train_op = optimizer.minimize(loss, global_step=tf.train.get_global_step())
        watches.append(Watch(loss))
        return NPUEstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=watches)

    folder = os.path.join(OUT, "npu_estimator")
    config = NPURunConfig(model_dir=folder, save_checkpoints_steps=only_rank_0(20), iterations_per_loop=5)
    estimator = NPUEstimator(model_fn=model_fn, config=config, params={"rate": 0.02})
    estimator.train(input_fn=make_input_fn(), max_steps=60)
    facts["npu_estimator"] = watches[0].facts()
    if get_rank_id() == 0:
        facts["npu_estimator"]["error"] = float(estimator.evaluate(input_fn=make_input_fn(), steps=4)["error"])
        answers = estimator.predict(input_fn=make_input_fn())
        facts["npu_estimator"]["answers"] = len([next(answers) for _ in range(3)])


def loss_scale():
    """Loss scaling around the distributed optimizer; gradients clipped in between; one rank overflows."""
    watches = []

    class WatchScale(Watch):
        def after_run(self, run_context, run_values):
            super().after_run(run_context, run_values)
            facts.setdefault("scales", []).append(float(run_context.session.run("loss_scale:0")))

    def model_fn(features, labels, mode):
        tf.set_random_seed(get_rank_id())
        loss = tf.losses.mean_squared_error(labels, tf.layers.dense(features, 1))
        loss_scale_manager = ExponentialUpdateLossScaleManager(
            init_loss_scale=2**10, incr_every_n_steps=1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5
        )
        optimizer = NPUDistributedOptimizer(tf.train.AdamOptimizer(0.05))
        optimizer = NPULossScaleOptimizer(optimizer, loss_scale_manager, is_distributed=get_rank_size() > 1)
        grads, variables = zip(*optimizer.compute_gradients(loss))
        grads, _ = tf.clip_by_global_norm(grads, clip_norm=10.0)
        train_op = optimizer.apply_gradients(zip(grads, variables), global_step=tf.train.get_global_step())
        watches.append(WatchScale(loss))
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=watches)

    folder = os.path.join(OUT, "loss_scale")
    config = NPURunConfig(model_dir=folder, save_checkpoints_steps=only_rank_0(20))
    NPUEstimator(model_fn=model_fn, config=config).train(input_fn=make_input_fn(has_overflow=True), max_steps=40)
    facts["loss_scale"] = {**watches[0].facts(), "scales": facts.pop("scales")}


def stock_estimator():
    """A plain Estimator as the porting tool leaves it: every setting and every list of hooks goes through a helper."""
    watches = []

    def model_fn(features, labels, mode):
        tf.set_random_seed(get_npu_rank_id())
        layer = npu_unary_ops.gelu(tf.layers.dense(features, 16))
        if mode == tf.estimator.ModeKeys.TRAIN:
            layer = npu_ops.dropout(layer, 0.9)
        loss = tf.losses.mean_squared_error(labels, tf.layers.dense(layer, 1))
        if mode == tf.estimator.ModeKeys.EVAL:
            return tf.estimator.EstimatorSpec(mode, loss=loss)
        optimizer = npu_tf_optimizer(tf.train.GradientDescentOptimizer(learning_rate=0.05))
        train_op = optimizer.minimize(loss, global_step=tf.train.get_or_create_global_step())
        watches.append(Watch(loss))
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=watches)

    folder = os.path.join(OUT, "stock_estimator")
    steps = 20 if get_npu_rank_id() == 0 else None
    run_config = tf.estimator.RunConfig(
        model_dir=folder if get_npu_rank_id() == 0 else None,
        save_checkpoints_steps=steps,
        save_checkpoints_secs=None,
        session_config=tf.ConfigProto(allow_soft_placement=True),
    )
    estimator = tf.estimator.Estimator(model_fn=model_fn, config=npu_run_config_init(run_config=run_config))
    hook = NpuEmptyHook()
    estimator.train(input_fn=make_input_fn(), max_steps=40, hooks=npu_hooks_append(hooks_list=[hook]))
    facts["stock_estimator"] = watches[0].facts()


def main():
    tf.logging.set_verbosity(tf.logging.ERROR)
    session_config = tf.ConfigProto()
    custom_op = session_config.graph_options.rewrite_options.custom_optimizers.add()
    custom_op.name = "NpuOptimizer"
    custom_op.parameter_map["graph_run_mode"].i = 1
    (npu_sess, npu_shutdown) = init_resource(config=session_config)
    npu_estimator()
    loss_scale()
    stock_estimator()
    shutdown_resource(npu_sess, npu_shutdown)
    close_session(npu_sess)
    with open(os.path.join(OUT, f"rank_{get_rank_id()}.json"), "w") as file:
        json.dump(facts, file)


if __name__ == "__main__":
    main()
