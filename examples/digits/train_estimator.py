"""Trains on handwritten digits with an NPUEstimator: evaluates meanwhile, resumes after an interruption, draws.

    python examples/digits/train_estimator.py
    npu-run -np 2 examples/digits/train_estimator.py

Run the same command again to continue where it stopped. README.md beside this file describes the output.
"""

from __future__ import annotations

import argparse
import os

from digits import load, training_batches
from network import logits_of, new_loss_scale
from picture import draw

from npu_bridge.npu_init import NPUEstimator, NPUEstimatorSpec, NPUOptimizer, NPURunConfig, get_rank_id, tf
from npu_bridge.reporting import History, HistoryHook


def model_fn(features, labels, mode):
    """Builds the network for the Estimator, in training, evaluation and prediction."""
    logits = logits_of(features["pictures"])
    answers = {"digit": tf.argmax(logits, axis=1), "probabilities": tf.nn.softmax(logits)}
    if mode == tf.estimator.ModeKeys.PREDICT:
        outputs = {"serving_default": tf.estimator.export.PredictOutput(answers)}
        return NPUEstimatorSpec(mode, answers, export_outputs=outputs)
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    if mode == tf.estimator.ModeKeys.EVAL:
        metrics = {"accuracy": tf.metrics.accuracy(labels, answers["digit"])}
        return NPUEstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    optimizer = NPUOptimizer(tf.train.AdamOptimizer(2e-3), new_loss_scale(), is_distributed=True, is_loss_scale=True)
    return NPUEstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, tf.train.get_global_step()))


def held_out_input_fn():
    """Returns the held-out pictures once."""
    pictures, digits = load()[1]
    return tf.data.Dataset.from_tensor_slices(({"pictures": pictures}, digits)).batch(90)


def make_estimator(model_dir, **options):
    """Makes the Estimator that trains into a folder, or resumes from it."""
    return NPUEstimator(model_fn, config=NPURunConfig(model_dir=model_dir, tf_random_seed=1, **options))


def step_reached(model_dir):
    """Returns the number of updates up to the newest checkpoint."""
    checkpoint = tf.train.latest_checkpoint(model_dir)
    return int(tf.train.load_variable(checkpoint, tf.GraphKeys.GLOBAL_STEP)) if checkpoint else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="updates of the whole training")
    parser.add_argument("--batch_size", type=int, default=64, help="pictures of all ranks together")
    parser.add_argument("--save_steps", type=int, default=50, help="updates between checkpoints and evaluations")
    parser.add_argument("--output_dir", default="out/digits")
    flags = parser.parse_args()

    history = History(os.path.join(flags.output_dir, "history.jsonl"))
    reached = step_reached(flags.output_dir)
    done = reached + history.count_skipped_steps_until(reached)  # a skipped step has used up its batch, too

    def input_fn():
        return training_batches(flags.batch_size, done).map(lambda pictures, digits: ({"pictures": pictures}, digits))

    estimator = make_estimator(flags.output_dir, save_checkpoints_steps=flags.save_steps)
    if reached < flags.steps:
        # Rank 0 evaluates after each of its checkpoints, also the last; meanwhile the others wait in their next step.
        tf.estimator.train_and_evaluate(
            estimator,
            tf.estimator.TrainSpec(input_fn, max_steps=flags.steps, hooks=[HistoryHook(history)]),
            tf.estimator.EvalSpec(held_out_input_fn, steps=None, throttle_secs=0, start_delay_secs=0),
        )
    elif get_rank_id() == 0:
        print(f"already at step {reached} of {flags.steps}: nothing to do; --steps {2 * reached} or another folder")
        estimator.evaluate(held_out_input_fn)
    if get_rank_id() == 0:
        print(f"picture: {draw(history, flags.output_dir)}", flush=True)


if __name__ == "__main__":
    main()
