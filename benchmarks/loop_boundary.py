"""What it saves that steps in a loop overlap: step times with `overlap_loop_steps` on and off.

    python benchmarks/loop_boundary.py [--rates 1gbit,300mbit] [--optimizers lamb,adam] [--models layers] [--loop 10]

Two ranks with one core each on two hosts, or on the loopback, as in benchmarks/tailing.py, whose models and optimizers
these are, with loss scaling and tail optimisation. Both contenders train in one job, in loops of the same number of
steps, and take turns. Printed are median step times, the median over rounds of their ratio, and the time that the
exchange and the processor take for a step by themselves.

Aims: on at most 0.95 of off where the exchange takes longer than the step's work, and nowhere above 1.02 of it.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.tailing import INITIAL_SCALE, MODELS, make_optimizer, run_ranks  # noqa: E402

OFF, ON = "steps one after the other", "steps overlap"
EXCHANGE = "exchange alone"


class Training:
    """A model under training in a session of its own."""

    def __init__(self, options, overlaps, config):
        import tensorflow as tf

        from npu_bridge.estimator.npu import util
        from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
        from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
        from npu_bridge.options import of_graph, read_session_config
        from npu_bridge.options.reading import with_entry

        tf1 = tf.compat.v1
        values = {"iterations_per_loop": options.loop, "overlap_loop_steps": overlaps, "is_tailing_optimization": True}
        with tf.Graph().as_default() as graph, tf1.variable_scope("model", use_resource=True):
            of_graph.publish(read_session_config(with_entry(None, values)))
            manager = ExponentialUpdateLossScaleManager(INITIAL_SCALE, 2000, 1, 2, 0.5)
            optimizer = NPUOptimizer(make_optimizer(options.optimizers), manager, True, True, True, name="step")
            train_op = optimizer.minimize(MODELS[options.models](tf1))
            self.sizes = [variable.shape.num_elements() for variable in tf1.trainable_variables()]
            self._session = tf1.Session(graph=graph, config=config)
            self._session.run(tf1.global_variables_initializer())
            self._step = util.set_iteration_per_loop(self._session, train_op, options.loop)
        self._loop = options.loop

    def secs(self):
        """Seconds of a step, and of its processor time."""
        start, work = time.perf_counter(), time.process_time()
        self._session.run(self._step)
        return (time.perf_counter() - start) / self._loop, (time.process_time() - work) / self._loop


class Exchange:
    """Gradients of the same sizes that travel without a step."""

    def __init__(self, sizes, config):
        import horovod.tensorflow as hvd
        import tensorflow as tf

        with tf.Graph().as_default() as graph:
            sent = [tf.compat.v1.get_variable(f"sent_{number}", [size]) for number, size in enumerate(sizes)]
            arrived = hvd.grouped_allreduce([each.read_value() for each in sent], op=hvd.Average, name="wire")
            self._arrived = tf.stack([tensor[0] for tensor in arrived])
            self._session = tf.compat.v1.Session(graph=graph, config=config)
            self._session.run(tf.compat.v1.global_variables_initializer())

    def secs(self):
        """Seconds of an exchange, and of its processor time."""
        start, work = time.perf_counter(), time.process_time()
        self._session.run(self._arrived)
        return time.perf_counter() - start, time.process_time() - work


def measure(options):
    """On a rank: seconds of a step and of its processor time, per round and contender; rank 0 prints them as JSON."""
    import tensorflow as tf

    from benchmarks.lab.one_core import keep_rank_on_one_core
    from npu_bridge import collective

    rank = collective.current().rank
    keep_rank_on_one_core(rank)
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=2, intra_op_parallelism_threads=1)
    contenders = {OFF: Training(options, False, config), ON: Training(options, True, config)}
    sizes = contenders[OFF].sizes
    contenders[EXCHANGE] = Exchange(sizes, config)
    rounds = []
    for number in range(options.rounds + 1):
        order = random.Random(number).sample(sorted(contenders), len(contenders))  # the same on every rank
        rounds.append({name: contenders[name].secs() for name in order})
    if rank == 0:
        result = {"parameters": sum(sizes), "variables": len(sizes), "rounds": rounds[1:]}
        print("result " + json.dumps(result), flush=True)


def report(result, place, setting):
    rounds = result["rounds"]
    median = {name: statistics.median(row[name][0] for row in rounds) for name in rounds[0]}
    work = statistics.median(row[OFF][1] for row in rounds)
    ratio = statistics.median(row[ON][0] / row[OFF][0] for row in rounds)
    print(
        f"\n{setting.models}, {setting.optimizers}, {place}: {result['parameters'] / 1e6:.1f} million parameters in "
        f"{result['variables']} variables, loops of {setting.loop}, {len(rounds)} rounds"
    )
    for name in (OFF, ON):
        print(f"  {name:28} {median[name] * 1000:7.0f} ms")
    print(f"  exchange {median[EXCHANGE]:.2f} s, processor {work:.2f} s   on / off {ratio:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="1gbit,300mbit", help="of each host's link, as tc writes them")
    parser.add_argument("--optimizers", default="lamb,adam")
    parser.add_argument("--models", default="layers,bert")
    parser.add_argument("--loop", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(options)
        return
    for model in options.models.split(","):
        for optimizer in options.optimizers.split(","):
            for rate in options.rates.split(","):
                setting = argparse.Namespace(
                    rounds=options.rounds, optimizers=optimizer, models=model, loop=options.loop
                )
                words = ["--rounds", setting.rounds, "--optimizers", optimizer, "--models", model]
                report(*run_ranks(__file__, [*words, "--loop", setting.loop], rate), setting)


if __name__ == "__main__":
    main()
