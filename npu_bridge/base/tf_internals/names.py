"""Holds private names of TensorFlow as texts, for modules that run before TensorFlow is loaded or without it.

Seen in TensorFlow 2.15.1; `KERAS` also in TensorFlow 2.21 with Keras 3.15.1.
"""

from __future__ import annotations

import importlib.util
import os


def _has_estimators() -> bool:
    """Returns whether TensorFlow's files include Estimators; versions after 2.15 include neither these nor Keras 2."""
    try:
        spec = importlib.util.find_spec("tensorflow")
    except ValueError:  # another module has its name
        return True
    folders = (spec and spec.submodule_search_locations) or []
    return not folders or any(os.path.isfile(os.path.join(folder, *_OF_ESTIMATORS)) for folder in folders)


_OF_ESTIMATORS = ("python", "distribute", "estimator_training.py")
HAS_ESTIMATORS = _has_estimators()
# The package of Keras 2, which is `tf.keras`; its name depends on the version of TensorFlow.
KERAS = "keras" if HAS_ESTIMATORS else "tf_keras"

CONTEXT_MODULE = "tensorflow.python.eager.context"  # defines the context of eager execution
SESSION_MODULE = "tensorflow.python.client.session"  # defines the class of all sessions
ESTIMATOR_MODULE = "tensorflow_estimator.python.estimator.estimator"  # Estimators choose their RunConfig here
EVALUATING_MODULE = "tensorflow_estimator.python.estimator.training"  # of the listener that evaluates after saves
# The modules that define `tf.keras.Model.fit`, for eager execution and for graphs; then the one of Keras 3 models.
KERAS_MODEL_MODULES = (f"{KERAS}.src.engine.training", f"{KERAS}.src.engine.training_v1")
KERAS_MODEL_MODULES += () if HAS_ESTIMATORS else ("keras.src.models.model",)
# The modules that define Keras optimizers, current and legacy ones.
KERAS_OPTIMIZER_MODULE = f"{KERAS}.src.optimizers.optimizer"
KERAS_LEGACY_OPTIMIZER_MODULE = f"{KERAS}.src.optimizers.legacy.optimizer_v2"
MODEL_OF_ESTIMATOR = "_call_model_fn"  # the method in which an Estimator calls a model function, in a mode
INPUT_OF_ESTIMATOR = "_call_input_fn"  # the method in which an Estimator calls a script's input function
# Methods of `tf.keras.optimizers.legacy.Optimizer` that compute gradients and sum them over replicas.
LEGACY_COMPUTE = "_compute_gradients"
LEGACY_AGGREGATE = "_aggregate_gradients"


def executes_operators(module: str, function: str) -> bool:
    """Returns whether a function of TensorFlow executes operators and waits for them, in a session or eagerly."""
    return function in _EXECUTIONS.get(module, ()) or module.startswith(_OPERATORS)


_EXECUTIONS = {
    SESSION_MODULE: ("_call_tf_sessionrun", "_call_tf_sessionprun", "__call__"),
    "tensorflow.python.eager.execute": ("quick_execute", "execute_with_cancellation"),
}
_OPERATORS = "tensorflow.python.ops.gen_"
