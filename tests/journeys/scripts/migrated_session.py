"""Scripts with sessions as the migration guides write them, one function each; facts about every one go to a file."""

# ruff: noqa: F403, F405, I001 (imports are as they are in such scripts)
from npu_bridge.npu_init import *
from npu_bridge.estimator import npu_ops
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer
from npu_bridge.hccl import hccl_ops
from hccl.manage.api import get_local_rank_id
from hccl.manage.api import get_rank_id
from hccl.manage.api import get_rank_size

import json
import sys
import threading

import numpy as np

OUT = sys.argv[1]
facts = {}


def build():
    """A line to be learned: its loss, and weights that differ on every rank until they are sent."""
    tf.set_random_seed(get_rank_id())
    features = np.random.RandomState(0).randn(64, 4).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((features, features.sum(axis=1, keepdims=True)))
    dataset = dataset.shard(get_rank_size(), get_rank_id()).repeat().batch(8, drop_remainder=True)
    x, y = tf.data.make_one_shot_iterator(dataset).get_next()
    return tf.losses.mean_squared_error(y, tf.layers.dense(x, 1))


def read_weights(session):
    return np.concatenate([value.ravel() for value in session.run(tf.trainable_variables())]).tolist()


def five_steps_in_a_run():
    config = tf.ConfigProto(allow_soft_placement=True)
    custom_op = config.graph_options.rewrite_options.custom_optimizers.add()
    custom_op.name = "NpuOptimizer"
    custom_op.parameter_map["iterations_per_loop"].i = 5
    return npu_config_proto(config_proto=config)


def broadcast_global_variables(root_rank):
    """As the guides write it: every float variable by itself, received and assigned."""
    op_list = []
    for var in tf.global_variables():
        if "float" in var.dtype.name:
            outputs = hccl_ops.broadcast(tensor=[var], root_rank=root_rank)
            if outputs is not None:
                op_list.append(outputs[0].op)
                op_list.append(tf.assign(var, outputs[0]))
    return tf.group(op_list)


def options_in_the_map():
    """A session whose map asks for things; loss scaling; ten steps in a run."""
    loss = build()
    step = tf.train.get_or_create_global_step()
    optimizer = NPUDistributedOptimizer(tf.train.GradientDescentOptimizer(0.05))
    optimizer = NPULossScaleOptimizer(optimizer, FixedLossScaleManager(loss_scale=1024), is_distributed=True)
    train_op = optimizer.minimize(loss, global_step=step)
    bcast_op = broadcast_global_variables(0)

    config = tf.ConfigProto()
    custom_op = config.graph_options.rewrite_options.custom_optimizers.add()
    custom_op.name = "NpuOptimizer"
    custom_op.parameter_map["use_off_line"].b = True
    custom_op.parameter_map["precision_mode"].s = tf.compat.as_bytes("must_keep_origin_dtype")
    custom_op.parameter_map["hcom_parallel"].b = True
    custom_op.parameter_map["iterations_per_loop"].i = 10
    config.graph_options.rewrite_options.remapping = RewriterConfig.OFF
    config.graph_options.rewrite_options.memory_optimization = RewriterConfig.OFF
    with tf.Session(config=npu_config_proto(config_proto=config)) as sess:
        sess.run(tf.global_variables_initializer())
        sess.run(bcast_op)
        first = sess.run(loss)
        train_op = util.set_iteration_per_loop(sess, train_op, 10)
        for _ in range(4):
            _, last, scale = sess.run([train_op, loss, "loss_scale:0"])
        facts["options_in_the_map"] = {
            "losses": [float(first), float(last)],
            "step": int(sess.run(step)),
            "weights": read_weights(sess),
            "scale": float(scale),
        }


def own_gradients():
    """Averages gradients by hand; broadcasts all variables at once, and runs that op unchanged."""
    loss = build()
    variables = tf.trainable_variables()
    grads = npu_allreduce(tf.gradients(loss, variables))
    step = tf.train.get_or_create_global_step()
    train_op = tf.train.MomentumOptimizer(0.02, 0.9).apply_gradients(zip(grads, variables), global_step=step)
    bcast_op = hccl_ops.broadcast(variables, 0)
    with tf.Session("") as sess:
        sess.run(tf.global_variables_initializer())
        sess.run(bcast_op)
        losses = [float(sess.run([loss, train_op])[0]) for _ in range(40)]
        facts["own_gradients"] = {"losses": losses, "step": int(sess.run(step)), "weights": read_weights(sess)}


class LastLook(tf.train.SessionRunHook):
    """Returns the last values of a monitored session."""

    def begin(self):
        self.weights = tf.concat([tf.reshape(v, [-1]) for v in tf.trainable_variables()], axis=0)
        self.step = tf.train.get_global_step()

    def end(self, session):
        self.weights, self.step = session.run([self.weights, self.step])


