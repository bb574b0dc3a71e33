"""Times all-reduces of gradients of 20 million parameters, ours and Horovod's.

    python benchmarks/allreduce.py [--rate 1gbit] [--rounds 10] [--params 20000000] [--tensors 60]

Two ranks on two hosts (network namespaces joined by a link of the given rate; without the permission for that, two
ranks on this machine's loopback). All contenders average the same gradients, and take turns in one job. Prints median
times, bytes per step and rank counted on the interface, and two kinds of ratio, each the median over rounds: fragments
against the faster one of Horovod's ways (aim: at most 1.00), and 16-bit wire formats against gradients in their own
dtype (aim: at most 0.6 on a link of 1 Gbit/s, and half the bytes).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

FRAGMENTS, GROUPED, HOROVOD = "fragments", "one grouped all-reduce", "hvd.DistributedOptimizer"
HALF, BRAIN, HOROVOD_HALF = "fragments, wire float16", "fragments, wire bfloat16", "hvd.DistributedOptimizer, fp16"
PEERS = (GROUPED, HOROVOD)


def contenders(loss):
    """Returns a dict from contender to the averaged gradients of `loss`."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer

    def optimizer():
        return tf.compat.v1.train.GradientDescentOptimizer(0.1)

    def gradients(wrapped):
        return [grad for grad, _ in wrapped.compute_gradients(loss)]

    local = [grad for grad, _ in optimizer().compute_gradients(loss)]
    half = hvd.DistributedOptimizer(optimizer(), name="half", compression=hvd.Compression.fp16)
    return {
        FRAGMENTS: gradients(NPUDistributedOptimizer(optimizer())),
        GROUPED: hvd.grouped_allreduce(local, op=hvd.Average, name="grouped"),
        HOROVOD: gradients(hvd.DistributedOptimizer(optimizer(), name="whole")),
        HALF: gradients(NPUDistributedOptimizer(optimizer(), name="float16", wire="float16")),
        BRAIN: gradients(NPUDistributedOptimizer(optimizer(), name="bfloat16", wire="bfloat16")),
        HOROVOD_HALF: gradients(half),
    }


def measure(options):
    """Measures on a rank, for each round and contender, one time and the sent bytes; rank 0 prints them as JSON."""
    import tensorflow as tf

    from npu_bridge import collective

    rank = collective.current().rank
    with tf.Graph().as_default():
        tf.compat.v1.set_random_seed(rank)
        shape = [options.params // options.tensors]
        initializer = tf.compat.v1.random_normal_initializer()
        variables = [
            tf.compat.v1.get_variable(f"variable_{number}", shape, initializer=initializer, use_resource=True)
            for number in range(options.tensors)
        ]
        loss = tf.add_n([tf.nn.l2_loss(variable) for variable in variables])  # its gradients cost nothing
        # Fetches one element of each, so that every transfer must run and nothing else does.
        steps = {
            name: tf.stack([tf.reshape(gradient, [-1])[0] for gradient in gradients])
            for name, gradients in contenders(loss).items()
        }
        rounds = []
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for number in range(options.rounds + 1):
                order = random.Random(number).sample(sorted(steps), len(steps))  # the same on every rank
                rounds.append({name: _timed(session, steps[name]) for name in order})
    if rank == 0:
        print("result " + json.dumps(rounds[1:]))


def _timed(session, step):
    from benchmarks.lab.counters import sent_bytes

    session.run(step)  # ranks start together, and Horovod knows their transfers
    sent, start = sent_bytes(), time.perf_counter()
    session.run(step)
    return time.perf_counter() - start, sent_bytes() - sent


def run_on_two_hosts(options):
    """Starts the ranks; returns rank 0's output, where the ranks ran, and how many ranks share a byte counter."""
    from benchmarks.lab.two_hosts import reason_for_no_hosts, two_hosts

    words = [__file__, "--worker", "--rounds", options.rounds, "--params", options.params, "--tensors", options.tensors]
    reason = reason_for_no_hosts()
    if not reason:
        with two_hosts(rate=options.rate) as hosts:
            job = hosts.run_ranks(*words)
        return job.text, f"two hosts, {options.rate}", 1
    command = [sys.executable, "-m", "npu_bridge.run", "-np", "2", *map(str, words)]
    text = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout
    return text, f"loopback, because {reason}", 2


def report(rounds, place, ranks_per_counter):
    print(f"2 ranks on {place}; medians of {len(rounds)} rounds")
    for name in rounds[0]:
        secs = statistics.median(row[name][0] for row in rounds)
        sent = statistics.median(row[name][1] for row in rounds) / ranks_per_counter
        print(f"  {name:31} {secs * 1000:8.1f} ms  {sent / 1e6:7.1f} MB sent per rank")

    def ratio(name, peers):
        return statistics.median(row[name][0] / min(row[peer][0] for peer in peers) for row in rounds)

    best = min(PEERS, key=lambda peer: statistics.median(row[peer][0] for row in rounds))
    print(f"fragments / {best}: {ratio(FRAGMENTS, [best]):.2f}")
    for name in (HALF, BRAIN):
        print(f"{name} / fragments: {ratio(name, [FRAGMENTS]):.2f}")
    print(f"{HALF} / {HOROVOD_HALF}: {ratio(HALF, [HOROVOD_HALF]):.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc writes it")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--params", type=int, default=20_000_000)
    parser.add_argument("--tensors", type=int, default=60)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(options)
        return
    text, place, ranks_per_counter = run_on_two_hosts(options)
    lines = [line.partition("result ")[2] for line in text.splitlines() if "result " in line]
    if not lines:
        sys.exit(f"allreduce: the ranks did not finish:\n{text}")
    report(json.loads(lines[0]), place, ranks_per_counter)


if __name__ == "__main__":
    main()
