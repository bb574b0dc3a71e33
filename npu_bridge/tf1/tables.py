"""Where the names of TensorFlow 1.15 are found that `tensorflow.compat.v1` no longer has.

Every module of `npu_bridge.tf1.contrib` is `tensorflow.contrib.<name>` without an entry here, and what
`tensorflow.compat.v1` holds under the same name needs none either.
"""

from __future__ import annotations

# Old module -> the module handed out instead. Modules below it are looked up below the new one.
MODULES: dict[str, str] = {
    "keras": "keras.api._v1.keras",
    "tensorflow": "tensorflow.compat.v1",
    "tensorflow.compat.v1": "tensorflow.compat.v1",
    "tensorflow.keras": "keras.api._v1.keras",
}

# "old.module.attribute" -> "module:attribute" (`module` alone is the module itself), imported when asked for.
NAMES: dict[str, str] = {
    "tensorflow.app.flags": "tensorflow.compat.v1:flags",
}

# A name or module that cannot be here -> what to use instead, as a sentence's second half.
GONE: dict[str, str] = {}
