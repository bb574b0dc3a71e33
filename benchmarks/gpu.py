"""Times steps of BERT base and of a residual network on a GPU, beside the bare optimizer and stock mixed precision.

    python benchmarks/gpu.py [--model bert] [--rounds 10] [--steps 10]   # on a GPU
    python benchmarks/gpu.py --small                                     # anywhere: to see that it runs

Five ways to train take turns, a block of steps each, in one process: the bare optimizer in float32, with and without
TF32; stock mixed precision (`enable_mixed_precision_graph_rewrite`) in float16 with its dynamic loss scale; and
`NPUOptimizer` with a dynamic loss scale, in float32 and in float16. Prints the median steps per second, the peak of
memory, and the ratio of our float16 step to the stock one (aim: at most 1.01), the median over rounds. On a CPU the
ratio is meaningless: our way imitates float16, and the stock way stays in float32.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import numpy as np  # noqa: E402

from npu_bridge.npu_init import ExponentialUpdateLossScaleManager, NPUOptimizer, tf  # noqa: E402
from npu_bridge.options import read_session_config, with_optimizer_entry  # noqa: E402
from npu_bridge.session.precision import Precision, attach_precision  # noqa: E402

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
FIRST_SCALE, GROWTH_STEPS = 2.0**15, 2000  # the defaults of the peer


def bert(small):
    """Builds a model of 110 million parameters, or of two layers, with rows of random tokens."""
    sys.path.insert(0, str(EXAMPLES / "bert_pretrain"))
    from model import ModelSize, masked_language_model

    size = ModelSize(1024, 64, 2, 2, 128, 32) if small else ModelSize(30522, 768, 12, 12, 3072, 512, 0.1)
    batch, length, targets = (2, 16, 2) if small else (32, 128, 20)
    draw = np.random.RandomState(1)
    features = {
        "token_ids": draw.randint(5, size.vocab_size, [batch, length]),
        "segment_ids": np.zeros([batch, length]),
        "target_positions": draw.randint(0, length, [batch, targets]),
        "target_ids": draw.randint(5, size.vocab_size, [batch, targets]),
    }
    features = {name: tf.constant(value, tf.int32) for name, value in features.items()}
    return masked_language_model({**features, "target_weights": tf.ones([batch, targets])}, size, training=True).loss


def residual(small):
    """Builds a residual network of 16 bottleneck blocks, as in ResNet-50, or of two, with random pictures."""
    batch, pixels = (2, 32) if small else (64, 224)

    def conv(x, channels, size, strides=1):
        return tf.layers.conv2d(x, channels, size, strides, "same", use_bias=False)

    def norm(x):
        return tf.layers.batch_normalization(x, training=True)

    x = tf.nn.relu(norm(conv(tf.random.normal([batch, pixels, pixels, 3], seed=1), 64, 7, 2)))
    x = tf.nn.max_pool2d(x, 3, 2, "SAME")
    for stage, blocks in enumerate((1, 1) if small else (3, 4, 6, 3)):
        for block in range(blocks):
            strides, width = (2 if stage and not block else 1), 64 * 2**stage
            y = tf.nn.relu(norm(conv(x, width, 1)))
            y = tf.nn.relu(norm(conv(y, width, 3, strides)))
            y = norm(conv(y, 4 * width, 1))
            x = tf.nn.relu(y + (x if block else norm(conv(x, 4 * width, 1, strides))))
    logits = tf.layers.dense(tf.reduce_mean(x, [1, 2]), 1000)
    return tf.losses.sparse_softmax_cross_entropy(np.arange(batch), logits)


MODELS = {"bert": bert, "residual": residual}


def stock_mixed_precision(optimizer):
    scale = tf.mixed_precision.DynamicLossScale(FIRST_SCALE, GROWTH_STEPS)
    return tf.mixed_precision.enable_mixed_precision_graph_rewrite(optimizer, scale)


def ours(optimizer):
    manager = ExponentialUpdateLossScaleManager(FIRST_SCALE, GROWTH_STEPS, 1, 2, 0.5)
    return NPUOptimizer(optimizer, loss_scale_manager=manager, is_loss_scale=True)


STOCK, OURS = "stock, float16", "NPUOptimizer, float16"
# For each way the wrapper, our precision mode, and whether float32 products can use TF32.
WAYS = {
    "bare, float32": (lambda optimizer: optimizer, None, False),
    "bare, TF32": (lambda optimizer: optimizer, None, True),
    "NPUOptimizer, float32": (ours, None, False),
    STOCK: (stock_mixed_precision, None, True),
    OURS: (ours, "mixed_float16", True),
}


def build_step(model, way, small):
    """Returns a callable that trains one step in its own session."""
    wrap, mode, _ = WAYS[way]
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(1)
        train_op = wrap(tf.train.AdamOptimizer(1e-4)).minimize(MODELS[model](small))
        config = tf.ConfigProto()
        if way == STOCK:
            config.graph_options.rewrite_options.auto_mixed_precision = 1
        precision = Precision(read_session_config(with_optimizer_entry(None, {"precision_mode_v2": mode or "origin"})))
        precision.prepare(config)
        session = tf.Session(graph=graph, config=config)
        attach_precision(session, precision)
        session.run(tf.global_variables_initializer())
    tf.config.optimizer.set_experimental_options({"auto_mixed_precision": False})  # the stock way sets it for all
    return lambda: session.run(train_op)


def block_secs(step, steps):
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def peak_megabytes():
    """Returns the peak memory since the last call; None without a GPU."""
    if not tf.config.list_physical_devices("GPU"):
        return None
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20
    tf.config.experimental.reset_memory_stats("GPU:0")
    return peak


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="steps in a block")
    parser.add_argument("--small", action="store_true", help="small models, which a CPU trains in seconds")
    arguments = parser.parse_args()
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus and not arguments.small:
        sys.exit("benchmarks/gpu.py: no GPU on this machine. Expected one; got only a CPU. Add --small to try it here.")
    name = tf.config.experimental.get_device_details(gpus[0]).get("device_name") if gpus else "the CPU"
    for model in arguments.model or MODELS:
        print(f"{model}{' (small)' if arguments.small else ''} on {name}, {arguments.rounds} x {arguments.steps} steps")
        steps, peaks = {}, {}
        for way in WAYS:
            steps[way] = build_step(model, way, arguments.small)
            block_secs(steps[way], 3)  # warm-up: graph optimisation, choice of kernels, allocation
            peaks[way] = peak_megabytes()
        times, order, shuffler = {way: [] for way in WAYS}, list(WAYS), random.Random(0)
        for _ in range(arguments.rounds):
            shuffler.shuffle(order)
            for way in order:
                tf.config.experimental.enable_tensor_float_32_execution(WAYS[way][2])
                times[way].append(block_secs(steps[way], arguments.steps))
        for way, samples in times.items():
            memory = "" if peaks[way] is None else f"   {peaks[way]:8.0f} MB"
            print(f"  {way:24s} {1 / statistics.median(samples):8.2f} steps/s{memory}")
        ratios = [mine / peer for mine, peer in zip(times[OURS], times[STOCK])]
        print(f"  ratio {OURS} / {STOCK}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
