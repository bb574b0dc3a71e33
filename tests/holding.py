"""Processes that hold a folder as a training does, without TensorFlow, and die without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

from tests.warm_python import REPOSITORY

LOCK = ".training.lock"


def python(code, *arguments, **options):
    """A process without TensorFlow."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, **options)


HOLD = """
import os, signal, sys
from npu_bridge.base.held_folders import hold_folder
hold = hold_folder(sys.argv[1], "training", "a training")
print("held", flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""


def held_by_another(folder):
    """A process that holds a folder until its input ends; then it dies without a word."""
    process = python(HOLD, folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "held\n"
    return process


def leave_by_the_dead(folder):
    process = held_by_another(folder)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and (folder / LOCK).exists()
