"""Maps names of TensorFlow 2.0 to 2.14 that 2.15 lacks, or has only in an outdated copy, to current names.

For example, `tensorflow.python.keras` was Keras itself; in 2.15 it is a copy that is incompatible with `tf.keras`.
"""

from __future__ import annotations

from collections.abc import Iterable

from npu_bridge.base.tf_internals.names import KERAS
from tensorflow1_compat.tables import MODULES, NAMES, NameTables

__all__ = ["LEGACY_OPTIMIZERS", "OF_2", "tables_of"]

_KERAS_OF_1, _KERAS = f"{KERAS}.api._v1.keras", f"{KERAS}.api._v2.keras"
_ROOTS = ("keras.", "tensorflow.keras.", "tensorflow.python.", "npu_ops")
# Modules of the package keras 2.4 to 2.12 outside of its interface.
_INSIDES = (
    "activations", "backend_config", "callbacks", "datasets.cifar", "distribute", "engine", "feature_column",
    "initializers.initializers_v1", "layers.preprocessing", "layers.rnn", "mixed_precision.autocast_variable",
    "mixed_precision.policy", "saving", "utils.control_flow_util", "utils.conv_utils", "utils.data_utils",
    "utils.generic_utils", "utils.io_utils", "utils.kernelized_utils", "utils.layer_utils", "utils.losses_utils",
    "utils.metrics_utils", "utils.mode_keys", "utils.np_utils", "utils.object_identity", "utils.tf_contextlib",
    "utils.tf_inspect", "utils.tf_utils", "utils.version_utils", "utils.vis_utils",
)  # fmt: skip
_TESTING = f"{KERAS}.src.testing_infra"
# Optimizers of Keras until TensorFlow 2.10. Newer optimizers have the same names, which therefore do not show the age.
LEGACY_OPTIMIZERS: dict[str, str] = {
    f"{root}.optimizers.{name}": f"{_KERAS}.optimizers.legacy:{name}"
    for root in ("keras", "tensorflow", "tensorflow.keras")
    for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "Nadam", "Optimizer", "RMSprop", "SGD")
}

OF_2 = NameTables(
    modules={
        **{old: place.replace(_KERAS_OF_1, _KERAS) for old, place in MODULES.items() if old.startswith(_ROOTS)},
        **({} if KERAS == "keras" else {"keras": _KERAS}),  # Keras 3 has the name now
        **{f"keras.{name}": f"{KERAS}.src.{name}" for name in _INSIDES},
        "keras.initializers.initializers_v2": f"{KERAS}.src.initializers.initializers",
        "keras.keras_parameterized": f"{_TESTING}.test_combinations",
        "keras.testing_utils": f"{_TESTING}.test_utils",
        "keras.combinations": f"{_TESTING}.test_combinations",
        "tensorflow.python.keras.combinations": f"{_TESTING}.test_combinations",
    },
    names={
        **LEGACY_OPTIMIZERS,
        **{old: place.replace(_KERAS_OF_1, _KERAS) for old, place in NAMES.items() if old.startswith(_ROOTS)},
        "tensorflow.enable_v2_behavior": "tensorflow.compat.v1:enable_v2_behavior",
        "tensorflow.keras.__version__": f"{KERAS}:__version__",
        "keras.__version__": f"{KERAS}:__version__",
        "tensorflow.train.experimental.enable_mixed_precision_graph_rewrite": (
            "tensorflow.compat.v1:mixed_precision.enable_mixed_precision_graph_rewrite"
        ),
    },
    versions={},
    same={"tensorflow.compat.v2": "tensorflow", "tensorflow._api.v2": "tensorflow"},
)


def tables_of(roots: Iterable[str]) -> NameTables:
    """Returns the tables for a script that needs an older version of some packages.

    Args:
      roots: "keras", "tensorflow", both or neither.
    """
    roots = frozenset(roots)
    others = OF_2.roots - roots
    kept = ({old: new for old, new in table.items() if old.partition(".")[0] not in others} for table in OF_2[:4])
    return NameTables(*kept, roots)
