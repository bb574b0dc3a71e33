"""Measures `npu-run` with many ranks on one machine: the launcher's cost per rank, and how soon it reports a failure.

    python benchmarks/many_ranks.py [--ranks 32,64,256,1024]
    python benchmarks/many_ranks.py --real 32

Ranks are small processes without TensorFlow that communicate with the launcher and its key-value server as real ones
do. Each job is started twice: in one, a rank is killed, and in the other, all ranks at once. `--real N` trains a small
model with an `NPUEstimator` on N ranks of TensorFlow and kills one of them; each takes half a gigabyte.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
LIMIT_SECS = 900
_IDLE_SECS = 3.0
# A rank without TensorFlow: `python -I -S rank.py LINK`. It meets rank 0 at the server, reports that it trains, prints
# its process number, reports twice a second, and obeys the launcher. SIGUSR1 makes it raise.
RANK = r"""
import os, select, signal, sys, time
from _socket import socket

link, rank = os.dup(int(sys.argv[1])), os.environ["HOROVOD_RANK"]
host, _, secret = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")
failing = []
signal.signal(signal.SIGUSR1, lambda *signal: failing.append(1))


def send(text):
    os.write(link, text.encode() + b"\n")


def request(line, value=b""):
    while True:
        server = socket()
        try:
            server.connect((host.partition(":")[0], int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])))
            server.sendall(f"{line} HTTP/1.1\r\nContent-Length: {len(value)}\r\n\r\n".encode() + value)
            answer = b""
            while piece := server.recv(65536):
                answer += piece
            if b" 200 " in answer.split(b"\r\n")[0]:
                return answer
        finally:
            server.close()
        time.sleep(0.05)


os.close(int(sys.argv[1]))  # its number may be beyond what `select` takes
request(f"PUT /{secret}/many/{rank}", b"here")
request(f"GET /{secret}/many/0")
send('{"can_stop_after_step": true}')
print("up", os.getpid(), flush=True)
unread = b""
while True:
    ready = select.select([link], [], [], 0.5)[0]
    if failing:
        for line in (1, 2):
            print("a line of its own", file=sys.stderr, flush=True)
        send('{"ending": {"when": %r, "code": 1, "summary": "ValueError: no loss", "tensor": "", "trace": "trace", '
             '"secondary": false}}' % time.monotonic())
        sys.exit(1)
    if not ready:
        send('{"stuck": null}')
        continue
    text = os.read(link, 4096)
    *lines, unread = (unread + text).split(b"\n")
    for line in lines if text else [b"end"]:
        if line == b"hold":
            send('{"begun": %d}' % (int(rank) % 7))
        elif line.startswith(b"end_after"):
            send('{"stopped_after": %s}' % line.split()[1].decode())
            send('{"finished": true}')
            os._exit(75)
        elif line == b"end":
            os._exit(143)
"""
# `npu-run` executes this first, so that its ranks are these.
PREPARE = """
import sys
from npu_run.job import supervisor
supervisor.rank_command = lambda script, arguments, devices, link: [sys.executable, "-I", "-S", script, str(link)]
"""
TRAINING = """
import os, resource, time
from npu_bridge.npu_init import *
import numpy as np


def input_fn():
    random = np.random.RandomState(get_rank_id())
    x = random.randn(64, 4).astype("f")
    return tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).repeat().batch(8)


def model_fn(features, labels, mode):
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(features, 1))
    optimizer = NPUDistributedOptimizer(tf.train.AdamOptimizer(0.01))
    return NPUEstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, tf.train.get_global_step()))


class Steps(tf.train.SessionRunHook):
    steps = 0

    def after_run(self, context, values):
        self.steps += 1
        if self.steps == 1:
            mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print("up", os.getpid(), mb, len(os.listdir("/proc/self/task")), flush=True)


config = NPURunConfig(model_dir="out", save_checkpoints_steps=100000)
NPUEstimator(model_fn, config=config).train(input_fn, hooks=[Steps()], max_steps=1000000)
"""
_UP = re.compile(rb"(?:\[rank (\d+)\] )?up (\d+)(?: (\d+) (\d+))?\n")
_FAILURE = re.compile(rb"npu-run: rank \d+ of \d+ ")


class Job:
    """A running `npu-run`, and its output.

    Args:
      script: a file.
      size: number of ranks.
      prepare: Python code that `npu-run` executes first.
    """

    def __init__(self, script: pathlib.Path, size: int, prepare: str = ""):
        code = f"{prepare}\nfrom npu_run.cli import main\nmain()"
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        self.size, self.output, self.began, self._told = size, b"", time.monotonic(), 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "-np", str(size), script.name],
            cwd=script.parent,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

    def read_until(self, is_there) -> float:
        """Reads more output until `is_there(output)` is true; returns the monotonic time at which it became true."""
        while not is_there(self.output):
            if not self._read():
                raise SystemExit(f"the job of {self.size} ranks has ended too early:\n{self.output.decode()[-3000:]}")
        return time.monotonic()

    def come_up(self) -> dict[int, tuple[int, ...]]:
        """Waits for all ranks; returns for each rank its process number and the other numbers that it printed."""
        self.read_until(lambda output: output.count(b"up ") >= self.size and len(_UP.findall(output)) >= self.size)
        self._told = len(self.output)
        return {int(up[0] or 0): tuple(int(word) for word in up[1:] if word) for up in _UP.findall(self.output)}

    def finish(self) -> tuple[float, list[str]]:
        """Reads the rest of the output; returns the monotonic time of its end, and its lines since all ranks are up."""
        while self._read():
            pass
        self.process.wait()
        return time.monotonic(), self.output[self._told :].decode().splitlines()

    def _read(self) -> bool:
        left = self.began + LIMIT_SECS - time.monotonic()
        if not select.select([self.process.stdout], [], [], max(left, 0.0))[0]:
            self.process.kill()
            raise SystemExit(f"the job of {self.size} ranks takes too long:\n{self.output.decode()[-3000:]}")
        text = os.read(self.process.stdout.fileno(), 1 << 20)
        self.output += text
        return bool(text)

    def cpu_secs(self) -> float:
        """Returns user and system time of the launcher."""
        words = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        """Returns the resident memory of the launcher."""
        words = pathlib.Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(words[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def open_files(self) -> int:
        """Returns the number of the launcher's open descriptors."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


