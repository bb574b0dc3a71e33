"""Pre-trains a small BERT on any text, on one process or on several ranks.

    python examples/bert_pretrain/train.py --num_train_steps 50
    npu-run -np 2 examples/bert_pretrain/train.py --distributed

Run the same command again to continue where it stopped. README.md beside this file describes the output and every
flag.
"""

# ruff: noqa: F403, F405 (the star import is how scripts of this interface get their names)
from __future__ import annotations

from npu_bridge.npu_init import *

# isort: split
from corpus import make_rows, read_documents, split_held_out
from lamb import LAMBOptimizer, WarmupThenLinearDecay
from masking import MaskedBatches, feature_shapes
from model import ModelSize, masked_language_model
from settings import read_settings
from vocabulary import load_or_build

from hccl.manage.api import get_local_rank_size, get_rank_id, get_rank_size
from npu_bridge.reporting import (
    BatchesHook,
    History,
    HistoryHook,
    MissingExtraError,
    ProgressHook,
    ReportHook,
    draw_training,
    places_of_ranks,
    report_evaluation,
)

flags = tf.flags
FLAGS = flags.FLAGS

flags.DEFINE_list("corpus", [], "Text files or folders, separated by commas; empty: texts that ship with Python.")
flags.DEFINE_string("output_dir", "out/bert_tiny", "Folder of everything that is written; continued if it exists.")
flags.DEFINE_string("config", "configs/bert_tiny.toml", "Size file; names under this checkout work from anywhere.")
flags.DEFINE_integer("train_batch_size", None, "Rows per rank and step. Default: the size file's.")
flags.DEFINE_integer("max_seq_length", None, "Tokens per row. Default: the size file's.")
flags.DEFINE_integer("num_train_steps", None, "Updates of the whole run. Default: the size file's.")
flags.DEFINE_float("learning_rate", None, "Peak learning rate. Default: the size file's.")
flags.DEFINE_integer("num_warmup_steps", None, "Updates until the peak. Default: the size file's share of all.")
flags.DEFINE_integer("save_checkpoints_steps", None, "Updates between checkpoints. Default: the size file's.")
flags.DEFINE_float(
    "npu_bert_loss_scale",
    0,
    "Loss scaling: -1 off, 0 a scale that follows overflows, 1 or more a fixed scale.",
)
flags.DEFINE_float("init_loss_scale_value", 2.0**16, "First value of the scale that follows overflows.")
flags.DEFINE_boolean("distributed", None, "Average gradients over the ranks. Default: when there are several.")
flags.DEFINE_boolean("use_tailing", True, "Decide about a step before the last gradients have arrived.")
flags.DEFINE_integer("num_eval_batches", 8, "Held-out batches that rank 0 evaluates after the training; 0: none.")
flags.DEFINE_enum("optimizer", "lamb", ["lamb", "tfa_lamb"], "LAMB of this package, or tensorflow-addons' one.")
flags.DEFINE_string("stages", None, "TOML file with tables [[stages]]: operations on the gradients.")
flags.DEFINE_integer("seed", 12345, "Determines initial values, order of rows, and masks.")


def lamb_class():
    """Returns the optimizer class that `--optimizer` names."""
    if FLAGS.optimizer == "lamb":
        return LAMBOptimizer
    from tfa_lamb import TfaLAMBOptimizer  # needs the extra [addons]

    return TfaLAMBOptimizer


