"""`tf.contrib.training`: hyperparameters, training loops, evaluation of checkpoints."""

from tensorflow_estimator.python.estimator.inputs.queues.feeding_queue_runner import (
    _FeedingQueueRunner as FeedingQueueRunner,
)
from tf_slim.training.evaluation import (
    StopAfterNEvalsHook,
    SummaryAtEndHook,
    checkpoints_iterator,
    evaluate_once,
    evaluate_repeatedly,
    get_or_create_eval_step,
    wait_for_new_checkpoint,
)
from tf_slim.training.training import (
    add_gradients_summaries,
    clip_gradient_norms,
    clip_gradient_norms_fn,
    create_train_op,
    multiply_gradients,
    train,
)

from tensorflow1_compat.contrib.slim import patches
from tensorflow1_compat.contrib.training.bucketing import bucket, bucket_by_sequence_length
from tensorflow1_compat.contrib.training.devices import GreedyLoadBalancingStrategy, RandomStrategy, byte_size_load_fn
from tensorflow1_compat.contrib.training.hparam import HParams, parse_values

patches.add_missing_names()
