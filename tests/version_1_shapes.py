"""Makes a run of pytest see shapes as TensorFlow 1 has them: `pytest -p tests.version_1_shapes`."""

from __future__ import annotations

import tensorflow as tf

tf.compat.v1.disable_v2_tensorshape()
