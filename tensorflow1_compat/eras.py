"""Lists names that only TensorFlow 1 or only TensorFlow 2 has, from interface files of the installed version."""

from __future__ import annotations

import functools

from npu_bridge.base.tf_internals.names import KERAS
from tensorflow1_compat.installed import names_defined_in

__all__ = ["NAMESPACES", "names_only_in"]

# The namespaces whose names tell the eras apart, by era; "" is the root.
NAMESPACES = {
    1: (
        "", "data", "debugging", "dtypes", "errors", "feature_column", "graph_util", "image", "initializers", "io",
        "linalg", "losses", "metrics", "nn", "ragged", "random", "saved_model", "sets", "sparse", "summary", "test",
        "train", "keras.backend", "keras.layers",
    ),
    2: (
        "", "random", "keras.mixed_precision", "keras.optimizers", "keras.utils", "losses", "metrics", "summary",
        "experimental", "keras.losses", "distribute", "image", "nn", "config.experimental",
    ),
}  # fmt: skip
# Names that the files do not show: TensorFlow 2 loads these from other packages.
_IN_BOTH = {"": {"initializers", "losses", "metrics"}, "summary": {"audio", "histogram", "image", "scalar", "text"}}
_ALSO = {1: {"contrib"}, 2: {"dtensor", "optimizers", "security", "tools"}}


@functools.cache
def names_only_in(era: int, namespace: str) -> frozenset[str]:
    """Returns the public names below a namespace of `tf` that the other era does not have.

    Args:
      era: 1 or 2.
      namespace: for example "train"; "" for `tf` itself. Namespaces that are not in `NAMESPACES` give no names.
    """
    if namespace not in NAMESPACES[era]:
        return frozenset()
    found = _names_in(era, namespace) - _names_in(3 - era, namespace) - _IN_BOTH.get(namespace, set()) - {"importlib"}
    return frozenset(name for name in found if name[0] not in "_*").union(() if namespace else _ALSO[era])


def _names_in(era: int, namespace: str) -> frozenset[str]:
    if namespace.startswith("keras."):
        return names_defined_in(f"{KERAS}.api._v{era}.{namespace}")
    if era == 2 and namespace in ("losses", "metrics", "initializers"):
        return names_defined_in(f"{KERAS}.api._v2.keras.{namespace}")
    root = "tensorflow._api.v2.compat.v1" if era == 1 else "tensorflow._api.v2" if namespace else "tensorflow"
    return names_defined_in(f"{root}.{namespace}".rstrip("."))
