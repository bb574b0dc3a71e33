"""Trains on handwritten digits with a session and its own loop: several steps in a run, checkpoints, resuming.

    python examples/digits/train_session.py
    npu-run -np 2 examples/digits/train_session.py

Run the same command again to continue where it stopped.
"""

from __future__ import annotations

import argparse
import os

from digits import load, training_batches
from network import logits_of, new_loss_scale

from npu_bridge.npu_init import (
    NPULossScaleOptimizer,
    close_session,
    get_npu_rank_id,
    hccl_ops,
    init_resource,
    npu_config_proto,
    npu_tf_optimizer,
    shutdown_resource,
    tf,
    util,
)

STEPS_PER_RUN = 10


def session_config():
    """Returns the session's settings; options of this package are in the entry that `npu_config_proto` adds."""
    config = npu_config_proto()
    options = config.graph_options.rewrite_options.custom_optimizers[0].parameter_map
    options["iterations_per_loop"].i = STEPS_PER_RUN
    return config


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help=f"of the whole training, {STEPS_PER_RUN} in a run")
    parser.add_argument("--batch_size", type=int, default=64, help="pictures of all ranks together")
    parser.add_argument("--save_steps", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--output_dir", default="out/digits_session")
    flags = parser.parse_args()
    tf.disable_eager_execution()

    npu_session, npu_shutdown = init_resource()  # from here on ranks know each other
    is_first = get_npu_rank_id() == 0
    checkpoint = tf.train.latest_checkpoint(flags.output_dir)
    done = int(tf.train.load_variable(checkpoint, "batches")) if checkpoint else 0

    if done >= flags.steps and is_first:
        print(f"already at step {done} of {flags.steps}: nothing to do; --steps {2 * done} or another folder")

    tf.set_random_seed(1)
    iterator = tf.data.make_initializable_iterator(training_batches(flags.batch_size, done))
    pictures, digits = iterator.get_next()
    with tf.variable_scope("network", reuse=tf.AUTO_REUSE):
        loss = tf.losses.sparse_softmax_cross_entropy(digits, logits_of(pictures))
        held_out_pictures, held_out_digits = load()[1]
        guesses = tf.argmax(logits_of(tf.constant(held_out_pictures)), axis=1, output_type=tf.int32)
    accuracy = tf.reduce_mean(tf.cast(tf.equal(guesses, held_out_digits), tf.float32))

    optimizer = NPULossScaleOptimizer(npu_tf_optimizer(tf.train.AdamOptimizer(2e-3)), new_loss_scale(), True)
    step = tf.train.get_or_create_global_step()
    # A skipped step does not count in global_step, but it has used up its batch.
    batches = tf.get_variable("batches", [], tf.int64, tf.zeros_initializer(), trainable=False)
    train_op = tf.group(optimizer.minimize(loss, step), tf.assign_add(batches, 1))

    loop = util.IterationPerLoop()
    train_run = loop.create_iteration_per_loop_var(train_op)

    variables = tf.global_variables()
    from_rank_0 = tf.group(*map(tf.assign, variables, hccl_ops.broadcast(variables, 0)))
    saver = tf.train.Saver()
    with tf.Session(config=session_config()) as session:
        session.run([tf.global_variables_initializer(), iterator.initializer])
        if checkpoint:
            saver.restore(session, checkpoint)
        session.run(from_rank_0)
        loop.load_iteration_per_loop_var(session, STEPS_PER_RUN)
        reached = session.run(batches)
        while reached < flags.steps:
            _, last_loss = session.run([train_run, loss])
            reached = session.run(batches)
            if is_first and (reached % flags.save_steps == 0 or reached >= flags.steps):
                saver.save(session, os.path.join(flags.output_dir, "model.ckpt"), reached)
                print(f"step {reached}/{flags.steps}  loss {last_loss:.4f}  loss scale {session.run('loss_scale:0'):g}")
        if is_first:
            print(f"held out: {session.run(accuracy):.1%} right after {session.run(step)} steps", flush=True)

    shutdown_resource(npu_session, npu_shutdown)
    close_session(npu_session)


if __name__ == "__main__":
    main()
