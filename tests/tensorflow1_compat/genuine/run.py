"""Writes down what every case gives: `python run.py OUT.npz`, or `npu-run --tf1 run.py OUT.npz`.

Words after the file run only the cases whose names begin with one of them.
"""

from __future__ import annotations

import gc
import importlib
import sys
import types

import common
import tensorflow as tf
from results import write

AREAS = ("cells", "sequences", "layers", "optimizers", "metrics", "graphs", "rest")
MODULES = (
    "autograph", "checkpoint", "cluster_resolver", "crf", "cudnn_rnn", "data", "distribute", "estimator", "framework",
    "graph_editor", "image", "layers", "legacy_seq2seq", "lookup", "losses", "metrics", "mixed_precision", "nn", "opt",
    "predictor", "quantize", "recurrent", "resampler", "rnn", "seq2seq", "signal", "slim", "sparsemax", "staging",
    "stateless", "summary", "tfprof", "tpu", "training", "util",
)  # fmt: skip


def names():
    """{module: {name: signature}} of `tf.contrib`."""
    found = {}
    for name in MODULES:
        module = getattr(tf.contrib, name)
        attributes = ((each, getattr(module, each, None)) for each in dir(module) if not each.startswith("_"))
        found[name] = {key: common.signature(value) for key, value in attributes
                       if value is not None and not isinstance(value, types.ModuleType)}  # fmt: skip
    return found


def main(path, *chosen):
    tf.logging.set_verbosity(tf.logging.ERROR)
    gc.set_threshold(100000)  # thousands of small graphs are made
    for area in AREAS:
        importlib.import_module("cases_" + area)
    cases, record = {}, tf.autograph.experimental.do_not_convert(common.record)  # which would take a tenth of the time
    for key, (function, values) in common.CASES.items():
        if not chosen or key.startswith(chosen):
            cases[key] = record(function, values)
    write(path, {"names": names() if not chosen else {}, "cases": cases})


if __name__ == "__main__":
    main(*sys.argv[1:])
