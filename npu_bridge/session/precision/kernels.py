"""What this CPU is worth in 16 bits: measures once how fast it computes in float16, and remembers that on disk.

What the processor has units for tells little, as TensorFlow's float16 kernels use them in few operators: on a CPU with
`avx512_fp16` training scripts took 28 to 98 times as long as in float32, and 1.7 to 4 times with float32 kernels on
rounded values.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import re
import time
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.base.files import write_whole
from npu_bridge.base.machine import LOW_PRECISION_UNITS, cpu_description, cpu_features
from npu_bridge.base.reading import read_json

_ROUNDS = 3
_FILE_NAME = "float16_kernels.json"


class Float16Speed(NamedTuple):
    """What a product, a convolution and an activation together take, in milliseconds.

    Attributes:
      real_msecs: with TensorFlow's float16 kernels.
      imitated_msecs: with float32 kernels on values rounded to float16, rounding included.
    """

    real_msecs: float
    imitated_msecs: float

    @property
    def imitation_is_faster(self) -> bool:
        """Whether to imitate."""
        return self.imitated_msecs < self.real_msecs

    def __str__(self) -> str:
        return f"measured on this CPU: {self.imitated_msecs:.2g} ms with rounding, {self.real_msecs:.2g} ms in float16"


@functools.cache
def float16_speed(intra_op_threads: int = 0, inter_op_threads: int = 0) -> Float16Speed:
    """The speed of float16 on this CPU: from the user's cache folder, else measured, in half a second.

    The threads are those of the script's sessions, as in a ConfigProto. The first session of a process decides for all,
    and that may be the one made here.
    """
    place, key = _cache_file(), f"{_processor()}, TensorFlow {tf.__version__}"
    remembered = _read(place).get(key)
    if remembered is not None:
        return Float16Speed(*remembered)
    speed = measure(intra_op_threads, inter_op_threads)
    _remember(place, key, speed)
    return speed


def measure(intra_op_threads: int = 0, inter_op_threads: int = 0) -> Float16Speed:
    """Measures the kernels; a session of its own, which leaves nothing behind."""
    random = np.random.RandomState(0)
    config = tf.compat.v1.ConfigProto(
        device_count={"GPU": 0},
        intra_op_parallelism_threads=intra_op_threads,
        inter_op_parallelism_threads=inter_op_threads,
    )
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Graph().as_default() as graph, tf.device("/CPU:0"):
        values = {}

        def given(*shape):
            holder = tf.compat.v1.placeholder(tf.float32, shape)
            values[holder] = random.randn(*shape).astype(np.float32)
            return tf.cast(holder, tf.float16)

        left, right, image, filters = given(128, 128), given(128, 128), given(4, 16, 16, 16), given(3, 3, 16, 16)

        def computed(enter, leave):
            product = leave(tf.matmul(enter(left), enter(right)))
            pixels = leave(tf.nn.conv2d(enter(image), enter(filters), 1, "SAME"))
            return tf.group(product, pixels, leave(tf.tanh(enter(left))))

        real = computed(lambda value: value, lambda value: value)
        imitated = computed(lambda value: tf.cast(value, tf.float32), lambda value: tf.cast(value, tf.float16))
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        return Float16Speed(_msecs(session, real, values), _msecs(session, imitated, values))


def missing_units(low_dtype: str, description: str | None = None) -> str | None:
    """Why a CPU computes no faster in a low precision, as a clause; None when it has units for it, or nothing is known.

    The description is text as in Linux's `/proc/cpuinfo`; by default that of this machine.
    """
    features = cpu_features(cpu_description() if description is None else description)
    units = LOW_PRECISION_UNITS[low_dtype]
    if features is None or not features.isdisjoint(units):
        return None
    return f"this CPU has no {low_dtype} units ({' or '.join(units)})"


def _msecs(session, op, values):
    session.run(op, values)
    taken = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        session.run(op, values)
        taken.append(time.perf_counter() - start)
    return round(1000 * min(taken), 4)


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", cpu_description(), re.MULTILINE)
    features = re.findall(r"\b(?:avx512_fp16|amx_fp16|avx512f|avx2|f16c)\b", cpu_description())
    return " ".join([found.group(1).strip() if found else "unknown processor", *sorted(set(features))])


def _cache_file() -> pathlib.Path:
    folder = environment.read_variable("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(folder, "npu_bridge", _FILE_NAME)


def _read(place: pathlib.Path) -> dict:
    try:
        content = read_json(place)
    except (OSError, ValueError):
        return {}
    is_usable = isinstance(content, dict) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(number, (int, float)) for number in pair)
        for pair in content.values()
    )
    return content if is_usable else {}


def _remember(place: pathlib.Path, key: str, speed: Float16Speed) -> None:
    """Several ranks may write at once, and the folder may be read-only: then the next process measures again."""
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        content = {**_read(place), key: list(speed)}
        write_whole(place, json.dumps(content, indent=1))
