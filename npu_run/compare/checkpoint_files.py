"""Finds the tensors of a checkpoint in its files, without TensorFlow and without reading the tensors.

TensorFlow's own reader loads a whole tensor, also for a slice of it, so it cannot compare checkpoints larger than the
memory. A checkpoint is an index and data files. The index is a sorted table: blocks of entries, each of which shares
the beginning of its key with the previous one. One block lists the others, and the end of the file gives its place. A
value is a protocol buffer with dtype, shape, data file, offset and size of a tensor.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator

import numpy as np

from npu_bridge.base.reading import RefusedFileError, open_file
from npu_bridge.base.secondary_files import describe_failure
from npu_run.compare.arrays import Stored
from npu_run.compare.events import parse_fields, varint
from npu_run.compare.verdict import CannotTell

_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_DTYPES = {1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 8: "complex64", 9: "int64"}
_DTYPES.update({10: "bool", 14: "bfloat16", 17: "uint16", 18: "complex128", 19: "float16", 22: "uint32", 23: "uint64"})
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
# Folders beside checkpoints that hold other files of the same names.
_OTHERS = re.compile(r"eval.*|export|variables|assets|repeat-\d+|\..*")
_MOST_BYTES = 1 << 30  # a larger index would have millions of tensors


def checkpoints_in(path: str) -> dict[int, str]:
    """Finds checkpoints by the number at the end of their names, mostly the global step; -1 without a number.

    Args:
      path: a folder, searched with its subfolders, or a checkpoint itself, without `.index`.
    """
    if not os.path.isdir(path):
        return {_number(path): path} if os.path.isfile(f"{path}.index") else {}
    below = (
        entry.path
        for entry in os.scandir(path)
        if entry.is_dir(follow_symlinks=False) and not _OTHERS.fullmatch(entry.name)
    )
    found: dict[int, str] = {}
    for folder in sorted([path, *below], key=len):
        for name in sorted(os.listdir(folder)):
            if name.endswith(".index"):
                prefix = os.path.join(folder, name[: -len(".index")])
                found.setdefault(_number(prefix), prefix)
    return dict(sorted(found.items()))


def read_checkpoint(prefix: str) -> tuple[dict[str, Stored], list[str]]:
    """Returns the tensors of a checkpoint by name, and the names of those that are not plain numbers in one piece.

    Args:
      prefix: its path without `.index`.
    Raises:
      CannotTell: a file is missing, cut off or damaged.
    """
    index = f"{prefix}.index"
    try:
        with open_file(index, "rb", os.path.dirname(index)) as file:
            table = file.read(_MOST_BYTES)
    except RefusedFileError:
        raise
    except OSError as error:
        raise CannotTell(f"{index} cannot be read: {describe_failure(error)}.") from None
    tensors, others, shards = {}, [], 1
    try:
        for key, value in _entries(table):
            fields = dict(parse_fields(value))
            if not key:
                shards = int(fields.get(1, 1))
                continue
            name = key.decode("utf-8", "replace").removesuffix(_SUFFIX)
            dtype = _DTYPES.get(fields.get(1))
            if dtype is None or 7 in fields:
                others += [] if key.startswith(b"\0") else [name]
            elif not key.startswith(b"\0"):
                shard, offset, size = (fields.get(number, 0) for number in (3, 4, 5))
                tensors[name] = (dtype, _shape(fields.get(2, b"")), shard, offset, size)
    except (ValueError, IndexError, KeyError, TypeError, struct.error) as error:
        raise CannotTell(f"{index} is damaged: {error}.") from None
    return _placed(prefix, tensors, shards), [name for name in others if not name.startswith("_CHECKPOINTABLE")]


def _placed(prefix: str, tensors: dict, shards: int) -> dict[str, Stored]:
    placed, sizes = {}, {}
    for name, (dtype, shape, shard, offset, size) in tensors.items():
        path = f"{prefix}.data-{shard:05}-of-{shards:05}"
        if path not in sizes:
            try:
                with open_file(path, "rb", os.path.dirname(path)) as file:
                    sizes[path] = os.fstat(file.fileno()).st_size
            except FileNotFoundError:
                raise CannotTell(f"{path} is not there, which holds {name}.") from None
        if size != math.prod(shape) * (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize):
            raise CannotTell(f"{prefix}.index is damaged: {name} of shape {list(shape)} has {size} bytes.")
        if offset + size > sizes[path]:
            raise CannotTell(f"{path} is cut off: {name} ends at {offset + size} bytes, the file has {sizes[path]}.")
        placed[name] = Stored(path, offset, dtype, shape, folder=os.path.dirname(path))
    return placed


def _entries(table: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(table) < _FOOTER_BYTES or struct.unpack("<Q", table[-8:])[0] != _MAGIC:
        raise ValueError("its end is not that of an index")
    numbers, at = [], len(table) - _FOOTER_BYTES
    for _ in range(4):
        number, at = varint(table, at)
        numbers.append(number)
    for _, handle in _block(table, *numbers[2:]):
        offset, at = varint(handle, 0)
        size, _ = varint(handle, at)
        yield from _block(table, offset, size)


def _block(table: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    if offset + size + 5 > len(table):
        raise ValueError("a block ends behind the file")
    if table[offset + size]:
        raise ValueError("a block is compressed, as TensorFlow writes none")
    block = table[offset : offset + size]
    (restarts,) = struct.unpack("<I", block[-4:])
    end, at, key = size - 4 - 4 * restarts, 0, b""
    if end < 0:
        raise ValueError("a block has no end")
    while at < end:
        shared, at = varint(block, at)
        added, at = varint(block, at)
        length, at = varint(block, at)
        if shared > len(key) or at + added + length > end:
            raise ValueError("an entry ends behind its block")
        key = key[:shared] + block[at : at + added]
        yield key, block[at + added : at + added + length]
        at += added + length


def _shape(message: bytes) -> tuple[int, ...]:
    return tuple(int(dict(parse_fields(dim)).get(1, 0)) for number, dim in parse_fields(message) if number == 2)


def _number(prefix: str) -> int:
    found = re.search(r"[-_](\d+)$", os.path.basename(prefix))
    return int(found[1]) if found else -1
