"""Runs on each rank that `npu-run doctor` starts: imports all packages and all-reduces a tensor.

Rank 0 prints each fact as soon as it is known, so that the facts before a crash or a hang are not lost.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from typing import Any, Callable

from npu_bridge.base.environment import probable_rank
from npu_bridge.collective.engines.engine_of_ranks import choose_engine

MARK = "npu-run doctor: "
_LARGE_BYTES, _RUNS = 4 * 2**20, 20


def main(arguments: list[str]) -> None:
    """Runs the trial, in which the ranks sum a tensor, and prints each failure. After a failed import there is no sum.

    Args:
      arguments: empty; or, for the checks of a single rank, "all", optionally followed by a configuration file.
    """
    tf = _run_trial_stage("import tensorflow", _import_tensorflow)
    if tf is None:
        return
    if arguments:
        _run_trial_stage("import npu_bridge.npu_init", lambda: importlib.import_module("npu_bridge.npu_init"))
    for path in arguments[1:]:
        _run_trial_stage(f"read {path}", lambda path=path: _read_config(path))
    is_missing = importlib.util.find_spec("horovod") is None
    if is_missing:
        _print_fact(horovod_is_missing=True)
    hvd = None if is_missing else _run_trial_stage("import horovod.tensorflow", _import_horovod)
    if choose_engine() == "tensorflow":
        if arguments:
            _print_fact(size=1)
        else:
            _run_trial_stage("sum a tensor", lambda: _sum_by_tensorflow(tf))
    elif hvd is not None:
        _run_trial_stage("sum a tensor", lambda: _sum_tensor(tf, hvd))


def _run_trial_stage(stage: str, action: Callable[[], Any]) -> Any:
    _print_fact(stage=stage)
    try:
        return action()
    except Exception as error:  # a broken installation can raise anything
        _print_fact(failed={stage: f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
        return None


def _import_tensorflow() -> Any:
    import tensorflow as tf

    devices = tf.config.list_physical_devices("GPU")
    names = [tf.config.experimental.get_device_details(device).get("device_name", device.name) for device in devices]
    _print_fact(tensorflow=tf.__version__, gpus=names)
    return tf


def _read_config(path: str) -> None:
    from npu_run.doctor.options import config_section

    section, problems = config_section(path)
    _print_fact(config={"rows": section.rows, "problems": problems})


def _import_horovod() -> Any:
    import horovod
    import horovod.tensorflow as hvd

    parts = ("gloo", "mpi", "nccl", "ccl", "cuda", "rocm")
    _print_fact(horovod=horovod.__version__, built=[part for part in parts if getattr(hvd, f"{part}_built")()])
    return hvd


def _sum_tensor(tf: Any, hvd: Any) -> None:
    hvd.init()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        # A placeholder: TensorFlow would fold the sum of a constant.
        value = tf.compat.v1.placeholder(tf.float32, [])
        total = session.run(hvd.allreduce(value, op=hvd.Sum, name="doctor"), {value: hvd.rank() + 1.0})
    _check_sum_over_ranks(total, hvd.size())
    _print_fact(size=hvd.size(), controller="gloo" if hvd.gloo_enabled() else "mpi" if hvd.mpi_enabled() else "none")
    if hvd.size() > 1:
        from npu_bridge.collective import current

        _print_fact(millisecs=_measure_sum_times(tf, current()))


def _sum_by_tensorflow(tf: Any) -> None:
    from npu_bridge.collective import current

    ranks = current()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        value = tf.compat.v1.placeholder(tf.float32, [])
        total = session.run(ranks.reduce(value, "sum", "doctor"), {value: ranks.rank + 1.0})
    _check_sum_over_ranks(total, ranks.size)
    _print_fact(size=ranks.size, controller="grpc", millisecs=_measure_sum_times(tf, ranks))


def _check_sum_over_ranks(total: float, rank_count: int) -> None:
    expected = rank_count * (rank_count + 1) / 2
    if total != expected:
        raise ArithmeticError(f"the sum over {rank_count} rank(s) is {total}, not {expected}")


def _measure_sum_times(tf: Any, ranks: Any) -> list[float]:
    """Returns median times in milliseconds: for the sum of one number, and of a tensor of `_LARGE_BYTES` bytes."""
    found = []
    for name, count in (("number", 1), ("large", _LARGE_BYTES // 4)):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            total = ranks.reduce(
                tf.compat.v1.placeholder_with_default(tf.ones([count]), [count]), "sum", f"doctor_{name}"
            )
            secs = []
            for _ in range(_RUNS):
                began = time.perf_counter()
                session.run(total.op)
                secs.append(time.perf_counter() - began)
        found.append(1000 * statistics.median(secs))
    return found


def _print_fact(**facts: Any) -> None:
    if probable_rank() == 0:
        print(f"{MARK}{json.dumps(facts)}", flush=True)
