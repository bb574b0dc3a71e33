"""What the switch of accelerate_train_mode costs, and what its two parts run at.

    python benchmarks/precision_switch.py [--low float16] [--layers 6] [--units 128] [--steps 60]

One session trains a chain of dense layers, first in low precision, then in float32. Printed are the first step, which
builds the first executor; the step of the switch, which builds the second; their ratio (aim: at most about 1); and the
median step of each part, as ratios to those of a stock float32 session that takes turns with it. Medians over rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf  # noqa: E402

from npu_bridge.base import environment  # noqa: E402
from npu_bridge.options import read_session_config, with_entry  # noqa: E402
from npu_bridge.session.precision import Precision, attach, list_builds  # noqa: E402

tf1 = tf.compat.v1
PLANS = {"float16": "fast|step|0.5", "bfloat16": "fast1|step|0.5"}


def build_model(layers, units):
    with tf.Graph().as_default() as graph:
        tf1.set_random_seed(1)
        activation = tf1.random_uniform([64, units], seed=2)
        for layer in range(layers):
            kernel = tf1.get_variable(f"kernel_{layer}", [units, units])
            activation = tf.nn.relu(tf.matmul(activation, kernel))
        loss = tf.reduce_mean(tf.square(activation))
        train_op = tf1.train.AdamOptimizer(1e-3).minimize(loss)
        return graph, train_op, tf1.global_variables_initializer()


def secs(session, op):
    start = time.perf_counter()
    session.run(op)
    return time.perf_counter() - start


def one_round(arguments):
    """Times of a fresh pair of sessions: accelerated steps, stock steps, and the executors built for training."""
    graph, train_op, init = build_model(arguments.layers, arguments.units)
    key = {"experimental_accelerate_train_mode": PLANS[arguments.low]}
    precision, config = Precision(read_session_config(with_entry(None, key))), tf1.ConfigProto()
    precision.prepare(config)
    ours, stock = [], []
    environment.write_variable("TOTAL_STEP", arguments.steps)
    with tf1.Session(graph=graph, config=config) as session, tf1.Session(graph=graph) as stock_session:
        attach(session, precision)
        session.run(init)
        stock_session.run(init)
        for step in range(arguments.steps):
            environment.write_variable("STEP_NOW", step)
            ours.append(secs(session, train_op))
            stock.append(secs(stock_session, train_op))
        return ours, stock, [build for build in list_builds(session) if build.is_training]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--low", choices=PLANS, default="bfloat16")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--units", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60, help="half of them in each precision")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()

    one_round(arguments)  # warm-up: libraries, thread pools
    rounds = [one_round(arguments) for _ in range(arguments.rounds)]
    half = arguments.steps // 2

    def median(pick):
        return statistics.median(pick(*measured) for measured in rounds)

    builds = {len(built) for _, _, built in rounds}
    print(f"{arguments.layers} layers of {arguments.units}, {arguments.low}, then float32; {arguments.rounds} rounds")
    print(f"  executors built for the training step: {', '.join(map(str, sorted(builds)))}")
    print(f"  first step          {1000 * median(lambda ours, stock, built: ours[0]):8.1f} ms")
    print(f"  first step, stock   {1000 * median(lambda ours, stock, built: stock[0]):8.1f} ms")
    print(f"  step of the switch  {1000 * median(lambda ours, stock, built: ours[half]):8.1f} ms")
    print(f"ratio switch / first step: {median(lambda ours, stock, built: ours[half] / ours[0]):.2f}")
    print(f"ratio switch / first step of stock: {median(lambda ours, stock, built: ours[half] / stock[0]):.2f}")
    for name, part in ((arguments.low, slice(2, half)), ("float32", slice(half + 2, None))):
        ratio = median(lambda ours, stock, built: statistics.median(a / b for a, b in zip(ours[part], stock[part])))  # noqa: B023
        print(f"ratio step in {name} / stock float32 step: {ratio:.2f}")


if __name__ == "__main__":
    main()
