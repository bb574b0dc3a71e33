"""The doctor's round: what is looked at, in which order, and what depends on what."""

from __future__ import annotations

from npu_bridge.launch.doctor_machine import machine_section, versions_section
from npu_bridge.launch.doctor_options import config_section, environment_section, rank_table_section
from npu_bridge.launch.doctor_page import Page, Problem, Section
from npu_bridge.launch.doctor_ranks import Trial, horovod_section, run_trial
from npu_bridge.options.environment import read_variable, write_variable

__all__ = ["examine"]


def examine(config: str | None, rank_table: str | None, limit_secs: float) -> Page:
    """Looks at everything; never raises because of what it finds.

    Args:
      config: a configuration file to read, or None.
      rank_table: a rank table to read, or None.
      limit_secs: time each of the two trial runs may take.
    """
    page = Page()
    page.add(*versions_section())
    variables, problems, wanted_ranks = environment_section()
    table = Section("", []), [], 1
    if rank_table is not None:
        table = rank_table_section(rank_table)
        wanted_ranks = max(wanted_ranks, table[2])
    one = run_trial(1, limit_secs)
    two = None if one.failure or one.facts.get("horovod_is_missing") else run_trial(2, limit_secs)
    page.add(machine_section(one.facts.get("gpus")))
    page.add(*horovod_section(one, two, wanted_ranks))
    page.add(variables, problems)
    page.add(*table[:2])
    if config is not None:
        page.add(*_config(config, one))
    return page


def _config(path: str, trial: Trial) -> tuple[Section, list[Problem]]:
    if "tensorflow" not in trial.facts:
        return Section("", []), [Problem(f"{path} was not read: that needs TensorFlow")]
    if read_variable("TF_CPP_MIN_LOG_LEVEL") is None:
        write_variable("TF_CPP_MIN_LOG_LEVEL", 2)
    return config_section(path)
