"""`tf.contrib.losses`: loss functions that add each loss to the collection `tf.GraphKeys.LOSSES`."""

from tf_slim.losses import *

from tensorflow1_compat.contrib.slim import patches

patches.apply()
