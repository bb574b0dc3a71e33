"""Measures updates by optimizers of this package, beside updates by stock optimizers, with given gradients.

    python benchmarks/optimizers.py [--cases lamb,adam,momentum,scaled] [--shapes 60x333000,1000x512] [--only fused]

One core, one thread of each kind. For each case, every contender has a graph and a session in one process; they take
turns in an order that changes from round to round. Prints median and least processor time of a step, and the median
over rounds of the ratio to the peer, tensorflow-addons' LAMB or the TF 1 optimizer, which update variables one by one.
A step of the case "scaled" differentiates a scaled loss, unscales and checks the gradients, and updates; its peer does
not combine them. Processor time is the time of a step on a free core, also while other processes use this one.

Aims: LAMB at most 0.40 on 60 x 333,000 and 0.15 on 1,000 x 512; Adam 0.5 and momentum 0.7 on 1,000 x 512; neither above
1.02 on 60 x 333,000.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TFA_NO_EOL_NOTICE", "1")

import tensorflow as tf  # noqa: E402

from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager  # noqa: E402
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer  # noqa: E402
from npu_bridge.optimizers import tf1 as ours  # noqa: E402

tf1 = tf.compat.v1
WARM_UP_STEPS = 120
WARM_UP_ELEMENTS = 2e8  # of all steps, if that comes first: large ops are slow


def _tfa_lamb():
    import tensorflow_addons as tfa

    return tfa.optimizers.LAMB(0.01, weight_decay=0.01)


def _scaled(**options):
    return lambda: NPUOptimizer(
        ours.Adam(0.01, fused=True), FixedLossScaleManager(1000.0), is_loss_scale=True, **options
    )


# The first one of a case is the peer.
CASES = {
    "lamb": {
        "tensorflow-addons LAMB": _tfa_lamb,
        "LAMB": lambda: ours.LAMB(0.01, weight_decay=0.01),
        "LAMB, fused": lambda: ours.LAMB(0.01, weight_decay=0.01, fused=True),
    },
    "adam": {
        "tf.compat.v1 Adam": lambda: tf1.train.AdamOptimizer(0.01),
        "Adam": lambda: ours.Adam(0.01),
        "Adam, fused": lambda: ours.Adam(0.01, fused=True),
    },
    "momentum": {
        "tf.compat.v1 Momentum": lambda: tf1.train.MomentumOptimizer(0.01, 0.9),
        "SGD, momentum": lambda: ours.SGD(0.01, 0.9),
        "SGD, momentum, fused": lambda: ours.SGD(0.01, 0.9, fused=True),
    },
    "scaled": {
        "Adam, fused": _scaled(),
        "Adam, fused, combine_grad": _scaled(combine_grad=True),
    },
}


def build_step(make_optimizer, count, size):
    """Returns a callable that runs one update of `count` variables of `size` elements, in its own session."""
    graph = tf.Graph()
    with graph.as_default():
        tf1.set_random_seed(1)
        ones, normal = tf1.ones_initializer(), tf1.random_normal_initializer()
        variables = [tf1.get_variable(f"weight_{number}", [size], initializer=ones) for number in range(count)]
        if size % 16 == 0:
            # One op makes all gradients, so that mainly the update is measured; rows of 64 bytes are not copied.
            rows = tf1.get_variable("gradients", [count * size // 16, 16], initializer=normal, trainable=False)
            gradients = [tf.reshape(part, [size]) for part in tf.split(rows.read_value(), count)]
        else:
            names = [f"gradient_{number}" for number in range(count)]
            kept = [tf1.get_variable(name, [size], initializer=normal, trainable=False) for name in names]
            gradients = [gradient.read_value() for gradient in kept]
        optimizer = make_optimizer()
        if isinstance(optimizer, NPUOptimizer):  # it must have scaled the loss itself
            step = optimizer.minimize(tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, gradients)]))
        else:
            step = optimizer.apply_gradients(list(zip(gradients, variables)))
        initialize = tf1.global_variables_initializer()
    config = tf1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
    session = tf1.Session(graph=graph, config=config)
    session.run(initialize)
    with graph.as_default():
        return session.make_callable(step)


def measure(case, count, size, rounds, steps, only=""):
    """Returns step times in seconds by contender, one for each round.

    First runs enough steps for TensorFlow to learn which ops are cheap enough to run in the current thread.
    """
    peer = next(iter(CASES[case]))
    chosen = {name: make for name, make in CASES[case].items() if name == peer or only in name}
    run = {name: build_step(make, count, size) for name, make in chosen.items()}
    times = {name: [] for name in run}
    names, shuffler = list(run), random.Random(0)
    warm_up = max(3, min(WARM_UP_STEPS, int(WARM_UP_ELEMENTS / (count * size))))
    for turn in range(rounds + 1):
        shuffler.shuffle(names)
        for name in names:
            start = time.process_time()
            for _ in range(steps if turn else warm_up):
                run[name]()
            if turn:
                times[name].append((time.process_time() - start) / steps)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--shapes", default="60x333000,1000x512")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="leave out contenders whose name lacks this, but not the peer")
    parser.add_argument("--core", type=int, default=0)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {arguments.core})
    for shape in arguments.shapes.split(","):
        count, size = map(int, shape.split("x"))
        for case in arguments.cases.split(","):
            times = measure(case, count, size, arguments.rounds, max(1, 2_000_000 // (count * size)), arguments.only)
            peer = next(iter(times.values()))
            print(f"{count} x {size}")
            for name, samples in times.items():
                ratio = statistics.median(own / other for own, other in zip(samples, peer))
                print(
                    f"  {name:26s} {1000 * statistics.median(samples):8.2f} ms  least {1000 * min(samples):8.2f} ms  "
                    f"ratio {ratio:.3f}, of the least {min(samples) / min(peer):.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
