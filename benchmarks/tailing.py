"""Measures tail optimisation: step times with and without it, beside stock wrappings.

    python benchmarks/tailing.py [--rates 2.5gbit,1gbit] [--optimizers lamb,adam] [--models layers,bert] [--rounds 8]
    python benchmarks/tailing.py --brief --rates 1gbit,none
    python benchmarks/tailing.py --rates 1gbit --optimizers lamb --models layers --picture off_and_on.svg

Two ranks with one core each on two hosts (network namespaces joined by a link of the given rate; without the
permission for that, on this machine's loopback). All contenders train in one job and take turns. Prints median step
times, the median over rounds of their ratio to the fastest loss-scaled stock wrapping, and the limit: the larger of the
gradients' time on the wire and the processor's time for a step. No step can be faster.

The peers' LAMB is the formula of tensorflow-addons' as a TF 1 optimizer, the only family that stock loss scaling
wraps. This package's own, fused LAMB is measured, too.

With overlapping steps (`iterations_per_loop`), a step is one of 13 in a call. In turns of stock wrappings, the threads
of Horovod have their usual priority; in turns of NPUOptimizer, the priority of `NPU_COMMUNICATION_PRIORITY=1`, if the
system permits it (as for root).

Aims: tailing on at most 0.85 of the best loss-scaled peer and at most 0.90 of tailing off if the exchange is long, and
never above 1.02 of tailing off; with the fused LAMB at most 0.75 of the best peer, and at most 1.15 of the limit;
overlapping steps at most 0.95 of tailing on if the exchange is long.

`--brief` leaves out tailing off and the fused optimizers. A rate of `none` is a link without limit; a rate of
`loopback` runs both ranks on one host. `--collectives tensorflow` leaves out the wrappings that need Horovod.

`--picture` draws a step with tailing off above one with tailing on, on one scale; `--overlap` draws overlapping
steps.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

HOROVOD, SCALED_OUTSIDE, SCALED_INSIDE = "Horovod, no loss scale", "loss scale(Horovod)", "Horovod(loss scale)"
OFF, ON = "NPUOptimizer, tailing off", "NPUOptimizer, tailing on"
OVERLAPPED = "NPUOptimizer, steps overlap"
FUSED_OFF, FUSED_ON = "fused, tailing off", "fused, tailing on"
WIRE_ONLY, COMPUTE_ONLY = "exchange alone", "step without exchange"
PEERS = (SCALED_OUTSIDE, SCALED_INSIDE)
STOCK = (HOROVOD, *PEERS, WIRE_ONLY)
INITIAL_SCALE = 2.0**10
STEPS_IN_A_ROW = 13


def layers_model(tf1, width=577, depth=60, batch=192):
    """Builds square layers: 20 million parameters in 60 variables."""
    activation = tf1.random_uniform([batch, width])  # with a seed, steps would not be copied
    for layer in range(depth):
        weight = tf1.get_variable(
            f"layer_{layer}", [width, width], initializer=tf1.random_normal_initializer(stddev=width**-0.5, seed=layer)
        )
        activation = tf1.tanh(tf1.matmul(activation, weight))
    return tf1.reduce_mean(tf1.square(activation))


def bert_model(tf1, width=384, depth=6, batch=4, length=48, words=8192):
    """Builds attention blocks on an embedding that is also the output: 14 million parameters in 99 variables."""
    import tensorflow as tf

    def dense(name, values, units, activation=None):
        kernel = tf1.get_variable(f"{name}/kernel", [values.shape[-1], units], initializer=normal)
        bias = tf1.get_variable(f"{name}/bias", [units], initializer=tf1.zeros_initializer())
        result = tf.tensordot(values, kernel, 1) + bias
        return result if activation is None else activation(result)

    def normalised(name, values):
        gain = tf1.get_variable(f"{name}/gain", [width], initializer=tf1.ones_initializer())
        shift = tf1.get_variable(f"{name}/shift", [width], initializer=tf1.zeros_initializer())
        centre, spread = tf.nn.moments(values, [-1], keepdims=True)
        return (values - centre) * tf.math.rsqrt(spread + 1e-6) * gain + shift

    normal = tf1.random_normal_initializer(stddev=0.02, seed=1)
    tokens = tf1.random_uniform([batch, length], 0, words, tf.int32)
    embedding = tf1.get_variable("embedding", [words, width], initializer=normal)
    values = tf.reshape(tf.matmul(tf.one_hot(tf.reshape(tokens, [-1]), words), embedding), [batch, length, width])
    for layer in range(depth):
        with tf1.variable_scope(f"block_{layer}"):
            query, key, value = (dense(name, values, width) for name in ("query", "key", "value"))
            weights = tf.nn.softmax(tf.matmul(query, key, transpose_b=True) * width**-0.5)
            values = normalised("attended", values + dense("mixed", tf.matmul(weights, value), width))
            inner = dense("inner", values, 4 * width, tf.nn.gelu)
            values = normalised("out", values + dense("outer", inner, width))
    logits = tf.tensordot(values, tf.transpose(embedding), 1)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tokens, logits=logits))


def small_model(tf1):
    """Builds a model too small to measure, to see that everything runs."""
    return layers_model(tf1, width=40, depth=8, batch=16)


MODELS = {"layers": layers_model, "bert": bert_model, "small": small_model}


def make_optimizer(name):
    import tensorflow as tf

    tf1 = tf.compat.v1
    if name == "adam":
        return tf1.train.AdamOptimizer(1e-4)

    class Lamb(tf1.train.Optimizer):
        """Layer-wise adaptive moments as a TF 1 optimizer, the only family that all contenders can wrap."""

        def __init__(self):
            super().__init__(use_locking=False, name="Lamb")

        def _create_slots(self, var_list):
            for variable in var_list:
                self._zeros_slot(variable, "m", self._name)
                self._zeros_slot(variable, "v", self._name)

        def _resource_apply_dense(self, grad, variable):
            first = self.get_slot(variable, "m")
            second = self.get_slot(variable, "v")
            first_now = 0.9 * first + 0.1 * grad
            second_now = 0.999 * second + 0.001 * tf.square(grad)
            update = first_now / (tf.sqrt(second_now) + 1e-6) + 0.01 * variable
            ratio = tf.math.divide_no_nan(tf.norm(variable), tf.norm(update))
            moved = variable - 1e-4 * tf.where(tf.equal(ratio, 0.0), 1.0, ratio) * update
            return tf.group(first.assign(first_now), second.assign(second_now), variable.assign(moved))

    return Lamb()


def contenders(optimizer_name):
    """Returns a dict from contender to a function that makes its optimizer."""
    import tensorflow as tf

    from npu_bridge.collective.engines.engine_of_ranks import choose_engine
    from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
    from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer

    def stock_scale(optimizer):
        scale = tf.compat.v1.mixed_precision.DynamicLossScale(INITIAL_SCALE, increment_period=2000)
        return tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer(optimizer, scale)

    def distributed(optimizer, name):
        import horovod.tensorflow as hvd

        return hvd.DistributedOptimizer(optimizer, name=name)

    def ours(optimizer, is_tailing, is_distributed=True, name=None):
        manager = ExponentialUpdateLossScaleManager(INITIAL_SCALE, 2000, 1, 2, 0.5)
        return NPUOptimizer(optimizer, manager, is_distributed, True, is_tailing, name=name)

    def fused(name):
        from npu_bridge.optimizers import tf1

        return {"adam": tf1.Adam, "lamb": functools.partial(tf1.LAMB, weight_decay=0.01)}[name](1e-4, fused=True)

    inner = make_optimizer
    made = {
        HOROVOD: lambda: distributed(inner(optimizer_name), "alone"),
        SCALED_OUTSIDE: lambda: stock_scale(distributed(inner(optimizer_name), "inside")),
        SCALED_INSIDE: lambda: distributed(stock_scale(inner(optimizer_name)), "outside"),
        OFF: lambda: ours(inner(optimizer_name), False, name="off"),
        ON: lambda: ours(inner(optimizer_name), True, name="on"),
        OVERLAPPED: lambda: ours(inner(optimizer_name), True, name="overlapped"),
        FUSED_OFF: lambda: ours(fused(optimizer_name), False, name="fused_off"),
        FUSED_ON: lambda: ours(fused(optimizer_name), True, name="fused_on"),
        COMPUTE_ONLY: lambda: ours(inner(optimizer_name), False, is_distributed=False, name="alone"),
    }
    return {name: wrap for name, wrap in made.items() if choose_engine() == "horovod" or name not in STOCK}


def build_steps(options):
    """Builds one training step per contender, each with its own model, and the exchange alone."""
    import tensorflow as tf

    from npu_bridge import collective
    from npu_bridge.base.environment import set_variables_temporarily
    from npu_bridge.collective.engines.engine_of_ranks import choose_engine
    from npu_bridge.collective.fragments import all_reduce_bytes
    from npu_bridge.session.iterations import name_step

    tf1 = tf.compat.v1
    steps = {}
    for number, (name, wrap) in enumerate(contenders(options.optimizers).items()):
        if options.brief and name in (OFF, FUSED_OFF, FUSED_ON):
            continue
        with tf1.variable_scope(f"contender_{number}", use_resource=True):
            loss = MODELS[options.models](tf1)
            # As with options that request steps in a row.
            pieces = str(all_reduce_bytes(collective.current().size, overlaps_next_step=name == OVERLAPPED))
            with set_variables_temporarily(lambda pieces=pieces: {"FUSION_TENSOR_SIZE": pieces}):
                optimizer = wrap()
                steps[name] = optimizer.apply_gradients(optimizer.compute_gradients(loss))
            if name == OVERLAPPED:
                steps[name] = name_step(steps[name])
            variables = tf1.trainable_variables(f"contender_{number}/")
    values = [variable.read_value() for variable in variables]
    if choose_engine() == "horovod":
        import horovod.tensorflow as hvd

        exchanged = hvd.grouped_allreduce(values, op=hvd.Average, name="wire")
    else:
        exchanged = collective.current().all_reduce(values, "wire")
    steps[WIRE_ONLY] = tf.stack([tf.reshape(tensor, [-1])[0] for tensor in exchanged])
    return steps, sum(variable.shape.num_elements() for variable in variables), len(variables)


def measure(options):
    """Measures on a rank, for each round and contender, seconds and processor time of a step; rank 0 prints JSON."""
    import tensorflow as tf

    from benchmarks.lab.one_core import keep_rank_on_one_core
    from benchmarks.lab.tail_record import record_steps
    from npu_bridge import collective
    from npu_bridge.session.iterations import train_in_loops

    os.environ["NPU_OVERLAPPED_STEPS"] = os.environ["NPU_COMMUNICATION_PRIORITY"] = "1"
    rank = collective.current().rank
    keep_rank_on_one_core(rank)
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=2, intra_op_parallelism_threads=1)
    with tf.Graph().as_default():
        steps, parameters, count = build_steps(options)
        rounds = []
        with tf.compat.v1.Session(config=config) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            train_in_loops(session, STEPS_IN_A_ROW)
            session.run(steps[OVERLAPPED])
            for number in range(options.rounds + 1):
                order = random.Random(number).sample(sorted(steps), len(steps))  # the same on every rank
                rounds.append({name: _timed(session, name, steps[name], steps[WIRE_ONLY]) for name in order})
            if options.picture:
                record_steps(session, {name: steps[name] for name in (OFF, ON)}, options.picture, rank)
            if options.overlap:
                record_steps(session, {OVERLAPPED: steps[OVERLAPPED]}, options.overlap, rank, STEPS_IN_A_ROW)
    if rank == 0:
        print("result " + json.dumps({"parameters": parameters, "variables": count, "rounds": rounds[1:]}))


def _timed(session, name, step, barrier):
    from npu_bridge.collective.engines import thread_priority

    runs, steps = (1, STEPS_IN_A_ROW) if name == OVERLAPPED else (2, 2)
    thread_priority.set_real_time(name not in STOCK)
    session.run(step if name != OVERLAPPED else barrier)  # ranks start together
    start, work = time.perf_counter(), time.process_time()
    for _ in range(runs):
        session.run(step)
    return (time.perf_counter() - start) / steps, (time.process_time() - work) / steps


def choose_engine(engine):
    """Makes the ranks of the next jobs exchange tensors by an engine: "horovod" or "tensorflow"."""
    os.environ.update(NPU_COLLECTIVES=engine, NPU_ALLOW_OPEN_PORTS="1")


def run_ranks(script, words, rate):
    """Starts the workers of a benchmark as two ranks; returns rank 0's report and where they ran."""
    from benchmarks.lab.two_hosts import reason_for_no_hosts, two_hosts

    words = [script, "--worker", *words]
    if rate == "loopback" or reason_for_no_hosts():
        command = [sys.executable, "-m", "npu_bridge.run", "-np", "2", *map(str, words)]
        text, place = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout, "loopback"
    else:
        with two_hosts(rate=None if rate == "none" else rate) as hosts:
            text, place = hosts.run_ranks(*words).text, rate
    results = [line.partition("result ")[2] for line in text.splitlines() if "result {" in line]
    if not results:
        sys.exit(f"{pathlib.Path(script).stem}: the ranks did not finish:\n{text}")
    return json.loads(results[0]), place


