"""`tf.contrib.losses`: loss functions that add their results to the collection `tf.GraphKeys.LOSSES`."""

from tf_slim.losses import *

from tensorflow1_compat.contrib.slim import patches

patches.add_missing_names()
