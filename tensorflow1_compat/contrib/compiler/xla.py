"""`tf.contrib.compiler.xla`: runs computations without XLA; `global_jit_level` of a session turns XLA on."""

from __future__ import annotations

from tensorflow1_compat.contrib.tpu.ops import rewrite


def compile(computation, inputs=None):
    """Calls `computation(*inputs)`; returns its tensors, which also wait for the operations that the call returned."""
    return rewrite(computation, inputs)


def estimator_model_fn(target_model_fn=None):
    """Returns a model function unchanged."""
    return target_model_fn if target_model_fn is not None else lambda function: function
