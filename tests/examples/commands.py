"""Runs the commands that the pages of the examples show, with flags added to make them short."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shlex
import subprocess
import sys
import time

import psutil

REPOSITORY = pathlib.Path(__file__).parents[2]
LIMIT_SECS = 600


def run(command, *flags):
    """Runs a command that a page shows; gives what it printed on standard output."""
    done = subprocess.run(**_how(command, flags), capture_output=True, timeout=LIMIT_SECS)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    return done.stdout


def run_warm(python, command, *flags):
    """As `run`, for a command that starts one Python; `python` is a `WarmPython`."""
    how = _how(command, flags)
    name, *arguments = how["args"]
    assert name == "python"
    done = python.run(arguments, how["cwd"], how["env"], LIMIT_SECS)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    return done.stdout


def run_until_killed(command, *flags, is_time):
    """Starts a command that a page shows, and kills all its processes at once when `is_time()` says so."""
    started = subprocess.Popen(**_how(command, flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + LIMIT_SECS
    while started.poll() is None and time.monotonic() < deadline and not is_time():
        time.sleep(0.02)
    had_ended = started.poll() is not None
    processes = [] if had_ended else [psutil.Process(started.pid)]
    for process in [child for parent in processes for child in parent.children(recursive=True)] + processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    printed, _ = started.communicate()
    assert not had_ended and time.monotonic() < deadline, printed[-6000:]


def _how(command, flags):
    pages = [REPOSITORY / "README.md", *REPOSITORY.glob("examples/*/README.md")]
    assert any(command in page.read_text() for page in pages), f"no page shows: {command}"
    scripts = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        "args": [*shlex.split(command), *map(str, flags)],
        "cwd": REPOSITORY,
        "env": {**os.environ, "PATH": scripts, "PYTHONPATH": str(REPOSITORY)},
        "text": True,
    }
