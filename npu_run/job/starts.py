"""Runs a script on its ranks: once, again after failures, or, as an elastic job, with changing numbers of ranks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from npu_bridge.base import environment
from npu_bridge.base.lock_owners import JobStarts
from npu_bridge.base.terminal import echo
from npu_run.job.elastic import AvailableSlots, HostsCommand, RankBounds, run_elastic
from npu_run.job.hosts import JobPlan
from npu_run.job.outcome import Outcome
from npu_run.job.supervisor import run_ranks
from npu_run.remote.tasks import ConnectedTasks


@dataclasses.dataclass(frozen=True)
class RestartableJob:
    """A job that can be started more than once.

    Attributes:
      script: a Python file, or a command.
      plan: the placement of the ranks; for an elastic job, all named slots.
      log_dir, stall_secs, restarts, hosts_from: values of the command line.
      tasks: the tasks of another launcher that has started one npu-run for each slot.
      elastic: the bounds of an elastic job; None for a fixed number of ranks.
      say: called with progress messages.
    """

    script: str
    plan: JobPlan
    log_dir: str | None
    stall_secs: float | None
    restarts: int
    tasks: ConnectedTasks | None
    elastic: RankBounds | None
    hosts_from: str | None
    say: Callable[[str], None]

    def run(self, arguments: list[str]) -> int:
        """Runs the script, as often as needed; returns the exit code of the job."""
        began, starts = time.time(), JobStarts()
        environment.write_variable(environment.BEGAN, "")

        def start(plan: JobPlan, **options: Any) -> Outcome:
            starts.begin_start()
            outcome = run_ranks(
                self.script, arguments, plan, self.log_dir, self.stall_secs, tasks=self.tasks, **options
            )
            starts.end_start(outcome.might_still_run)
            environment.write_variable(environment.BEGAN, began)
            return outcome

        if self.elastic is None:
            return run_with_restarts(lambda: start(self.tasks.make_plan() if self.tasks else self.plan), self.restarts)
        members = AvailableSlots(self._find_slots(), self.elastic)
        return run_elastic(
            lambda plan, why: start(plan, is_out_of_date=why), members, self.elastic, self.restarts, self.say
        )

    def _find_slots(self) -> Callable[[], dict[str, int]]:
        if self.hosts_from:
            return HostsCommand(self.hosts_from, self.say)
        if self.tasks:
            return self.tasks.slots
        return lambda: self.plan.slots or {"": self.plan.size}


def run_with_restarts(run: Callable[[], Outcome], restarts: int) -> int:
    """Runs a job, and restarts it after a failure; the script itself resumes from its last checkpoint."""
    outcome = run()
    for attempt in range(1, restarts + 1):
        if not outcome.has_failed:
            break
        echo(f"npu-run: restart {attempt} of {restarts}, after exit code {outcome.exit_code}", err=True)
        outcome = run()
    return outcome.exit_code
