"""`tf.contrib.stateless`, which is now `tf.random.stateless_*`: random numbers determined by a seed of shape [2]."""

from tensorflow.compat.v1.random import stateless_multinomial, stateless_truncated_normal
from tensorflow.compat.v1.random import stateless_normal as stateless_random_normal
from tensorflow.compat.v1.random import stateless_uniform as stateless_random_uniform
