"""`tf.contrib.stateless`: random numbers that are functions of a seed [2]; they became `tf.random.stateless_*`."""

from tensorflow.compat.v1.random import stateless_multinomial, stateless_truncated_normal
from tensorflow.compat.v1.random import stateless_normal as stateless_random_normal
from tensorflow.compat.v1.random import stateless_uniform as stateless_random_uniform
