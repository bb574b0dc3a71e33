"""`tf.contrib.compiler.xla`: computations are run as they are; `global_jit_level` of a session still asks for XLA."""

from __future__ import annotations

from tensorflow1_compat.contrib.tpu.ops import rewrite


def compile(computation, inputs=None):
    """The list of outputs of `computation(*inputs)`; operations among them run before any of its tensors."""
    return rewrite(computation, inputs)


def estimator_model_fn(target_model_fn=None):
    """A decorator of model functions that leaves them as they are."""
    return target_model_fn if target_model_fn is not None else lambda function: function
