"""Private names of TensorFlow 2.15.1 as texts, for modules that run before TensorFlow is loaded or without it."""

from __future__ import annotations

SESSION_MODULE = "tensorflow.python.client.session"  # where the class of all sessions is defined
INPUT_OF_ESTIMATOR = "_call_input_fn"  # the method in which an Estimator calls a script's input function
# Methods of `tf.keras.optimizers.legacy.Optimizer` by which Keras takes gradients and adds them up over replicas.
LEGACY_COMPUTE = "_compute_gradients"
LEGACY_AGGREGATE = "_aggregate_gradients"