def make_optimizer(learning_rate, weight_decay_rate: float, distributed: bool):
    """Makes LAMB, wrapped for ranks and loss scaling according to the flags."""
    opt = lamb_class()(
        learning_rate,
        weight_decay_rate=weight_decay_rate,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-6,
        exclude_from_weight_decay=["LayerNorm", "layer_norm", "bias"],
    )
    stages = NPURunConfig.from_file(FLAGS.stages).stages if FLAGS.stages else []
    is_tailing = FLAGS.use_tailing and distributed
    loss_scale = FLAGS.npu_bert_loss_scale
    if loss_scale in (None, -1):
        return NPUOptimizer(opt, is_distributed=distributed, is_tailing_optimization=is_tailing, stages=stages)
    if loss_scale == 0:
        manager = ExponentialUpdateLossScaleManager(
            init_loss_scale=FLAGS.init_loss_scale_value,
            incr_every_n_steps=1000,
            decr_every_n_nan_or_inf=2,
            decr_ratio=0.5,
        )
    elif loss_scale >= 1:
        manager = FixedLossScaleManager(loss_scale=loss_scale)
    else:
        raise ValueError(f"--npu_bert_loss_scale: expected -1, 0, or a number from 1 up; got {loss_scale}.")
    return NPUOptimizer(
        opt,
        loss_scale_manager=manager,
        is_distributed=distributed,
        is_loss_scale=True,
        is_tailing_optimization=is_tailing,
        stages=stages,
    )


def model_fn(features, labels, mode, params):
    """Builds the model for the Estimator."""
    del labels  # the targets are among the features
    prediction = masked_language_model(features, params["size"], training=mode == tf.estimator.ModeKeys.TRAIN)
    if mode == tf.estimator.ModeKeys.EVAL:
        metrics = {"accuracy": tf.metrics.mean(prediction.accuracy)}
        return tf.estimator.EstimatorSpec(mode, loss=prediction.loss, eval_metric_ops=metrics)
    schedule = WarmupThenLinearDecay(params["learning_rate"], params["warmup_steps"], params["total_steps"])
    rate = schedule(tf.train.get_or_create_global_step())  # a tensor, which hooks can show
    optimizer = make_optimizer(rate, params["weight_decay_rate"], params["distributed"])
    grads_and_vars = optimizer.compute_gradients(prediction.loss, tf.trainable_variables())
    grads, variables = zip(*grads_and_vars)
    # Gradients from compute_gradients are averaged and unscaled, so their norm is the true one.
    clipped, _ = tf.clip_by_global_norm(grads, clip_norm=1.0)
    train_op = optimizer.apply_gradients(list(zip(clipped, variables)), tf.train.get_or_create_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=prediction.loss, train_op=train_op)


def make_input_fn(batches, max_seq_length: int, batch_size: int, first_batch: int = 0, share: bool = True):
    """Makes the input of one rank: its share of an endless stream, from global batch `first_batch` on."""

    def input_fn():
        ranks, rank = (get_rank_size(), get_rank_id()) if share else (1, 0)
        shapes = feature_shapes(max_seq_length)
        kinds = [kind for kind, _ in shapes.values()]

        def make_batch(positions):
            arrays = tf.numpy_function(lambda p: list(batches.batch(p).values()), [positions], kinds)
            for array, (_, width) in zip(arrays, shapes.values()):
                array.set_shape([batch_size, width])
            return dict(zip(shapes, arrays))

        positions = tf.data.Dataset.range(first_batch * batch_size * ranks, tf.int64.max)
        own = positions.shard(ranks, rank).batch(batch_size, drop_remainder=True)
        return own.map(make_batch).prefetch(2)

    return input_fn


def steps_and_batches_done(output_dir: str) -> tuple[int, int]:
    """Returns the number of updates up to the newest checkpoint, and of global batches, including skipped steps."""
    checkpoint = tf.train.latest_checkpoint(output_dir)
    if checkpoint is None:
        return 0, 0
    step = int(tf.train.load_variable(checkpoint, tf.GraphKeys.GLOBAL_STEP))
    return step, step + History(os.path.join(output_dir, "history.jsonl")).count_skipped_steps_until(step)


def session_config() -> tf.ConfigProto:
    """Shares this machine's cores among the ranks on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(cores // get_local_rank_size(), 1)
    return tf.ConfigProto(intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads)


def report(history: History, output_dir: str) -> None:
    """Draws the picture, and prints its path."""
    try:
        picture = os.path.join(output_dir, "training.png")
        draw_training(history, picture, title="BERT, masked-language-model pre-training")
        print(f"picture: {picture}", flush=True)
    except MissingExtraError as error:
        print(error, flush=True)


def quieten() -> None:
    """Shows each warning once; hides the warning that the global step does not rise, as skipped steps cause it."""
    tf.logging.set_verbosity(tf.logging.WARN)
    log = tf.get_logger()
    log.propagate = False  # absl's own handler would print everything a second time
    log.addFilter(lambda record: "that global step (tf.train.get_global_step) has not been" not in record.getMessage())


def given_or(flag, default):
    """Returns a flag's value if it was given, otherwise the default."""
    return default if flag is None else flag


