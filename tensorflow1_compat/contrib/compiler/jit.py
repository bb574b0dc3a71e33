"""`tf.contrib.compiler.jit`."""

from tensorflow.python.compiler.xla.jit import experimental_jit_scope
