"""`tf.contrib.compiler.xla`: runs computations unchanged; `global_jit_level` of a session still requests XLA."""

from __future__ import annotations

from tensorflow1_compat.contrib.tpu.ops import rewrite


def compile(computation, inputs=None):
    """Returns the list of outputs of `computation(*inputs)`; its operations run before any of its tensors."""
    return rewrite(computation, inputs)


def estimator_model_fn(target_model_fn=None):
    """Returns a model function unchanged."""
    return target_model_fn if target_model_fn is not None else lambda function: function