def main(_):
    """Trains, or resumes training, until `--num_train_steps`."""
    quieten()
    model, training = read_settings(FLAGS.config)
    rank, ranks = get_rank_id(), get_rank_size()
    distributed = given_or(FLAGS.distributed, ranks > 1)
    if ranks > 1 and not distributed:
        raise ValueError(f"--nodistributed: {ranks} ranks would train apart and write to one folder. Drop the flag.")
    batch_size = given_or(FLAGS.train_batch_size, training.train_batch_size)
    length = given_or(FLAGS.max_seq_length, training.max_seq_length)
    total_steps = given_or(FLAGS.num_train_steps, training.num_train_steps)
    os.makedirs(FLAGS.output_dir, exist_ok=True)

    documents = read_documents(FLAGS.corpus)
    vocabulary_path = os.path.join(FLAGS.output_dir, "vocabulary.txt")
    vocabulary = load_or_build(vocabulary_path, documents, model.vocab_size, model.lower_case, write=rank == 0)
    train_rows, held_out_rows = split_held_out(make_rows(documents, vocabulary, length))
    size = ModelSize(
        vocab_size=len(vocabulary),
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        ffn_size=model.ffn_size,
        max_positions=model.max_positions,
        dropout=model.dropout,
    )
    config = NPURunConfig(
        model_dir=FLAGS.output_dir,
        tf_random_seed=FLAGS.seed,
        save_checkpoints_steps=given_or(FLAGS.save_checkpoints_steps, training.save_checkpoints_steps),
        session_config=session_config(),
        is_tailing_optimization=FLAGS.use_tailing and distributed,
    )
    est = tf.estimator.Estimator(
        model_fn=model_fn,
        config=config,
        params={
            "size": size,
            "learning_rate": given_or(FLAGS.learning_rate, training.learning_rate),
            "warmup_steps": given_or(FLAGS.num_warmup_steps, int(training.warmup_share * total_steps)),
            "total_steps": total_steps,
            "weight_decay_rate": training.weight_decay_rate,
            "distributed": distributed,
        },
    )
    if rank == 0:
        print(f"TensorFlow {tf.__version__} | ranks: {ranks}")
        print(
            f"{len(train_rows)} rows of {length} pieces, vocabulary of {size.vocab_size} pieces, "
            f"{ranks} x {batch_size} rows per step",
            flush=True,
        )

    history = History(os.path.join(FLAGS.output_dir, "history.jsonl"))
    page = ReportHook(FLAGS.output_dir, history, places_of_ranks(), config=config)
    hooks = [ProgressHook(total_steps), HistoryHook(history), page]
    if distributed:
        hooks.insert(0, NPUBroadcastGlobalVariablesHook(0, rank))
    batches = MaskedBatches(train_rows, size.vocab_size, FLAGS.seed)
    reached, first_batch = steps_and_batches_done(FLAGS.output_dir)
    if rank == 0 and reached >= total_steps:
        again = f"--num_train_steps {2 * reached} or another --output_dir"
        print(f"already at step {reached} of {total_steps}: nothing to do; {again}", flush=True)
    est.train(make_input_fn(batches, length, batch_size, first_batch), hooks=hooks, max_steps=total_steps)

    if rank == 0:
        if FLAGS.num_eval_batches and len(held_out_rows):
            unseen = MaskedBatches(held_out_rows, size.vocab_size, FLAGS.seed)
            unseen_fn, counted = make_input_fn(unseen, length, batch_size, share=False), BatchesHook()
            metrics = est.evaluate(unseen_fn, steps=FLAGS.num_eval_batches, hooks=[counted])
            report_evaluation(FLAGS.output_dir, metrics, history, "held-out text", counted)
        report(history, FLAGS.output_dir)


if __name__ == "__main__":
    tf.app.run()
