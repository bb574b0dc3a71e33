"""`tf.contrib.compiler.xla`: runs computations without XLA; `global_jit_level` of a session turns XLA on."""

from __future__ import annotations

from tensorflow1_compat.contrib.tpu.ops import rewrite


def compile(computation, inputs=None):
    """Calls `computation(*inputs)`; returns a list of its tensors, which wait for its operations.

    If it returns only operations, returns one operation that groups them.
    """
    return rewrite(computation, inputs)


def estimator_model_fn(target_model_fn=None):
    """Returns a model function unchanged."""
    return target_model_fn if target_model_fn is not None else lambda function: function
