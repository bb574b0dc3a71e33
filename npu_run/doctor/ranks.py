"""Makes the sections of `npu-run doctor` about Horovod and ranks: one and two ranks sum a tensor in trials."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from npu_bridge.base.files import temporary_folder
from npu_bridge.base.install import CHOSEN, FIX_HOROVOD, INSTALL_HOROVOD
from npu_bridge.base.module_command import module_command
from npu_run.doctor.page import FoundProblem, PageSection
from npu_run.doctor.trial import MARK

_INSTALL_TENSORFLOW = f"pip install 'tensorflow-cpu=={CHOSEN}.*' (or 'tensorflow=={CHOSEN}.*' where there is a GPU)"
_SCRIPT = "import sys\nfrom npu_run.doctor.trial import main\n\nmain(sys.argv[1:])\n"
# Variables that tell a process its rank; the trial must not inherit them.
_PLACEMENT = ("RANK_", "CM_", "OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL", "DEVICE_I", "ASCEND_DEVICE_ID")
_HOROVOD_PLACEMENT = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


class TrialResult(NamedTuple):
    """The result of a trial.

    Attributes:
      size: number of ranks.
      facts: the findings of rank 0; a later value of a fact replaces an earlier value.
      failure: why the trial could not sum a tensor; "" if it could.
      secs: how long the trial took.
    """

    size: int
    facts: dict[str, Any]
    failure: str
    secs: float


class RunningTrial:
    """A running trial. It is started through `npu-run -np size`, so that the launcher is tested too.

    Args:
      size: number of ranks.
      limit_secs: time after which the trial is killed.
      arguments: arguments of `trial.main`.
      show_stage: called with each stage that rank 0 reaches, and with "" at the end.
    """

    def __init__(
        self,
        size: int,
        limit_secs: float,
        arguments: Sequence[str] = (),
        show_stage: Callable[[str], None] = lambda stage: None,
    ):
        self._size, self._limit_secs, self._show_stage = size, limit_secs, show_stage
        self._began = time.monotonic()
        self._folder = temporary_folder()
        script = Path(self._folder.name) / "trial.py"
        script.write_text(_SCRIPT, encoding="utf-8")
        self._process = subprocess.Popen(
            module_command("npu_bridge.run", "-np", str(size), str(script), *arguments),
            env=_trial_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._is_late = False
        self._clock = threading.Timer(limit_secs, self._kill_late_trial)
        self._clock.daemon = True
        self._clock.start()

    def stop(self) -> None:
        """Kills the trial if it is still running."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # ranks of a killed launcher end themselves

    def result(self) -> TrialResult:
        """Waits until the trial has ended, and returns its result."""
        lines = []
        facts: dict[str, Any] = {}
        for line in self._process.stdout:
            if not line.startswith(MARK):
                lines.append(line)
                continue
            fact = json.loads(line[len(MARK) :])
            if "stage" in fact:
                self._show_stage(fact["stage"])
            facts.setdefault("failed", {}).update(fact.pop("failed", {}))
            facts.update(fact)
        code = self._process.wait()
        self._clock.cancel()
        self._folder.cleanup()
        self._show_stage("")
        stage = facts.get("stage", "start")
        failure = f"no end within {self._limit_secs:.0f} s, during: {stage}" if self._is_late else ""
        failure = failure or _failure_text(code, lines, facts)
        return TrialResult(self._size, facts, failure, time.monotonic() - self._began)

    def _kill_late_trial(self) -> None:
        self._is_late = True
        self.stop()


def run_trials(
    limit_secs: float, config: str | None, show_stage: Callable[[str, str], None]
) -> tuple[TrialResult, TrialResult | None]:
    """Runs trials on one and on two ranks at the same time, as most of their time is spent on loading TensorFlow.

    Args:
      limit_secs: time that each trial can take.
      config: a configuration file for the first trial to read, or None.
      show_stage: called with the name of a trial and each stage that it reaches, and with "" at its end.
    Returns:
      The results on one and on two ranks; the second is None if the first trial has failed.
    """
    words = [] if config is None else [config]
    two = RunningTrial(
        2, limit_secs, show_stage=lambda stage: show_stage("sum on 2 ranks", "sum on 2 ranks" if stage else "")
    )
    one = RunningTrial(1, limit_secs, ["all", *words], lambda stage: show_stage("1 rank", stage))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        second = pool.submit(two.result)
        try:
            first = one.result()
            return first, None if first.failure else second.result()
        finally:
            one.stop()
            two.stop()


