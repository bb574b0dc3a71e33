"""`tf.contrib.losses`: losses that add themselves to `tf.GraphKeys.LOSSES`."""

from tf_slim.losses import *

from npu_bridge.tf1.contrib.slim import mended

mended.mend()
