"""`tf.contrib.compiler`: functions that request XLA."""

from tensorflow1_compat.contrib.compiler import jit, xla
