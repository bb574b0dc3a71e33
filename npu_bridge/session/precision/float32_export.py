"""Exports a 16-bit model or checkpoint in float32, for other programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from npu_bridge.base.errors import message
from npu_bridge.collective.apart import run_in_separate_graph
from npu_bridge.session.precision.keras_models import ModelDtypes, change_dtypes

_OWNER = "amp.export_float32"
_WRITTEN_AS = {tf.float16: "float32", tf.bfloat16: "float32", tf.string: object}  # by dtype; others stay as they are


def export_float32(source: Any, path: str | None = None) -> Any:
    """Copies a 16-bit model or checkpoint to float32; values and names stay the same.

    Args:
      source: a Keras model, the path of a checkpoint, or a folder, of which the newest checkpoint is taken.
      path: path of the new checkpoint; only if `source` is a path.
    Returns:
      A new Keras model with layers of Keras only, or the path of the new checkpoint.
    Raises:
      ValueError: there is no checkpoint, `path` is missing or equals `source`, or a model cannot be rebuilt.
    """
    if isinstance(source, tf.keras.Model):
        return change_dtypes(source, ModelDtypes(), _OWNER)
    found = tf.train.latest_checkpoint(source) or source
    if not tf.compat.v1.train.checkpoint_exists(found):
        fix = "Pass a Keras model, a folder, or a path without .index."
        raise ValueError(message(_OWNER, "source has no checkpoint", "a checkpoint", repr(source), fix))
    if path is None or path == found:
        fix = "Pass path=... of the new checkpoint."
        raise ValueError(message(_OWNER, "path is missing, or the same as source", "another path", repr(path), fix))
    reader = tf.train.load_checkpoint(found)
    dtypes = dict(sorted(reader.get_variable_to_dtype_map().items()))
    values = [np.asarray(reader.get_tensor(name), _WRITTEN_AS.get(dtype)) for name, dtype in dtypes.items()]

    def write(*tensors):
        return tf.raw_ops.SaveV2(
            prefix=path, tensor_names=[*dtypes], shape_and_slices=[""] * len(dtypes), tensors=tensors
        )

    run_in_separate_graph(write, *values)
    return path
