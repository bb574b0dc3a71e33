"""Reads and checks the `.keras` files of `ResumeCallback`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import zipfile
from typing import Any

from npu_bridge.base.errors import listed, message
from npu_bridge.base.files import temporary_folder

BATCHES_DONE = "batches_done.txt"  # in the file of the model


def read_batches_done(path: str) -> int | None:
    """Reads the number of batches that a saved model was trained on; None if the file does not hold this number."""
    with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as saved:
        return int(saved.read(BATCHES_DONE)) if BATCHES_DONE in saved.namelist() else None
    return None  # loading the file raises the error


def read_json(path: str, name: str) -> dict:
    """Reads a JSON file inside the file of a model; an empty dict without it."""
    with zipfile.ZipFile(path) as saved:
        return json.loads(saved.read(name)) if name in saved.namelist() else {}


def load_model(model: Any, path: str) -> None:
    """Loads the weights of a saved model; for another model, raises a ValueError that names differing variables."""
    try:
        model.load_weights(path)
    except ValueError:
        different = _list_differences(model, path)
        if not different:
            raise
        problem, fix = (
            f"{path} is a checkpoint of another model",
            "Use another path, or build the model that was saved.",
        )
        raise ValueError(message("ResumeCallback", problem, "this model's variables", listed(different), fix)) from None


def _list_differences(model, path):
    """Returns a text for each variable that only one of `model` and the saved model has, or whose shapes differ."""
    with temporary_folder() as folder:
        own = os.path.join(folder, "own.keras")
        model.save(own)
        expected, found = _read_shapes(own), _read_shapes(path)
    return [
        f"{name} of shape {found.get(name, 'none')} instead of {expected.get(name, 'none')}"
        for name in dict.fromkeys([*expected, *found])
        if found.get(name) != expected.get(name)
    ]


def _read_shapes(path):
    """Returns the shapes of a saved model's variables, without its optimizer, by a text of number and layer."""
    import h5py  # needed after an error only

    shapes = {}

    def add(name, part):
        if isinstance(part, h5py.Dataset) and "/vars/" in name and "optimizer" not in name:
            layer, _, number = name.partition("/")[2].rpartition("/vars/")
            shapes[f"variable {number} of {layer}"] = part.shape

    with zipfile.ZipFile(path) as saved, h5py.File(io.BytesIO(saved.read("model.weights.h5"))) as weights:
        weights.visititems(add)
    return shapes


def is_intact_zip(path: str) -> bool:
    """Returns whether a file can be read back and all its parts have the right checksums."""
    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as saved:
        return saved.testzip() is None
    return False