def report(result, place, optimizer, model):
    rounds = result["rounds"]
    median = {name: statistics.median(row[name][0] for row in rounds) for name in rounds[0]}
    best = min((name for name in PEERS if name in median), key=median.get, default=ON)
    print(
        f"\n{model}, {optimizer}, {place}: {result['parameters'] / 1e6:.1f} million parameters in "
        f"{result['variables']} variables, {len(rounds)} rounds"
    )

    def ratio(name, peer):
        return statistics.median(row[name][0] / row[peer][0] for row in rounds)

    for name in median:
        if name not in (WIRE_ONLY, COMPUTE_ONLY):
            print(f"  {name:28} {median[name] * 1000:7.0f} ms   {ratio(name, best):.3f} of {best}")
    for off, on in ((OFF, ON), (ON, OVERLAPPED), (FUSED_OFF, FUSED_ON)):
        if off not in median:
            continue
        work = statistics.median(row[on][1] for row in rounds)
        limit = max(median[WIRE_ONLY], work)
        beside = f"{ratio(on, HOROVOD):.2f} of {HOROVOD}   " if HOROVOD in median else ""
        print(
            f"  {on}: {ratio(on, off):.3f} of {off}   {beside}"
            f"{median[on] / limit:.2f} of the limit (exchange {median[WIRE_ONLY]:.3f} s, processor {work:.3f} s, "
            f"step without exchange {median[COMPUTE_ONLY]:.3f} s)"
        )


