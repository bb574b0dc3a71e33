"""Makes the sections of `npu-run doctor` about environment variables, a configuration file and a rank table."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from npu_bridge.base import environment
from npu_bridge.options import OPTIONS, read_run_config
from npu_bridge.options.rank_table import read_rank_table
from npu_bridge.reporting.page.facts import list_set_variables, shorten_value
from npu_run.doctor.page import FoundProblem, PageSection
from npu_run.job.hosts import is_this_machine


def environment_section() -> tuple[PageSection, list[FoundProblem]]:
    """Returns a section with the documented environment variables that are set, and problems."""
    rows = list_set_variables()
    problems: list[FoundProblem] = []
    sizes = [1]
    checks: tuple[Callable[[], Any], ...] = (
        environment.launcher_placement,
        environment.declared_rank,
        environment.declared_device,
        environment.check_cluster_variables,
        environment.read_tf_config,
        lambda: sizes.append(environment.declared_world_size()),
    )
    for check in checks:
        _run_check_and_collect_problem(check, problems)
    if environment.read_variable("RANK_TABLE_FILE"):
        _run_check_and_collect_problem(read_rank_table, problems)
    placed = environment.launcher_placement() if not problems else None
    if sizes[-1] > 1 and placed is None:
        what = f"The environment declares {sizes[-1]} ranks: a script started alone would stop"
        problems.append(FoundProblem(what, f"Start it with npu-run -np {sizes[-1]}, or unset the variable.", False))
    return PageSection("environment variables", rows, "environment", ("name", "value", "effect")), problems


def config_section(path: str) -> tuple[PageSection, list[FoundProblem]]:
    """Returns a section with the options that a configuration file changes and their effects here, and problems.

    Imports TensorFlow.
    """
    from npu_bridge.estimator.npu.npu_config import NPURunConfig

    with _WarningCollector() as heard:
        try:
            usual = read_run_config(NPURunConfig())
            chosen = read_run_config(NPURunConfig.from_file(path))
        except (TypeError, ValueError, OSError) as error:
            return make_config_section(path, []), [FoundProblem(str(error))]
    changed = [option for option in OPTIONS if option.has_plain_value and chosen[option.name] != usual[option.name]]
    rows = [
        (
            f"{option.owner}.{option.name}",
            shorten_value(repr(chosen[option.name])),
            f"default {shorten_value(repr(usual[option.name]))}",
            option.effect.in_words,
        )
        for option in changed
    ]
    problems = [FoundProblem(text, is_fatal=False) for text in heard.warnings]
    return make_config_section(path, rows or [("nothing",)]), problems


def make_config_section(path: str, rows: Sequence[Sequence[str]]) -> PageSection:
    """Returns the section about a configuration file."""
    return PageSection(f"what {path} changes", rows, "config", ("name", "value", "default", "effect"))


def rank_table_section(path: str) -> tuple[PageSection, list[FoundProblem]]:
    """Returns a section with the servers in a rank table, and the table's problems."""
    title = f"rank table {path}"
    try:
        table = read_rank_table(path)
    except ValueError as error:
        return PageSection(title, []), [FoundProblem(str(error))]
    rows = []
    for server, slots in table.servers:
        own = [placement for placement in table.placements if placement.server == server]
        ranks = f"ranks {', '.join(str(placement.rank) for placement in own)}"
        devices = f"devices {', '.join(str(placement.device) for placement in own)}"
        rows.append((server, f"{slots} slots", ranks, devices, "this machine" if is_this_machine(server) else "remote"))
    return PageSection(title, rows, "rank_table", ("server", "slots", "ranks", "devices", "place")), []


def _run_check_and_collect_problem(check: Callable[[], Any], problems: list[FoundProblem]) -> None:
    try:
        check()
    except ValueError as error:
        # Several checks can report the same variable.
        if str(error) not in [problem.what for problem in problems]:
            problems.append(FoundProblem(str(error)))


class _WarningCollector(logging.Handler):
    """A log handler that collects the library's warnings during a block."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("npu_bridge").addHandler(self)
        # TensorFlow logs a deprecation whenever a RunConfig is made.
        self._level_before = logging.getLogger("tensorflow").level
        logging.getLogger("tensorflow").setLevel(logging.ERROR)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("npu_bridge").removeHandler(self)
        logging.getLogger("tensorflow").setLevel(self._level_before)