class Row(NamedTuple):
    """The launcher's needs for a number of ranks.

    Attributes:
      up_secs: from the start of the launcher until all ranks have met.
      busy: the share of a core that the launcher uses while ranks only report.
      line_secs, end_secs: from the death of a rank to the line that names it, and to the end of the job.
      all_end_secs, lines: from the death of all ranks to the end of the job, and the number of lines about their death.
      files, memory_mb: open files and memory of the launcher.
    """

    up_secs: float
    up_cpu_secs: float
    busy: float
    line_secs: float
    end_secs: float
    all_end_secs: float
    lines: int
    files: int
    memory_mb: float


def measure(script: pathlib.Path, size: int) -> Row:
    """Measures two jobs of small ranks."""
    job = Job(script, size, PREPARE)
    ranks = job.come_up()
    up_secs, cpu_secs = time.monotonic() - job.began, job.cpu_secs()
    time.sleep(_IDLE_SECS)
    busy = (job.cpu_secs() - cpu_secs) / _IDLE_SECS
    files, memory_mb = job.open_files(), job.memory_mb()
    killed = time.monotonic()
    os.kill(ranks[size // 2][0], signal.SIGKILL)
    line = job.read_until(lambda output: _FAILURE.search(output) is not None)
    end, _ = job.finish()
    other = Job(script, size, PREPARE)
    ranks = other.come_up()
    all_killed = time.monotonic()
    for process, *_ in ranks.values():
        os.kill(process, signal.SIGKILL)
    all_end, lines = other.finish()
    return Row(up_secs, cpu_secs, busy, line - killed, end - killed, all_end - all_killed, len(lines), files, memory_mb)


def _shared_out_mb(process: int) -> float:
    """Returns the memory of a process; a page that several processes share counts in parts."""
    lines = pathlib.Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def measure_real(folder: pathlib.Path, size: int) -> None:
    """Trains on real ranks, kills one, and prints the durations."""
    script = folder / "train.py"
    script.write_text(TRAINING)
    job = Job(script, size)
    job.read_until(lambda output: b"\n" in output)
    print(f"first line          {time.monotonic() - job.began:8.1f} s", flush=True)
    ranks = job.come_up()
    print(f"first step          {time.monotonic() - job.began:8.1f} s, of the last rank", flush=True)
    own = [_shared_out_mb(process) for process, *_ in ranks.values()]
    print(f"memory of a rank    {max(rank[1] for rank in ranks.values()):8d} MB, of which its own {max(own):.0f} MB")
    print(f"threads of a rank   {max(rank[2] for rank in ranks.values()):8d}, at most")
    print(f"memory of npu-run   {job.memory_mb():8.0f} MB", flush=True)
    killed = time.monotonic()
    os.kill(ranks[size // 2][0], signal.SIGKILL)
    line = job.read_until(lambda output: _FAILURE.search(output) is not None)
    end, lines = job.finish()
    print(f"kill to its line    {line - killed:8.1f} s")
    print(f"kill to the end     {end - killed:8.1f} s")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="32,64,256,1024", help="numbers of small ranks")
    parser.add_argument("--real", type=int, metavar="N", help="real ranks instead of small ones")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.real:
            measure_real(pathlib.Path(folder), options.real)
            return
        script = pathlib.Path(folder, "rank.py")
        script.write_text(RANK)
        print("ranks  up s  CPU s  busy  line s  end s  all killed: end s  lines  files    MB")
        for size in map(int, options.ranks.split(",")):
            row = measure(script, size)
            print(
                f"{size:5d} {row.up_secs:5.1f} {row.up_cpu_secs:6.2f} {row.busy:5.0%} {row.line_secs:7.2f} "
                f"{row.end_secs:6.2f} {row.all_end_secs:18.2f} {row.lines:6d} {row.files:6d} {row.memory_mb:5.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
