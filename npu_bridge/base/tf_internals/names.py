"""Private names of TensorFlow 2.15.1 as texts, for modules that run before TensorFlow is loaded or without it."""

from __future__ import annotations

SESSION_MODULE = "tensorflow.python.client.session"  # where the class of all sessions is defined
ESTIMATOR_MODULE = "tensorflow_estimator.python.estimator.estimator"  # where Estimators settle on their RunConfig
# Where `tf.keras.Model.fit` is defined, for eager execution and for graphs.
KERAS_MODEL_MODULES = ("keras.src.engine.training", "keras.src.engine.training_v1")
# Where optimizers of Keras are defined, those of today and the legacy ones.
KERAS_OPTIMIZER_MODULE = "keras.src.optimizers.optimizer"
KERAS_LEGACY_OPTIMIZER_MODULE = "keras.src.optimizers.legacy.optimizer_v2"
INPUT_OF_ESTIMATOR = "_call_input_fn"  # the method in which an Estimator calls a script's input function
# Methods of `tf.keras.optimizers.legacy.Optimizer` by which Keras takes gradients and adds them up over replicas.
LEGACY_COMPUTE = "_compute_gradients"
LEGACY_AGGREGATE = "_aggregate_gradients"
