"""`npu-run doctor`: prints a page on whether a run would work here; the page can be pasted into a report."""

from __future__ import annotations

import platform
import sys
import threading
import time

import click
from rich.console import Console

from npu_bridge.base.gpus import describe_gpus
from npu_bridge.base.install import (
    CHOSEN,
    TENSORFLOWS,
    install_command,
    is_supported_tensorflow,
    missing_packages,
    numpy_problem,
)
from npu_bridge.base.inventory import installed_version, machine_rows, version_rows
from npu_bridge.base.terminal import echo
from npu_bridge.base.tf_internals import names
from npu_run.command_line import Command, add_json_option, exit_with_message, is_quiet, print_json, print_unless_quiet
from npu_run.doctor.build import Installer, InstallError, cache_folder
from npu_run.doctor.options import environment_section, make_config_section, rank_table_section
from npu_run.doctor.page import DoctorPage, FoundProblem, PageSection, print_page
from npu_run.doctor.ranks import TrialResult, horovod_section, lacks_horovod, run_trials
from npu_run.table import PlainConsole

_HOROVOD = "0.28.1"


@click.command(cls=Command)
@click.option("--config", metavar="FILE", help="A configuration file (TOML): what would it do here?")
@click.option("--rank-table", metavar="FILE", help="A rank table (JSON): is it right, and which servers are here?")
@click.option(
    "--limit-secs",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    help="Time each of the two trial runs may take.",
)
@click.option("--fix", is_flag=True, help="Then install what is missing: Keras 2 and Estimator, Horovod.")
@add_json_option
def doctor(config: str | None, rank_table: str | None, limit_secs: float, fix: bool, as_json: bool):
    """Prints the installed versions, the machine, the settings, and whether ranks can start.

    Starts one and two processes that sum a tensor. The exit code is 1 if a run could not work, else 0; with --fix it is
    0 once Horovod is installed.
    """
    console = PlainConsole()
    with _CheckProgress(None if as_json else console) as progress:
        page = check_machine(config, rank_table, limit_secs, progress)
    if as_json:
        print_json(page.exit_code, page.make_json_facts())
    else:
        print_page(page, console, is_short=is_quiet())
    if fix:
        _install_missing(page)
    sys.exit(page.exit_code)


def _install_missing(page: DoctorPage) -> None:
    """Installs missing packages, and prints the next command; ends the process if packages were installed.

    Without Keras 2 and Estimator, TensorFlow cannot be loaded here, so it is not yet known whether Horovod works.
    """
    log = cache_folder() / "horovod.log"
    installer = Installer(sys.executable, log, _say)
    tensorflow = installed_version("tensorflow")
    packages = missing_packages(tensorflow) if tensorflow and not names.HAS_ESTIMATORS else []
    if not page.lacks_horovod and not packages:
        _say("--fix has nothing to install")
        return
    try:
        if packages:
            installer.run_pip("Keras 2 and Estimator for TensorFlow", ["--no-deps", *packages])
            if installed_version("horovod"):
                _say("they are installed. Next: npu-run doctor")
                sys.exit(0)
        _say(f"installing Horovod into {sys.prefix} (full log: {log})")
        installer.install_horovod()
    except InstallError as error:
        if log.exists() and not error.is_explained:
            echo(installer.last_lines(), err=True)
        exit_with_message(f"npu-run doctor: {error}. The full log is {log}. Run the same command to begin again.", 1)
    _say("Horovod works. Next: npu-run doctor, which lets two ranks sum a tensor, or npu-run -np 2 train.py")
    sys.exit(0)


def _say(text: str) -> None:
    print_unless_quiet(f"npu-run doctor: {text}")


