"""`tf.contrib.keras`, which is now `tf.keras`."""

from npu_bridge.base.tf_internals.contrib import keras_of_tf1

globals().update({name: value for name, value in vars(keras_of_tf1()).items() if not name.startswith("_")})