def main():
    from benchmarks.lab.tail_record import draw_overlap, draw_steps

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="2.5gbit,1gbit", help="of each host's link, as tc writes them")
    parser.add_argument("--optimizers", default="lamb,adam")
    parser.add_argument("--models", default="layers,bert")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--brief", action="store_true", help="neither tailing off nor fused optimizers")
    parser.add_argument("--picture", metavar="FILE", help="SVG of a step with tailing off and on")
    parser.add_argument("--overlap", metavar="FILE", help="SVG of steps that overlap")
    parser.add_argument("--collectives", choices=("horovod", "tensorflow"), default="horovod")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(options)
        return
    choose_engine(options.collectives)
    pictures = {"--picture": options.picture, "--overlap": options.overlap}
    if any(pictures.values()) and "," in options.models + options.optimizers + options.rates:
        parser.error("a picture shows one setting: choose one of --models, one of --optimizers and one of --rates")
    if options.picture and options.brief:
        parser.error("--picture shows tailing off, which --brief leaves out")
    for model in options.models.split(","):
        for optimizer in options.optimizers.split(","):
            for rate in options.rates.split(","):
                words = ["--rounds", options.rounds, "--optimizers", optimizer, "--models", model]
                words += ["--brief"] if options.brief else []
                with tempfile.TemporaryDirectory() as folder:
                    words += [word for name, file in pictures.items() if file for word in (name, folder)]
                    report(*run_ranks(__file__, words, rate), optimizer, model)
                    if options.picture:
                        draw_steps(folder, (OFF, ON), 2, options.picture)
                    if options.overlap:
                        draw_overlap(folder, OVERLAPPED, 2, options.overlap)


if __name__ == "__main__":
    main()
