"""`tf.contrib.compiler`: what asked for XLA."""

from tensorflow1_compat.contrib.compiler import jit, xla