def monitored():
    """A MonitoredTrainingSession whose hooks, settings and optimizer the porting tool has wrapped."""
    loss = build()
    step = tf.train.get_or_create_global_step()
    train_op = tf.group(npu_tf_optimizer(tf.train.AdamOptimizer(0.05)).minimize(loss, step), name="IterationOp")
    last_look = LastLook()
    # The list comes back longer: behind is the hook that sends rank 0's variables.
    hooks = [tf.train.StopAtStepHook(last_step=60), SetIterationsVarHook(5), last_look]
    losses = []
    with tf.train.MonitoredTrainingSession(
        checkpoint_dir=os.path.join(OUT, "monitored") if get_npu_rank_id() == 0 else None,
        hooks=npu_hooks_append(hooks_list=hooks),
        config=five_steps_in_a_run(),
    ) as sess:
        while not sess.should_stop():
            losses.append(float(sess.run([train_op, loss])[1]))
    facts["monitored"] = {
        "losses": losses,
        "step": int(last_look.step),
        "weights": last_look.weights.tolist(),
        "hooks": len(hooks),
    }


def supervisor():
    """A Supervisor, whose graph is made changeable again for the broadcast; five steps in a run."""
    loss = build()
    step = tf.train.get_or_create_global_step()
    train_op = npu_distributed_optimizer_wrapper(tf.train.GradientDescentOptimizer(0.05)).minimize(loss, step)
    iteration = util.IterationPerLoop()
    train_op = iteration.create_iteration_per_loop_var(train_op)
    logdir = os.path.join(OUT, "supervisor") if get_rank_id() == 0 else None
    # Without a thread that saves: TensorFlow cannot export the graph while the broadcast is added to it.
    sv = tf.train.Supervisor(logdir=logdir, summary_op=None, save_model_secs=0)
    losses = []
    with sv.managed_session(config=five_steps_in_a_run()) as sess:
        tf.get_default_graph()._unsafe_unfinalize()
        bcast_op = broadcast_global_variables(0)
        tf.get_default_graph().finalize()
        sess.run(bcast_op)
        iteration.load_iteration_per_loop_var(sess, 5)
        while not sv.should_stop():
            losses.append(float(sess.run([train_op, loss])[1]))
            if sess.run(step) >= 40:
                break
        facts["supervisor"] = {"losses": losses, "step": int(sess.run(step)), "weights": read_weights(sess)}
        if get_rank_id() == 0:
            sv.saver.save(sess, sv.save_path, global_step=step)


def from_horovod():
    """Replaces `hvd.init`, `hvd.size` and so on; the first session stays open until the end."""
    npu_init = npu_ops.initialize_system()
    npu_shutdown = npu_ops.shutdown_system()
    config = tf.ConfigProto()
    config.gpu_options.visible_device_list = str(get_local_rank_id())
    init_sess = tf.Session(config=config)
    init_sess.run(npu_init)

    loss = build()
    optimizer = npu_distributed_optimizer_wrapper(tf.train.GradientDescentOptimizer(0.05 * get_rank_size()))
    step = tf.train.get_or_create_global_step()
    train_op = optimizer.minimize(loss, global_step=step)
    mean_loss = hccl_ops.allreduce(loss, "sum") / get_rank_size()
    all_losses = hccl_ops.allgather(tf.reshape(loss, [1]), get_rank_size())
    bcast_op = broadcast_global_variables(0)
    config = tf.ConfigProto()
    if not tf.test.is_gpu_available():
        config.gpu_options.visible_device_list = ""
    sess = tf.Session(config=config)
    sess.run(tf.global_variables_initializer())
    sess.run(bcast_op)
    printer = PrintsOfTheDevice(sess)
    printer.start()
    losses = []
    for _ in range(20):
        _, mean, every = sess.run([train_op, mean_loss, all_losses])
        losses.append(float(mean))
    printer.join(timeout=60)
    facts["from_horovod"] = {
        "losses": losses,
        "step": int(sess.run(step)),
        "weights": read_weights(sess),
        "every": every.tolist(),
        "printer": printer.ended_with,
    }
    sess.close()
    init_sess.run(npu_shutdown)
    init_sess.close()


class PrintsOfTheDevice(threading.Thread):
    """The guides' thread that shows what an NPU prints; here prints have reached standard error already."""

    def __init__(self, sess):
        super().__init__()
        self.sess, self.ended_with = sess, None
        self.outfeed = tf.print(npu_ops.outfeed_dequeue_op("_npu_log", [tf.string], [()]))

    def run(self):
        try:
            while True:
                self.sess.run(self.outfeed)
        except tf.errors.OutOfRangeError:
            self.ended_with = "OutOfRangeError"


def main():
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    (npu_sess, npu_shutdown) = init_resource()
    for pattern in (options_in_the_map, own_gradients, monitored, supervisor, from_horovod):
        tf.reset_default_graph()
        pattern()
    shutdown_resource(npu_sess, npu_shutdown)
    close_session(npu_sess)
    with open(os.path.join(OUT, f"rank_{get_rank_id()}.json"), "w") as file:
        json.dump(facts, file)


if __name__ == "__main__":
    main()
