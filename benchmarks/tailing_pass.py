"""Measures the graph pass of tail optimisation by the size of the graph.

    python benchmarks/tailing_pass.py [--nodes 5000,20000,80000]

Two ranks build graphs of Horovod and a stock loss-scale optimizer with about these numbers of nodes, and run the pass
on each. Prints its seconds (the median of three) and microseconds per node: constant if the pass is linear. Aim: at
most 1 s for 20,000 nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
NODES_PER_LAYER = 70  # of a lower layer, with its gradient, exchange, check and update


def secs_of_pass(layers):
    """Builds a graph with this number of layers; returns its number of nodes, and the seconds of the pass."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from npu_bridge import collective
    from npu_bridge.tailing import optimize_tail

    tf1, ranks = tf.compat.v1, collective.current()
    with tf.Graph().as_default() as graph:
        values = tf1.placeholder(tf.float32, [8, 16])
        for layer in range(layers):
            weight = tf1.get_variable(f"weight_{layer}", [16, 16], use_resource=True)
            bias = tf1.get_variable(f"bias_{layer}", [16], use_resource=True)
            values = values + tf.tanh(tf.matmul(values, weight) + bias)
        optimizer = hvd.DistributedOptimizer(tf1.train.MomentumOptimizer(0.1, 0.9), name=f"layers_{layers}")
        scale = tf1.mixed_precision.DynamicLossScale()
        tf1.mixed_precision.MixedPrecisionLossScaleOptimizer(optimizer, scale).minimize(tf.reduce_mean(values))
        nodes = len(graph.get_operations())
        start = time.perf_counter()
        report = optimize_tail(graph, ranks)
        secs = time.perf_counter() - start
    if not report.has_changed:
        raise RuntimeError(f"tailing_pass: the pass did nothing: {report.unchanged_because}")
    return nodes, secs


def measure(options):
    """Measures on a rank nodes and median seconds for every size; rank 0 prints them as JSON."""
    from npu_bridge import collective

    results = []
    for wanted in map(int, options.nodes.split(",")):
        runs = [secs_of_pass(max(1, wanted // NODES_PER_LAYER)) for _ in range(3)]
        results.append((runs[0][0], statistics.median(secs for _, secs in runs)))
    if collective.current().rank == 0:
        print("result " + json.dumps(results))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", default="5000,20000,80000")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(options)
        return
    command = [sys.executable, "-m", "npu_bridge.run", "-np", "2", __file__, "--worker", "--nodes", options.nodes]
    outcome = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    lines = [line.partition("result ")[2] for line in outcome.stdout.splitlines() if "result [" in line]
    if not lines:
        sys.exit(f"tailing_pass: the ranks did not finish:\n{outcome.stdout}{outcome.stderr}")
    for nodes, secs in json.loads(lines[0]):
        print(f"{nodes:7} nodes  {secs:6.2f} s  {secs / nodes * 1e6:5.1f} us per node")


if __name__ == "__main__":
    main()