class _CheckProgress:
    """Displays the current check: in one changing line on a terminal, otherwise in a line for each finished stage.

    Args:
      console: console on which the page is printed; None for JSON output.
    """

    def __init__(self, console: Console | None):
        self._is_quiet = is_quiet()  # read now: click's context exists in this thread only
        is_shown = console is not None and console.is_terminal and not self._is_quiet
        self._status = console.status("starting one rank and two ranks ...") if is_shown else None
        self._stages: dict[str, tuple[str, float]] = {}  # of each trial: its stage, and since when
        self._one_at_a_time = threading.Lock()

    def __enter__(self) -> _CheckProgress:
        if self._status is not None:
            self._status.start()
        else:
            self._say("checking one rank and two ranks, side by side ...")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show_stage(self, trial: str, stage: str) -> None:
        """Displays that a trial has reached a stage; "" means that the trial has ended."""
        with self._one_at_a_time:
            before, since = self._stages.pop(trial, ("", 0.0))
            if stage == before:
                self._stages[trial] = before, since
                return
            if before and self._status is None:
                self._say(f"checking {before} ... {time.monotonic() - since:.1f} s")
            if stage:
                self._stages[trial] = stage, time.monotonic()
            if self._status is not None and self._stages:
                self._status.update(f"checking {', '.join(stage for stage, _ in self._stages.values())} ...")

    def _say(self, text: str) -> None:
        if not self._is_quiet:
            echo(f"npu-run doctor: {text}", err=True)


def check_machine(
    config: str | None, rank_table: str | None, limit_secs: float, progress: _CheckProgress
) -> DoctorPage:
    """Makes all checks and returns the page. Problems are put on the page; they raise no errors.

    Args:
      config: a configuration file to read, or None.
      rank_table: a rank table to read, or None.
      limit_secs: largest time of each of the two trial runs.
      progress: shows the current check.
    """
    page = DoctorPage()
    page.add(*versions_section())
    variables = environment_section()
    table = rank_table_section(rank_table) if rank_table is not None else (PageSection("", []), [])
    one, two = run_trials(limit_secs, config, progress.show_stage)
    page.add(machine_section(one.facts.get("gpus")))
    page.add(*horovod_section(one, two))
    page.lacks_horovod = lacks_horovod(one)
    page.add(*variables)
    page.add(*table)
    if config is not None:
        page.add(*_config_section_of_trial(config, one))
    return page


def versions_section() -> tuple[PageSection, list[FoundProblem]]:
    """Returns a section with the versions of all packages involved, and a problem for each unsuitable version."""
    problems = []
    if not (3, 9) <= sys.version_info[:2] <= (3, 13):
        problems.append(FoundProblem(f"Python {platform.python_version()} is not supported", "Use Python 3.9 to 3.13."))
    tensorflow, horovod = installed_version("tensorflow"), installed_version("horovod")
    if tensorflow and not is_supported_tensorflow(tensorflow):
        fix = f"pip install 'tensorflow=={CHOSEN}.*'"
        problems.append(FoundProblem(f"TensorFlow is {tensorflow}; this package is made for {TENSORFLOWS}", fix, False))
    elif tensorflow and not names.HAS_ESTIMATORS and (command := install_command(tensorflow)):
        problems.append(FoundProblem(f"TensorFlow {tensorflow} has no Estimator and no Keras 2 of its own", command))
    numpy = installed_version("numpy")
    if tensorflow and numpy and numpy_problem(tensorflow, numpy):
        problems.append(
            FoundProblem(f"numpy is {numpy}; TensorFlow {tensorflow} needs a version before 2", "pip install 'numpy<2'")
        )
    if horovod and not f"{horovod}.".startswith(f"{_HOROVOD}."):
        fix = f"pip install 'horovod=={_HOROVOD}.*'"
        problems.append(FoundProblem(f"Horovod is {horovod}; this package is made for {_HOROVOD}", fix, False))
    return PageSection("versions", version_rows(), "versions"), problems


def machine_section(gpus: list[str] | None, description: str | None = None) -> PageSection:
    """Returns a section with the rows of `machine_rows` and, if the machine has GPUs, the GPUs of the ranks."""
    shared_out = describe_gpus()
    rows = [("GPUs of ranks", shared_out)] if shared_out else []
    return PageSection("machine", machine_rows(gpus, description) + rows, "machine")


def _config_section_of_trial(path: str, trial: TrialResult) -> tuple[PageSection, list[FoundProblem]]:
    """Returns the page's section about the configuration file, which the test run on one rank has read."""
    found = trial.facts.get("config")
    if found is None:
        failed = trial.facts.get("failed", {}).get(f"read {path}", "that needs TensorFlow")
        return make_config_section(path, []), [FoundProblem(f"{path} was not read: {failed}")]
    return make_config_section(path, found["rows"]), [FoundProblem(*problem) for problem in found["problems"]]
