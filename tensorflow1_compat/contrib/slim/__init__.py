"""`tf.contrib.slim`: the separate package TF-Slim 1.1 (the same library), patched for TensorFlow 2.15."""

import tf_slim.nets
from tensorflow.python.ops import variable_scope
from tf_slim import *
from tf_slim.layers import initializers, regularizers, utils
from tf_slim.layers.layers import conv1d, conv3d, separable_conv2d
from tf_slim.ops import arg_scope as _arg_scope
from tf_slim.ops import variables
from tf_slim.ops.framework_ops import get_name_scope

from tensorflow1_compat.contrib.slim import patches

patches.add_missing_names()
