"""`tf.contrib.compiler.jit`: a scope that requests XLA compilation."""

from tensorflow.python.compiler.xla.jit import experimental_jit_scope
