"""Measures the cost of the switch of accelerate_train_mode, and the speed of its two parts.

    python benchmarks/precision_switch.py [--low float16] [--model bert] [--layers 6] [--units 128] [--steps 60]
    TF_ENABLE_ONEDNN_OPTS=0 python benchmarks/precision_switch.py --model bert  # imitated bfloat16

One session trains a chain of dense layers, or the BERT of `configs/bert_tiny.toml`, first in low precision, then in
float32. Prints the first step, which builds the first executor; the step of the switch, which builds the second; their
ratio (aim: at most about 1); and the median step of each part, as ratios to those of a stock float32 session of an
equal graph, in turns (aim if the low precision is imitated: at most 1.5). Medians over rounds.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from npu_bridge.base import environment  # noqa: E402
from npu_bridge.options import read_session_config, with_optimizer_entry  # noqa: E402
from npu_bridge.session.precision import Precision, attach_precision, list_builds  # noqa: E402

tf1 = tf.compat.v1
PLANS = {"float16": "fast|step|0.5", "bfloat16": "fast1|step|0.5"}


def chain(arguments):
    """Returns the loss of a chain of dense layers."""
    activation = tf1.random_uniform([64, arguments.units], seed=2)
    for layer in range(arguments.layers):
        kernel = tf1.get_variable(f"kernel_{layer}", [arguments.units, arguments.units])
        activation = tf.nn.relu(tf.matmul(activation, kernel))
    return tf.reduce_mean(tf.square(activation))


def bert(arguments):
    """Returns the loss of the BERT of `configs/bert_tiny.toml` on one batch: 32 rows of 64 tokens, 10 hidden."""
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples" / "bert_pretrain"))
    from model import ModelSize, masked_language_model

    def ids(count, width):
        return tf.constant(np.random.RandomState(width).randint(5, count, [32, width]), tf.int32)

    features = {"token_ids": ids(2048, 64), "segment_ids": tf.zeros([32, 64], tf.int32), "target_ids": ids(2048, 10)}
    features.update(target_positions=ids(64, 10), target_weights=tf.ones([32, 10]))
    return masked_language_model(features, ModelSize(2048, 128, 2, 2, 512, 64), training=True).loss


MODELS = {"chain": chain, "bert": bert}


def build_model(arguments):
    with tf.Graph().as_default() as graph:
        tf1.set_random_seed(1)
        train_op = tf1.train.AdamOptimizer(1e-3).minimize(MODELS[arguments.model](arguments))
        return graph, train_op, tf1.global_variables_initializer()


def secs(session, op):
    start = time.perf_counter()
    session.run(op)
    return time.perf_counter() - start


def one_round(arguments):
    """Trains in two new sessions, one accelerated, one stock.

    Returns:
      (times of accelerated steps, times of stock steps, executors built for training, low dtype).
    """
    (graph, train_op, init), (stock_graph, stock_train_op, stock_init) = (build_model(arguments) for _ in range(2))
    key = {"experimental_accelerate_train_mode": PLANS[arguments.low]}
    precision, config = Precision(read_session_config(with_optimizer_entry(None, key))), tf1.ConfigProto()
    precision.prepare(config)
    ours, stock = [], []
    environment.write_variable("TOTAL_STEP", arguments.steps)
    with tf1.Session(graph=graph, config=config) as session, tf1.Session(graph=stock_graph) as stock_session:
        attach_precision(session, precision)
        session.run(init)
        stock_session.run(stock_init)
        for step in range(arguments.steps):
            environment.write_variable("STEP_NOW", step)
            ours.append(secs(session, train_op))
            stock.append(secs(stock_session, stock_train_op))
        builds = [build for build in list_builds(session) if build.is_training]
        return ours, stock, builds, str(precision.low)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--low", choices=PLANS, default="bfloat16")
    parser.add_argument("--model", choices=MODELS, default="chain")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--units", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60, help="half of them in each precision")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()

    *_, low = one_round(arguments)  # warm-up: libraries, thread pools
    rounds = [one_round(arguments)[:3] for _ in range(arguments.rounds)]
    half = arguments.steps // 2

    def median(pick):
        return statistics.median(pick(*measured) for measured in rounds)

    builds = {len(built) for _, _, built in rounds}
    size = f" of {arguments.layers} layers of {arguments.units}" if arguments.model == "chain" else ""
    print(f"{arguments.model}{size}, {low}, then float32; {arguments.rounds} rounds")
    print(f"  executors built for the training step: {', '.join(map(str, sorted(builds)))}")
    print(f"  first step          {1000 * median(lambda ours, stock, built: ours[0]):8.1f} ms")
    print(f"  first step, stock   {1000 * median(lambda ours, stock, built: stock[0]):8.1f} ms")
    print(f"  step of the switch  {1000 * median(lambda ours, stock, built: ours[half]):8.1f} ms")
    print(f"ratio switch / first step: {median(lambda ours, stock, built: ours[half] / ours[0]):.2f}")
    print(f"ratio switch / first step of stock: {median(lambda ours, stock, built: ours[half] / stock[0]):.2f}")
    for name, part in ((low, slice(2, half)), ("float32", slice(half + 2, None))):
        ratio = median(lambda ours, stock, built: statistics.median(a / b for a, b in zip(ours[part], stock[part])))  # noqa: B023
        print(f"ratio step in {name} / stock float32 step: {ratio:.2f}")


if __name__ == "__main__":
    main()
