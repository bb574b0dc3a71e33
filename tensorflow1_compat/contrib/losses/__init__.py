"""`tf.contrib.losses`: losses that add themselves to `tf.GraphKeys.LOSSES`."""

from tf_slim.losses import *

from tensorflow1_compat.contrib.slim import patches

patches.apply()
