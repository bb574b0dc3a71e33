"""`tf.contrib.autograph`, which is now `tf.autograph`."""

from tensorflow.compat.v1.autograph import *
from tensorflow.python.autograph.impl.api import convert, converted_call, do_not_convert
