"""Compares predictions of `npu-run plan` with measurements: two ranks on two hosts with a link of a known rate.

    python benchmarks/plan.py [--rates 1gbit,300mbit] [--rounds 9] [--params 20000000] [--tensors 60]

The hosts are network namespaces (benchmarks/lab), so it needs root. First the sum alone: all gradients at once, without
computation. Then whole steps with NPUDistributedOptimizer, whose computation is a chain of pauses: in one fragment,
with the default split, and with the split that the plan calls best. Pauses leave the cores to the transfers, as an
accelerator would. Prints medians, predictions and their ratio (aim: 0.85 to 1.15).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

_VALUE_BYTES = 4
_BITS_PER_SEC = {"1gbit": 1e9, "300mbit": 300e6, "100mbit": 100e6}
_LATENCY_SECS = 50e-6  # the result of ping between two namespaces, halved and rounded up
_MARK = "measured "


def paused(value, secs):
    """Returns `value` after a pause."""
    import tensorflow as tf

    def wait(tensor):
        time.sleep(secs)
        return tensor

    result = tf.numpy_function(wait, [value], tf.float32)
    result.set_shape(value.shape)
    return result


def layer(signal, weight, forward_secs, backward_secs):
    """Passes a number on; the backward pass pauses before it delivers the gradient of `weight`."""
    import tensorflow as tf

    @tf.custom_gradient
    def pause(signal, weight):
        passed = paused(signal, forward_secs)

        def backward(upstream):
            later = paused(upstream * passed, backward_secs)  # never before the forward pass
            return later, tf.fill(weight.shape, later)

        return passed, backward

    return pause(signal, weight)


def build_loss(compute_secs, options):
    """Builds a layer per variable; the forward pass takes a third of `compute_secs`, the backward pass the rest."""
    import tensorflow as tf

    signal = tf.constant(1.0)
    shape = [options.params // options.tensors]
    part = compute_secs / 3 / options.tensors
    for number in range(options.tensors):
        weight = tf.compat.v1.get_variable(
            f"weight_{number}", shape, initializer=tf.compat.v1.ones_initializer(), use_resource=True
        )
        signal = layer(signal, tf.convert_to_tensor(weight), part, 2 * part)
    return signal


def measure(options):
    """Measures on a rank the median seconds of a step, without and with the other rank; rank 0 prints them."""
    import tensorflow as tf

    from npu_bridge.npu_init import NPUDistributedOptimizer, set_split_strategy_by_size

    tf1 = tf.compat.v1
    percentages = json.loads(options.percentages)
    if percentages:
        set_split_strategy_by_size(percentages)
    with tf.Graph().as_default():
        loss = build_loss(options.compute_secs, options)
        inner = tf1.train.GradientDescentOptimizer(0.1)
        optimizers = {"alone": inner, "together": NPUDistributedOptimizer(inner)}
        # Fetches one element of each, so that every transfer must run and nothing else does.
        steps = {
            name: tf.stack([grad[0] for grad, _ in optimizer.compute_gradients(loss)])
            for name, optimizer in optimizers.items()
        }
        config = tf1.ConfigProto(inter_op_parallelism_threads=4, intra_op_parallelism_threads=1)
        with tf1.Session(config=config) as session:
            session.run(tf1.global_variables_initializer())
            secs = {name: [timed(session, step) for _ in range(options.rounds + 2)] for name, step in steps.items()}
    if os.environ["RANK_ID"] == "0":
        print(_MARK + json.dumps({name: statistics.median(times[2:]) for name, times in secs.items()}))


def timed(session, step):
    start = time.perf_counter()
    session.run(step)
    return time.perf_counter() - start


def run_on(hosts, options, compute_secs, percentages):
    """Returns the median seconds of a step on two hosts: `alone` without the other rank, `together` with it."""
    words = ["--worker", "--rounds", options.rounds, "--params", options.params, "--tensors", options.tensors]
    words += ["--compute-secs", compute_secs, "--percentages", json.dumps(percentages)]
    job = hosts.run_ranks(__file__, *words)
    lines = [line.partition(_MARK)[2] for line in job.outputs[0].splitlines() if line.startswith(_MARK)]
    if not lines:
        sys.exit(f"plan: the ranks did not finish:\n{job.text}")
    return json.loads(lines[0])


def compare(options):
    """Prints a row for each rate and kind of step."""
    from benchmarks.lab.two_hosts import two_hosts
    from npu_bridge.collective.cost_model import NetworkLink, TrainingCosts, predict_step_time, step_secs
    from npu_bridge.collective.fragments import DEFAULT_PERCENTAGES

    def training(compute_secs):
        return TrainingCosts(options.params * _VALUE_BYTES, compute_secs, options.tensors)

    print(f"{options.params} parameters in {options.tensors} variables, 2 ranks, medians of {options.rounds} steps")
    print(f"{'link':8}  {'alone':>8}  {'predicted':>9}  {'measured':>9}  {'ratio':>5}  split")
    for rate in options.rates.split(","):
        link = NetworkLink(_BITS_PER_SEC[rate] / 8, _LATENCY_SECS)
        # Computation as long as the sum, where the split matters most.
        secs = predict_step_time(2, training(0.0), link).communication_secs
        best = predict_step_time(2, training(secs), link).percentages
        with two_hosts(rate=rate) as hosts:
            for compute_secs, split in ((0.0, [100]), (secs, [100]), (secs, DEFAULT_PERCENTAGES), (secs, best)):
                measured = run_on(hosts, options, compute_secs, list(split))
                # The plan gets a measurement that is possible with one rank.
                own_secs = measured["alone"] if compute_secs else 0.0
                predicted = step_secs([share / 100 for share in split], 2, training(own_secs), link)
                times = f"{own_secs * 1e3:5.0f} ms  {predicted * 1e3:6.0f} ms  {measured['together'] * 1e3:6.0f} ms"
                shares = ", ".join(f"{share:g}" for share in split)
                print(f"{rate:8}  {times}  {predicted / measured['together']:5.2f}  {shares}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="1gbit,300mbit", help=f"of {', '.join(_BITS_PER_SEC)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--params", type=int, default=20_000_000)
    parser.add_argument("--tensors", type=int, default=60)
    for name, kind in (("--compute-secs", float), ("--percentages", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(options)
        return
    from benchmarks.lab.two_hosts import reason_for_no_hosts

    reason = reason_for_no_hosts()
    if reason:
        print(f"plan: not measured here, because {reason}")
        return
    compare(options)


if __name__ == "__main__":
    main()
