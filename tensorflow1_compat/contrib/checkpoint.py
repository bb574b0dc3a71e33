"""`tf.contrib.checkpoint`: containers whose elements are saved in checkpoints."""

from tensorflow.compat.v1.train import CheckpointManager
from tensorflow.python.trackable.autotrackable import AutoTrackable as Checkpointable
from tensorflow.python.trackable.data_structures import List, Mapping, NoDependency
