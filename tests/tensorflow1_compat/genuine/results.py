"""The file that holds what every case gave."""

from __future__ import annotations

import json

import numpy as np


def write(path, content):
    """Texts and whole numbers as JSON, float numbers as one array (float32, but for float64)."""
    numbers = {"float32": [], "float64": []}

    def packed(value):
        value = np.asarray(value)
        if value.dtype.kind in "OSU":
            return ["text", list(value.shape), [each.decode() if isinstance(each, bytes) else str(each)
                                                for each in value.ravel()]]  # fmt: skip
        if value.dtype.kind != "f":
            return [value.dtype.name, list(value.shape), value.ravel().astype(object).tolist()]
        numbers["float64" if value.dtype == np.float64 else "float32"].append(value.ravel())
        return [value.dtype.name, list(value.shape)]

    cases = {key: {name: value if isinstance(value, str) else packed(value) for name, value in each.items()}
             for key, each in content["cases"].items()}  # fmt: skip
    text = json.dumps({**content, "cases": cases}, sort_keys=False, default=str).encode()
    arrays = {name: np.concatenate([np.zeros(0)] + each).astype(name) for name, each in numbers.items()}
    np.savez_compressed(path, text=np.frombuffer(text, np.uint8), **arrays)


def read(path):
    """Returns the values given to `write`."""
    with np.load(path) as file:
        content, at = json.loads(file["text"].tobytes().decode()), {"float32": 0, "float64": 0}
        numbers = {name: file[name] for name in at}

    def unpacked(dtype, shape, values=None):
        if values is not None:
            return np.array(values, object if dtype == "text" else dtype).reshape(shape)
        kind, size = "float64" if dtype == "float64" else "float32", int(np.prod(shape))
        at[kind] += size
        return numbers[kind][at[kind] - size : at[kind]].astype(dtype).reshape(shape)

    for each in content["cases"].values():
        each.update({name: unpacked(*value) for name, value in each.items() if not isinstance(value, str)})
    return content
