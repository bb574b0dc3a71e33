"""Finds checkpoints, and reads their tensors with TensorFlow, one whole tensor at a time."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from npu_bridge.base.reading import open_file
from npu_bridge.base.terminal import escape_in_line
from npu_run.compare.verdict import NotComparableError

_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
# Folders beside checkpoints that hold other files of the same names.
_OTHERS = re.compile(r"eval.*|export|variables|assets|repeat-\d+|\..*")


def checkpoints_in(path: str) -> dict[int, str]:
    """Returns a dict from the last whole number in a checkpoint's name (mostly the global step) to its path.

    A name without a number counts as -1. Several such checkpoints are left out beside checkpoints with numbers.

    Args:
      path: a folder, whose subfolders are searched too, or a checkpoint, without `.index`. A checkpoint of the folder
        itself goes before one of a subfolder with the same number.
    Raises:
      NotComparableError: two checkpoints of the folder itself have the same number, or two of its subfolders have one
        that the folder itself lacks.
    """
    if not os.path.isdir(path):
        return {_find_last_number(path): path} if os.path.isfile(f"{path}.index") else {}
    below = (
        entry.path
        for entry in os.scandir(path)
        if entry.is_dir(follow_symlinks=False) and not _OTHERS.fullmatch(entry.name)
    )
    found: dict[int, str] = {}
    unnumbered: NotComparableError | None = None
    for folders in ([path], sorted(below)):
        of_level: dict[int, str] = {}
        for prefix in (name.removesuffix(".index") for folder in folders for name in _list_index_files(folder)):
            number = _find_last_number(prefix)
            other = prefix if number in found else of_level.setdefault(number, prefix)
            if other != prefix:
                error = NotComparableError(
                    f"{other} and {prefix} have the same number, or none, in their names; name one checkpoint or its "
                    f"folder."
                )
                if number >= 0:
                    raise error
                unnumbered = error
        found = of_level | found
    if unnumbered is not None:
        del found[-1]
        if not found:
            raise unnumbered
    return dict(sorted(found.items()))


class SavedTensor:
    """A tensor of a checkpoint.

    Attributes:
      shape: dimensions of the tensor.
      size: number of elements.
      computed_dtype: name of the tensor's dtype.
    """

    def __init__(self, prefix: str, reader: Any, key: str, shape: list[int], dtype: str):
        self._prefix, self._reader, self._key = prefix, reader, key
        self.shape, self.size, self.computed_dtype = tuple(shape), int(np.prod(shape)), dtype

    def read(self) -> np.ndarray:
        """Returns the elements as a flat array.

        Raises:
          NotComparableError: the checkpoint is damaged.
        """
        with _convert_read_errors(self._prefix):
            return np.ravel(self._reader.get_tensor(self._key))


def read_checkpoint(prefix: str) -> dict[str, SavedTensor]:
    """Returns the numeric tensors of a checkpoint by name.

    Args:
      prefix: path of the checkpoint without `.index`.
    Raises:
      NotComparableError: a file is missing or damaged.
    """
    for path in (f"{prefix}.index", *glob.glob(f"{glob.escape(prefix)}.data-*")):
        with contextlib.suppress(FileNotFoundError), open_file(path, "rb", os.path.dirname(path)):
            pass  # only regular files of this folder are read
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow logs when it is loaded
    import tensorflow as tf

    with _convert_read_errors(prefix):
        reader = tf.train.load_checkpoint(prefix)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    return {
        key.removesuffix(_SUFFIX): SavedTensor(prefix, reader, key, shapes[key], dtype.name)
        for key, dtype in sorted(dtypes.items())
        if dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex
    }


@contextlib.contextmanager
def _convert_read_errors(prefix: str) -> Iterator[None]:
    import tensorflow as tf

    try:
        yield
    except (tf.errors.OpError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = escape_in_line(str(error).splitlines()[0][:200]) if str(error) else type(error).__name__
        raise NotComparableError(f"{prefix} cannot be read: {reason}.") from None


def _list_index_files(folder: str) -> list[str]:
    return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".index"))


def _find_last_number(prefix: str) -> int:
    """Returns the last whole number after "-", "_" or "." in a file name, or -1; 0.55 is no whole number."""
    found = re.findall(r"(?<![^-_.])(?<!\d\.)\d+(?![a-zA-Z\d]|\.\d)", os.path.basename(prefix))
    return int(found[-1]) if found else -1
