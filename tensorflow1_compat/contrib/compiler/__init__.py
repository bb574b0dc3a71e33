"""`tf.contrib.compiler`: functions that request XLA compilation."""

from tensorflow1_compat.contrib.compiler import jit, xla
