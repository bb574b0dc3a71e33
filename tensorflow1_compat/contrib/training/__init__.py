"""`tf.contrib.training`: hyperparameters, training loops, evaluation of checkpoints."""

from tensorflow_estimator.python.estimator.inputs.queues.feeding_queue_runner import (
    _FeedingQueueRunner as FeedingQueueRunner,
)
from tf_slim.training.evaluation import *
from tf_slim.training.training import *

from tensorflow1_compat.contrib.slim import patches
from tensorflow1_compat.contrib.training.bucketing import bucket, bucket_by_sequence_length
from tensorflow1_compat.contrib.training.devices import GreedyLoadBalancingStrategy, RandomStrategy, byte_size_load_fn
from tensorflow1_compat.contrib.training.hparam import HParams, parse_values

patches.add_missing_names()
