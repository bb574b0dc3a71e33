"""`tf.contrib.compiler`: what asked for XLA."""

from npu_bridge.tf1.contrib.compiler import jit, xla
