"""`tf.contrib.metrics`: streaming metrics, functions that return (value, update op)."""

import tensorflow.compat.v1 as tf
from tf_slim.metrics import *

from tensorflow1_compat.contrib.slim import patches

confusion_matrix = tf.math.confusion_matrix
set_difference = tf.sets.difference
set_intersection = tf.sets.intersection
set_size = tf.sets.size
set_union = tf.sets.union

patches.add_missing_names()
