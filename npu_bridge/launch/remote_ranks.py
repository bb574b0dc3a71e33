"""Ranks on several hosts: Horovod's own launcher, which reaches them through ssh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from npu_bridge.launch.hosts import Plan
from npu_bridge.launch.local_ranks import Outcome
from npu_bridge.launch.rank_process import rank_command

__all__ = ["become_horovods_launcher", "remote_command", "run_remote_ranks"]

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def remote_command(
    script: str, arguments: list[str], plan: Plan, log_dir: str | None = None, verbose: bool = False
) -> list[str]:
    """The command line of Horovod's launcher for a plan."""
    options = ["-np", str(plan.size), "-H", plan.hosts, "--gloo"]
    options += ["--output-filename", os.path.abspath(log_dir)] if log_dir else []
    options += ["--verbose"] if verbose else []
    ranks = rank_command(script, arguments, plan.devices)
    return [sys.executable, "-m", "horovod.runner.launch", *options, *ranks]


def become_horovods_launcher(command: list[str]) -> None:
    """Replaces this process."""
    os.execv(command[0], command)


def run_remote_ranks(command: list[str]) -> Outcome:
    """Runs Horovod's launcher to its end, passing on signals, so that it can be run again."""
    told: list[int] = []
    process = subprocess.Popen(command, start_new_session=True)

    def forward(number: int, frame: object) -> None:
        told.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if told:
        return Outcome(128 + told[0], has_failed=False)
    return Outcome(code if code >= 0 else 128 - code, has_failed=code != 0)
