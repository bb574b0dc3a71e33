"""Runs `npu-run` on small scripts, as a user would, with a time limit and the output in every failure."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from npu_bridge.base.environment import RANK_VARIABLES

ROOT = Path(__file__).resolve().parents[2]
# Only what hangs takes as long as this, however busy the machine is.
LIMIT_SECS = 300

needs_horovod = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
_SHARED_OUT = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "TF_CPP_MIN_LOG_LEVEL")

# Addresses for documentation: never this machine's.
ONE, OTHER = "192.0.2.7", "192.0.2.8"
SSH = """#!/bin/sh
# Takes options with their values and the host, then runs the command in a bare environment, as sshd would.
while [ "$1" != -- ]; do shift 2; done
shift
echo "$1" >> hosts_reached
case $1 in
  192.0.2.9) echo "ssh: connect to host $1 port 22: Connection refused" >&2; exit 255;;
esac
shift
exec env -i PATH="$PATH" HOME="$HOME" sh -c "$*"
"""


def write_script(folder: Path, text: str, name: str = "train.py") -> Path:
    """Writes a script, below a folder that need not be there, and returns its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def write_ssh(folder: Path) -> dict[str, str]:
    """Writes an `ssh` that runs commands on this machine; returns variables with which `npu-run` finds it."""
    path = folder / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(SSH)
    path.chmod(0o755)
    return {"PATH": f"{path.parent}{os.pathsep}{os.environ['PATH']}"}


# For jobs that hang or in which several ranks fail: `npu-run` waits for events in place of seconds. Ranks are taken for
# hung only once a script has made the file "hanging", and those that may yet name a cause are waited for.
PATIENT = """
import os
from npu_run.job import first_failure, hang, supervisor
first_failure.SECONDARY_GRACE_SECS = supervisor.SECONDARY_GRACE_SECS = supervisor._LEAVE_SECS = 200.0
is_hung = hang.HangDetector.is_hung
hang.HangDetector.is_hung = lambda *arguments: os.path.exists("hanging") and is_hung(*arguments)
"""


def start(
    *arguments: object, cwd: Path, output: int = subprocess.PIPE, prepare: str = "", **variables: str
) -> subprocess.Popen:
    """Starts `npu-run arguments...` in an environment that says nothing about ranks except `variables`.

    Args:
      prepare: Python code that `npu-run` executes first.
    """
    environment = {
        name: text
        for name, text in os.environ.items()
        if name not in (*RANK_VARIABLES, *_SHARED_OUT, "PYTHONUNBUFFERED")
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]).rstrip(":")
    # Ranks of a busy machine may come to each other later than Gloo waits.
    environment.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(LIMIT_SECS))
    return subprocess.Popen(
        [sys.executable, "-c", f"{prepare}\nfrom npu_run.cli import main\nmain()", *map(str, arguments)],
        cwd=cwd,
        env={**environment, **variables},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        # A test run in the background ignores SIGINT, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def read_until(process: subprocess.Popen, end: str) -> str:
    """Returns the output of a running `npu-run` up to a text; `finish` still returns the rest."""
    output = b""
    while not output.endswith(end.encode()):
        byte = os.read(process.stdout.fileno(), 1)
        assert byte, output
        output += byte
    return output.decode()


def finish(process: subprocess.Popen, limit_secs: float = LIMIT_SECS) -> tuple[int, str]:
    """Waits for the end; gives exit code and output (stdout and stderr as they came)."""
    try:
        output, _ = process.communicate(timeout=limit_secs)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"npu-run did not end within {limit_secs} s. Its output:\n{output}")
    print(output)
    # The first line is the same in every job; tests/journeys looks at it.
    return process.returncode, re.sub(r"(?m)^npu-run: starting \d+ ranks? of .*\n", "", output, count=1)


def npu_run(*arguments: object, cwd: Path, prepare: str = "", **variables: str) -> tuple[int, str]:
    """Runs `npu-run arguments...` to its end; gives exit code and output."""
    return finish(start(*arguments, cwd=cwd, prepare=prepare, **variables))


def read_screen(screen: int) -> list[bytes]:
    """Returns the lines written to a terminal, from the end that shows it; closes that end.

    The writer has ended, but its output can come in several pieces.
    """
    text = b""
    try:
        while piece := os.read(screen, 1000):
            text += piece
    except OSError as error:  # Linux's way to say that the terminal has no other user
        assert error.errno == errno.EIO
    os.close(screen)
    return text.splitlines()


def wait_for(condition, what: str, limit_secs: float = LIMIT_SECS) -> None:
    limit = time.monotonic() + limit_secs
    while not condition():
        if time.monotonic() > limit:
            pytest.fail(f"waited {limit_secs} s in vain for: {what}")
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def kept_addresses(count: int) -> Iterator[list[str]]:
    """Addresses that are free and stay so: nothing else gets their ports, and servers that allow it may share them."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("localhost", 0))
        yield [f"localhost:{each.getsockname()[1]}" for each in sockets]