def horovod_section(
    on_one_rank: TrialResult, on_two_ranks: TrialResult | None
) -> tuple[PageSection, list[FoundProblem]]:
    """Returns a section with the trials' findings about TensorFlow and Horovod, and problems with their cures.

    Args:
      on_one_rank: result of the trial on one rank.
      on_two_ranks: result of the trial on two ranks; None if the first trial has failed.
    """
    facts = on_one_rank.facts
    rows = [("tensorflow", facts.get("tensorflow", "cannot be imported"))]
    if "horovod" in facts:
        rows.append(("horovod", f"{facts['horovod']}, built with {', '.join(facts['built']) or 'nothing'}"))
        rows.append(("controller", (on_two_ranks or on_one_rank).facts.get("controller", "unknown")))
    else:
        rows.append(("horovod", "not installed" if facts.get("horovod_is_missing") else "cannot be imported"))
    rows += [
        (f"sum on {trial.size} rank{'s' * (trial.size > 1)}", _result_text(trial))
        for trial in (on_one_rank, on_two_ranks)
        if trial is not None
    ]
    if on_two_ranks is not None and "millisecs" in on_two_ranks.facts:
        number, large = on_two_ranks.facts["millisecs"]
        name = "TensorFlow's own collectives" if on_two_ranks.facts.get("controller") == "grpc" else "Horovod"
        rows.append(("transfers", f"a number in {number:.1f} ms, 4 MiB in {large:.0f} ms, by {name}"))
    return PageSection("ranks, really started", rows, "ranks"), _find_problems(on_one_rank, on_two_ranks)


def _find_problems(on_one_rank: TrialResult, on_two_ranks: TrialResult | None) -> list[FoundProblem]:
    problems = []
    failed = on_one_rank.facts.get("failed", {})
    if on_one_rank.facts.get("horovod_is_missing"):
        what = "Horovod is not installed: several ranks use TensorFlow's own collectives, on one machine"
        problems.append(
            FoundProblem(what, f"For several machines (needs g++, cmake): {_describe_horovod_fix()}", is_fatal=False)
        )
    if "import npu_bridge.npu_init" in failed:
        what = f"npu_bridge.npu_init cannot be imported: {failed['import npu_bridge.npu_init']}"
        problems.append(
            FoundProblem(what, "Install npu_bridge again: pip install --force-reinstall --no-deps npu-bridge")
        )
    if on_one_rank.failure:
        if "tensorflow" not in on_one_rank.facts:
            problems.append(FoundProblem(f"TensorFlow does not work: {on_one_rank.failure}", _INSTALL_TENSORFLOW))
        else:
            fix = f"Build it again, for this TensorFlow: {_describe_horovod_fix('pip uninstall -y horovod; ')}"
            problems.append(FoundProblem(f"Horovod does not work: {on_one_rank.failure}", fix))
    if on_two_ranks is not None and on_two_ranks.failure:
        fix = "Run npu-run -np 2 on a small script, with HOROVOD_LOG_LEVEL=debug; see docs/ranks.md."
        problems.append(FoundProblem(f"Two ranks could not sum a tensor: {on_two_ranks.failure}", fix))
    return problems


def _describe_horovod_fix(first_words: str = "") -> str:
    """Returns a sentence on how to install Horovod; `first_words` is a command to run first, with a semicolon."""
    # pip can have cached a wheel that was built for another TensorFlow.
    install = INSTALL_HOROVOD.replace("pip install", "pip install --no-cache-dir") if first_words else INSTALL_HOROVOD
    return f"{FIX_HOROVOD}; or by hand: {first_words}{install}"


def lacks_horovod(one_rank: TrialResult) -> bool:
    """Returns whether the trial on one rank has loaded TensorFlow, but lacks Horovod or failed afterwards."""
    return "tensorflow" in one_rank.facts and bool(one_rank.facts.get("horovod_is_missing") or one_rank.failure)


def _failure_text(code: int, lines: Sequence[str], facts: dict[str, Any]) -> str:
    """Returns why a trial did not finish; "" if it did."""
    if facts.get("size"):
        return ""
    stage = facts.get("stage", "start")
    if facts.get("failed", {}).get(stage):
        return f"{stage}: {facts['failed'][stage]}"
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return f"{stage}: killed by {signal.Signals(number).name}"
    said = [line for line in lines if line.strip()]
    return f"{stage}: {said[-1].strip() if said else f'exit code {code}'}"


def _result_text(trial: TrialResult) -> str:
    if trial.size == 1 and not trial.failure and "controller" not in trial.facts:
        return "nothing to send"
    return f"failed: {trial.failure}" if trial.failure else f"right, after {trial.secs:.1f} s"


def _trial_environment() -> dict[str, str]:
    dropped = {f"HOROVOD_{name}" for name in _HOROVOD_PLACEMENT}
    return {name: text for name, text in os.environ.items() if name not in dropped and not name.startswith(_PLACEMENT)}
