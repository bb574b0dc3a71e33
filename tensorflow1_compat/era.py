"""Determines whether a script is written for TensorFlow 1 or 2, from the names that it imports and calls."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from npu_bridge.base.tf_internals.names import KERAS
from tensorflow1_compat.eras import names_only_in
from tensorflow1_compat.installed import is_installed
from tensorflow1_compat.old_python.calls import numpy_version
from tensorflow1_compat.old_python.removed_names import OLD_ANYWHERE, OLD_BESIDE_NUMPY_2, REUSED
from tensorflow1_compat.old_python.removed_of_numpy import KEYWORDS
from tensorflow1_compat.reading import METHODS_OF_LEGACY, FileFacts, NameUse
from tensorflow1_compat.reading_tree import read_tree
from tensorflow1_compat.tables_of_2 import LEGACY_OPTIMIZERS, OF_2

__all__ = ["EraEvidence", "find_evidence_in_files", "find_evidence_of_script", "explain_older_keras"]

# Modules that exist in one era only.
_MODULES_OF_1 = ("tensorflow.contrib", "tensorflow.examples", "tensorflow.flags", "tensorflow.app")
_SWITCHES_TO_2 = ("npu_device",)
# Packages that never worked with TensorFlow 1: scripts that import them use `tensorflow.compat.v1` in TensorFlow 2.
_NEEDS_2 = ("tensorflow_addons",)
# These names mean TensorFlow 1 in every version, but execute eagerly unless the script switches eager execution off.
_VERSION_1 = ("tensorflow.compat.v1.", "tensorflow._api.v1.", "npu_bridge.npu_init.tf.")
# In a script for both versions that writes `tf.compat.v1.name`, these only work in TensorFlow 2 after one of
# `_MAKES_GRAPHS`.
_NEEDS_GRAPHS = {f"tensorflow.compat.v1.{name}" for name in ("placeholder", "sparse_placeholder", "Session")}
# Names in TensorFlow 2 scripts of earlier versions. An import of `keras` does not show a script's age.
_OLD_OF_2 = frozenset({
    *OF_2.modules, *OF_2.names, *OLD_ANYWHERE, "yaml.load",
    "google.protobuf.descriptor.Descriptor", "google.protobuf.descriptor.EnumDescriptor",  # of old protoc modules
    *(f"tensorflow_addons.optimizers.{name}" for name in (  # around an optimizer of the legacy generation
        "AveragedOptimizerWrapper", "Lookahead", "MovingAverage", "MultiOptimizer", "SWA",
        "extend_with_decoupled_weight_decay",
    )),
    METHODS_OF_LEGACY,
}) - LEGACY_OPTIMIZERS.keys() - {"keras", "keras.__version__"}  # fmt: skip
_OLD_BESIDE_NUMPY_2 = (_OLD_OF_2 | OLD_BESIDE_NUMPY_2) - REUSED
# Keywords that these modules accepted in earlier versions, and refuse or ignore now.
_OLD_KEYWORDS = {"optimizers": {"decay", "lr"}, "skimage": {"multichannel"}}
# The places of Keras's public names in the installed files.
_INSTALLED = {"tensorflow.keras.": f"{KERAS}.api._v2.keras.", "keras.": "keras."}
_THEN = "what it had then"
_MEANING = {"keras": _THEN if KERAS == "keras" else f"Keras 2 ({KERAS})", "tf.keras": _THEN}
_MAKES_GRAPHS = {"tensorflow.Graph", "tensorflow.compat.v1.Graph"} | {
    f"tensorflow.compat.v1.{name}" for name in ("disable_eager_execution", "disable_v2_behavior")
}
# Helpers of the NPU interface that are only useful with graphs and sessions.
_HELPERS_OF_1 = tuple(
    f"npu_bridge.npu_init.{name}" for name in ("npu_config_proto", "set_keras_session_npu_config", "npu_tf_optimizer")
)


class EraEvidence(NamedTuple):
    """The names in a script that show for which version of TensorFlow it is written.

    Attributes:
      of_1: dict from each name that only TensorFlow 1 has to its first use.
      of_2: names that only TensorFlow 2 has, with their first use.
      old_of_2: names that only earlier versions of TensorFlow 2, Keras, numpy or Python have, with their first use.
      switches_to_2: whether the script requests TensorFlow 2 on NPUs.
    """

    of_1: dict[str, NameUse]
    of_2: dict[str, NameUse]
    old_of_2: dict[str, NameUse]
    switches_to_2: bool

    @property
    def packages_needed_in_older_version(self) -> dict[str, NameUse]:
        """The packages, "keras" or "tensorflow", that the script needs in an older version.

        Each package is mapped to the first name that only its older version has. If the installed package `keras` is
        Keras 2, a name of either package counts for both.
        """
        found: dict[str, NameUse] = {}
        for use in self.old_of_2.values():
            root = (use.alias if use.name == METHODS_OF_LEGACY else use.name).partition(".")[0]
            if root == "tensorflow_addons" or use.name == METHODS_OF_LEGACY and root != "keras":
                root = "tensorflow"
            if root in ("keras", "tensorflow"):
                for each in ("keras", "tensorflow") if KERAS == "keras" else (root,):
                    found.setdefault(each, use)
        return found

    @property
    def is_tensorflow_1(self) -> bool:
        """Whether a script is written for TensorFlow 1. If names of both eras occur, the more frequent era decides."""
        return not self.switches_to_2 and len(self.of_1) > 0 and len(self.of_1) >= len(self.of_2)


def explain_older_keras(older: Mapping[str, NameUse]) -> list[tuple[NameUse, str]]:
    """Returns pairs: a use of a name that only an older Keras has, and a message that says which Keras the script gets.

    Args:
      older: `EraEvidence.packages_needed_in_older_version`.
    """
    by_use: dict[NameUse, list[str]] = {}
    for package, use in older.items():
        by_use.setdefault(use, []).append("keras" if package == "keras" else "tf.keras")
    return [
        (use, f"only an older Keras has {_describe_use(use)}, so {' and '.join(names)} means {_MEANING[names[0]]}")
        for use, names in by_use.items()
    ]


def _describe_use(use: NameUse) -> str:
    if use.name == METHODS_OF_LEGACY:
        return "an optimizer with _resource_apply_dense"
    return use.name if use.call is None or _needs_older_version(use) else f"a keyword of {use.name}"


def find_evidence_of_script(script: str, roots: Sequence[str]) -> EraEvidence:
    """Returns the evidence, in a script and the user's modules that it imports, for TensorFlow 1 or 2.

    Reads the files without running them.
    """
    return find_evidence_in_files(read_tree(script, roots))


def find_evidence_in_files(files: Iterable[FileFacts]) -> EraEvidence:
    """Returns the evidence, in the files of a script, that it was written for TensorFlow 1 or 2."""
    of_1: dict[str, NameUse] = {}
    of_2: dict[str, NameUse] = {}
    old_of_2: dict[str, NameUse] = {}
    of_version_1: dict[str, NameUse] = {}
    needs_graphs: dict[str, NameUse] = {}
    beside_version_2: dict[str, NameUse] = {}
    switches_to_2 = needs_2 = makes_graphs = False
    for facts in files:
        has_both = any(map(_is_plain_tensorflow_name, facts.uses))
        for use in facts.uses:
            if use.is_import and not use.is_guarded:
                package = use.name.partition(".")[0]
                switches_to_2 = switches_to_2 or package in _SWITCHES_TO_2
                needs_2 = needs_2 or package in _NEEDS_2
            if not use.is_guarded and (_needs_older_version(use) or _has_old_keywords(use)):
                is_method = use.name == METHODS_OF_LEGACY
                old_of_2.setdefault(f"{use.name} of {use.alias}" if is_method else use.name, use)
            makes_graphs = makes_graphs or use.name in _MAKES_GRAPHS
            if use.name.startswith("tensorflow.compat.") and use.alias == "tensorflow":
                if use.name in _NEEDS_GRAPHS:
                    needs_graphs.setdefault(use.name, use)
                continue
            era = _find_era_of_name(use.name)
            if era == 1 and use.name.startswith(_VERSION_1):
                is_beside = has_both and use.alias == "tensorflow.compat.v1"
                (beside_version_2 if is_beside else of_version_1).setdefault(use.name, use)
            elif era:
                (of_1 if era == 1 else of_2).setdefault(use.name, use)
    if not needs_2:
        of_1.update(of_version_1)
    if not makes_graphs:
        # A file that uses `tf1 = tf.compat.v1` beside `tf` and makes its graphs works unchanged in TensorFlow 2.
        of_1.update(needs_graphs | ({} if needs_2 else beside_version_2))
    return EraEvidence(of_1, of_2, old_of_2, switches_to_2)


def _is_plain_tensorflow_name(use: NameUse) -> bool:
    """Returns whether a use reads a name of `import tensorflow as tf` other than the version of TensorFlow."""
    versions = ("tensorflow.compat", "tensorflow.__", "tensorflow.version")
    return use.alias == "tensorflow" and not use.name.startswith(versions)


def _has_old_keywords(use: NameUse) -> bool:
    given = use.call.keywords if use.call else ()
    if numpy_version() >= (2, 0) and not KEYWORDS.get(use.name, frozenset()).isdisjoint(given):
        return True
    return any(word in _OLD_KEYWORDS.get(part, ()) for part in use.name.split(".") for word in given)


def _needs_older_version(use: NameUse) -> bool:
    """Returns whether only an older version of TensorFlow 2, Keras, numpy or Python has the used name."""
    if use.name == METHODS_OF_LEGACY:  # classes of TensorFlow 1 and of the legacy namespace still have these methods
        return not use.alias.startswith(_VERSION_1) and "legacy" not in use.alias
    old = _OLD_BESIDE_NUMPY_2 if numpy_version() >= (2, 0) else _OLD_OF_2
    found = use.name
    while found and found not in old:
        found = found.rpartition(".")[0]
    if not found or not _is_still_installed(found):
        return bool(found)
    # Both versions have the module: the name counts as old if only the older module has it.
    return not _is_still_installed(use.name) and is_installed(OF_2.modules.get(found, found) + use.name[len(found) :])


@functools.cache
def _is_still_installed(name: str) -> bool:
    """Returns whether the installed Keras still has a name of an older Keras."""
    for start, place in _INSTALLED.items():
        if name.startswith(start):
            return is_installed(place + name[len(start) :])
    return False


def _find_era_of_name(name: str) -> int:
    """Returns 1 or 2 for a name that only TensorFlow 1 or only TensorFlow 2 has, else 0."""
    if name in _HELPERS_OF_1 or name.startswith(_MODULES_OF_1):
        return 1
    for prefix in _VERSION_1:
        if name.startswith(prefix):
            return 1 if _is_only_in(1, name[len(prefix) :]) else 0
    name = name.replace("tensorflow_core.", "tensorflow.", 1)
    if not name.startswith("tensorflow."):
        return 0
    rest = name[len("tensorflow.") :]
    if rest.startswith("compat."):
        return 0
    return 1 if _is_only_in(1, rest) else 2 if _is_only_in(2, rest) else 0


def _is_only_in(era: int, name: str) -> bool:
    """Returns whether only this era has a name below `tf`, or a namespace that the name is in."""
    parts = name.split(".")
    return any(part in names_only_in(era, ".".join(parts[:number])) for number, part in enumerate(parts))
