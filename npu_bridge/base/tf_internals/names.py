"""Private names of TensorFlow as texts, for modules that run before TensorFlow is loaded or without it.

Seen in TensorFlow 2.15.1; `KERAS` in 2.21 as well, where Keras 3 is 3.15.1.
"""

from __future__ import annotations

import importlib.util
import os


def _has_estimators() -> bool:
    """Whether TensorFlow is 2.15, told from its files: later ones have no `tf.estimator`, nor Keras 2."""
    try:
        spec = importlib.util.find_spec("tensorflow")
    except ValueError:  # something else is under its name
        return True
    folders = (spec and spec.submodule_search_locations) or []
    return not folders or any(os.path.isfile(os.path.join(folder, *_OF_ESTIMATORS)) for folder in folders)


_OF_ESTIMATORS = ("python", "distribute", "estimator_training.py")
HAS_ESTIMATORS = _has_estimators()
# The package that `tf.keras` is, and Keras 2 in it: beside later versions it has a name of its own.
KERAS = "keras" if HAS_ESTIMATORS else "tf_keras"

SESSION_MODULE = "tensorflow.python.client.session"  # where the class of all sessions is defined
ESTIMATOR_MODULE = "tensorflow_estimator.python.estimator.estimator"  # where Estimators settle on their RunConfig
# Where `tf.keras.Model.fit` is defined, for eager execution and for graphs; and where models of Keras 3 have theirs.
KERAS_MODEL_MODULES = (f"{KERAS}.src.engine.training", f"{KERAS}.src.engine.training_v1")
KERAS_MODEL_MODULES += () if HAS_ESTIMATORS else ("keras.src.models.model",)
# Where optimizers of Keras are defined, those of today and the legacy ones.
KERAS_OPTIMIZER_MODULE = f"{KERAS}.src.optimizers.optimizer"
KERAS_LEGACY_OPTIMIZER_MODULE = f"{KERAS}.src.optimizers.legacy.optimizer_v2"
MODEL_OF_ESTIMATOR = "_call_model_fn"  # the method in which an Estimator calls a model function, in a mode
INPUT_OF_ESTIMATOR = "_call_input_fn"  # the method in which an Estimator calls a script's input function
# Methods of `tf.keras.optimizers.legacy.Optimizer` by which Keras takes gradients and adds them up over replicas.
LEGACY_COMPUTE = "_compute_gradients"
LEGACY_AGGREGATE = "_aggregate_gradients"


def is_execution(module: str, function: str) -> bool:
    """Whether a function of TensorFlow executes operators and waits for them, in a session or eagerly."""
    return function in _EXECUTIONS.get(module, ()) or module.startswith(_OPERATORS)


_EXECUTIONS = {
    SESSION_MODULE: ("_call_tf_sessionrun", "_call_tf_sessionprun", "__call__"),
    "tensorflow.python.eager.execute": ("quick_execute", "execute_with_cancellation"),
}
_OPERATORS = "tensorflow.python.ops.gen_"
