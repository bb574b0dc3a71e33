"""Measures how soon an elastic job trains again after a rank was killed.

    python benchmarks/recovery.py [--ranks 4] [--rounds 5]

An `NPUEstimator` trains a BERT of the size of `configs/bert_tiny.toml` with LAMB on random rows. Again and again a
random rank is killed; then as many ranks are started again. Prints the seconds from the kill to the end of the next
step, and their parts: until the new ranks start, the import of TensorFlow (of the slowest rank), and the rest: ranks
meet, build the graph, restore the state, and run the first step.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
LIMIT_SECS = 300.0
BATCH, LENGTH, TARGETS = 8, 64, 10


class Start(NamedTuple):
    """A rank that trains: the times of its start, of the imported TensorFlow and of its first step; its steps."""

    rank: int
    pid: int
    began: float
    imported: float
    first: float
    steps: int


def train(folder: str) -> None:
    """Trains on one rank, and writes a line with the time of each step to the file `rank.pid`."""
    ticks = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # since the machine was started
    began = int(ticks) / os.sysconf("SC_CLK_TCK")
    from npu_bridge import npu_init as npu

    imported = time.clock_gettime(time.CLOCK_BOOTTIME)
    sys.path.insert(1, str(REPOSITORY / "examples" / "bert_pretrain"))
    from lamb import LAMBOptimizer
    from model import ModelSize, masked_language_model

    tf = npu.tf
    notes = pathlib.Path(folder, f"{npu.get_rank_id()}.{os.getpid()}")
    notes.write_text(f"{began} {imported}\n")

    class Steps(tf.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            with notes.open("a") as file:
                file.write(f"{time.clock_gettime(time.CLOCK_BOOTTIME)}\n")

    def input_fn():
        tokens = tf.random.uniform([BATCH, LENGTH], 5, 2000, tf.int32, seed=1)
        targets = tf.random.uniform([BATCH, TARGETS], 0, LENGTH, tf.int32, seed=2)
        features = {"token_ids": tokens, "segment_ids": tf.zeros_like(tokens), "target_positions": targets}
        features["target_ids"] = tf.gather(tokens, targets, batch_dims=1)
        features["target_weights"] = tf.ones_like(targets, tf.float32)
        return tf.data.Dataset.from_tensors(features).repeat()

    def model_fn(features, labels, mode):
        loss = masked_language_model(features, ModelSize(2048, 128, 2, 2, 512, 64), training=True).loss
        optimizer = npu.NPUOptimizer(LAMBOptimizer(1e-3, weight_decay_rate=0.01), is_distributed=True)
        op = optimizer.minimize(loss, tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=op, training_hooks=[Steps()])

    config = npu.NPURunConfig(model_dir=os.path.join(folder, "model"), save_checkpoints_steps=50)
    npu.NPUEstimator(model_fn, config=config).train(input_fn, max_steps=10**6)


def read_starts(folder: pathlib.Path) -> list[Start]:
    """Reads the starts of all ranks that have run a step."""
    found = []
    for path in folder.glob("[0-9]*.[0-9]*"):
        head, *steps = path.read_text().splitlines() or [""]
        if steps and len(head.split()) == 2:
            found.append(Start(*map(int, path.name.split(".")), *map(float, (*head.split(), steps[0])), len(steps)))
    return found


def wait_for_steps(process: subprocess.Popen, folder: pathlib.Path, ranks: int, known: set[int], steps: int):
    """Waits until each rank of the next start has run `steps` steps; returns these ranks."""
    limit = time.monotonic() + LIMIT_SECS
    while time.monotonic() < limit and process.poll() is None:
        starts = [start for start in read_starts(folder) if start.pid not in known]
        if len(starts) == ranks and min(start.steps for start in starts) >= steps:
            return starts
        time.sleep(0.05)
    sys.exit(f"no {ranks} ranks have trained; exit code {process.poll()}\n{(folder / 'log').read_text()[-4000:]}")


def measure(folder: pathlib.Path, ranks: int, rounds: int) -> None:
    """Trains, kills a rank again and again, and prints the durations of the recoveries."""
    options = ["--min-np", str(ranks), "--max-np", str(ranks), "--cool-down", "0", __file__, "--train", str(folder)]
    launcher = [sys.executable, "-c", "from npu_run.cli import main; main()", *options]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    rows = []
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(launcher, stdout=log, stderr=log, env=environment, cwd=folder) as process,
    ):
        try:
            starts = wait_for_steps(process, folder, ranks, set(), 100)
            for number in range(rounds):
                known = {start.pid for start in read_starts(folder)}
                killed = random.Random(number).choice(starts)
                os.kill(killed.pid, signal.SIGKILL)
                at = time.clock_gettime(time.CLOCK_BOOTTIME)
                starts = wait_for_steps(process, folder, ranks, known, 100)
                began, imported = min(start.began for start in starts), max(start.imported for start in starts)
                first = max(start.first for start in starts)
                rows.append((first - at, began - at, imported - began, first - imported))
                print(f"rank {killed.rank} killed: {rows[-1][0]:5.1f} s to the next step: ", end="")
                print(
                    "{:.1f} until the ranks start, {:.1f} TensorFlow, {:.1f} the rest".format(*rows[-1][1:]), flush=True
                )
        finally:
            process.terminate()
    whole, *parts = (f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in zip(*rows))
    print(f"median of {rounds} (range): {whole} s; until the ranks start {parts[0]}, ", end="")
    print(f"import of TensorFlow {parts[1]}, the rest {parts[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(pathlib.Path(folder), arguments.ranks, arguments.rounds)


if __name__ == "__main__":
    main()
