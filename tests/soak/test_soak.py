"""A training survives many random faults, and ends with the rows and weights of an undisturbed one."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import statistics
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from benchmarks.lab.two_hosts import reason_for_no_hosts, two_hosts
from tests.npu_run.launching import needs_horovod
from tests.soak.faults import KINDS, Fault
from tests.soak.job import STEPS, Job, SoakError
from tests.soak.trainings import FACES

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0), needs_horovod]

MOST_FAILURES = 10
HOMES = ("plain", "disk", "clock", "hosts", "slots")


class Record(NamedTuple):
    """The cost of a fault: seconds until the next step, and steps that were made again."""

    kind: str
    has_recovered: bool
    secs: float
    steps_lost: int


def test_training_outlives_faults(pytestconfig):
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is left running
    option = pytestconfig.getoption
    out, seed = Path(option("out")).resolve(), option("seed")
    names = [name for name in KINDS if any(map(name.__contains__, option("kinds").split(",")))]
    homes = [home for home in HOMES if any(home in KINDS[name].homes for name in names)]
    homes = [home for home in homes if home in option("homes")] if option("homes") else homes
    faces = option("faces").split(",") if option("faces") else list(FACES)
    if reason_for_no_hosts():
        homes = [home for home in homes if home not in ("hosts", "disk")]
        print(f"\nno second host and no small disk here: {reason_for_no_hosts()}")
    assert homes and names, "nothing to draw from"
    records: list[Record] = []
    failed: list[str] = []
    undisturbed: dict[str, Job] = {}
    number = option("only") or 0
    while len(records) < option("faults") and len(failed) < MOST_FAILURES:
        chance = Random(f"{seed}.{number}")
        face, home = faces[number % len(faces)], homes[number // len(faces) % len(homes)]
        title = f"seed {seed} job {number} {face} {home}"
        folder = out / f"seed_{seed}_job_{number}"
        with contextlib.ExitStack() as stack:
            if face not in undisturbed:
                undisturbed[face] = train_undisturbed(out / face, face)
            hosts = stack.enter_context(two_hosts(rate="1gbit")) if home == "hosts" else None
            shutil.rmtree(folder, ignore_errors=True)
            job = Job(folder, face, home, chance, hosts)
            stack.callback(job.close)
            own = [name for name in names if home in KINDS[name].homes and face in KINDS[name].faces]
            try:
                for record in harm(job, own, chance, title, min(option("each"), option("faults") - len(records))):
                    records.append(record)
                job.finish()
                job.judge(undisturbed[face])
                print(f"{title}: ended, rows and weights as undisturbed", flush=True)
            except Exception as error:
                is_ours = isinstance(error, SoakError)
                failed.append(f"{title}: {error if is_ours else traceback.format_exc()}")
                print(f"{job.said()[-20000:]}\nFAILED {failed[-1]}\nits folder: {folder}", flush=True)
        if not failed or not failed[-1].startswith(title):
            shutil.rmtree(folder)
        write_tables(records, failed, seed, out)
        if option("only") is not None:
            break
        number += 1
    print((out / "table.md").read_text())
    assert not failed, "\n".join(failed)


def train_undisturbed(folder: Path, face: str) -> Job:
    """Trains the same number of steps on one rank, unless such a training of the same script exists."""
    if (folder / "weights.npz").exists() and (folder / "train.py").read_text() == FACES[face]:
        return Job(folder, face, "plain", Random(0))
    shutil.rmtree(folder, ignore_errors=True)
    job = Job(folder, face, "plain", Random(0))
    job.start(size=1)
    try:
        job.finish()
    finally:
        job.close()
    return job


def harm(job: Job, names: list[str], chance: Random, title: str, most: int) -> Iterator[Record]:
    """Starts a job and harms it, as long as it has steps to make; a record for each fault."""
    job.start()
    for count in range(most):
        if job.wait_until_steady().last[0] > STEPS * 0.9:
            return
        time.sleep(chance.uniform(0.1, 0.6))
        (name,) = chance.choices(names, [KINDS[name].weight for name in names])
        print(f"{title} fault {count}: {name} ", end="", flush=True)
        record, what = suffer(job, name, Random(chance.random()))
        print(f"({what}): {record.secs:.1f} s, {record.steps_lost} steps lost", flush=True)
        yield record


def suffer(job: Job, name: str, chance: Random) -> tuple[Record, str]:
    """Lets one fault happen and waits until the training continues; returns its cost, and words about it.

    Raises:
      SoakError: it does not continue as it should.
    """
    size = job.log.stat().st_size  # before: it may say that there are more slots just behind this
    before, processes = job.wait_until_steady(), job.processes()
    fault = KINDS[name].act(job, chance)
    known = [start.name for start in job.starts()].index(before.name)
    grace_secs = 1.0 if fault.restarts is None else 0.0

    def is_on():
        # One that was harmed itself may take a step yet before it notices.
        is_new = job.starts()[-1].name != before.name and job.starts()[-1].processes == job.ranks()
        return (is_new or not fault.restarts) and job.starts()[-1].last[1] > fault.over + grace_secs

    job.wait(is_on, f"steps after: {name} ({fault.what})")
    starts = job.starts()[known:]
    if len(starts) > 1:
        check_restart(job, fault, size, {each for each in processes if each[0] != job.process.pid})
    elif fault.restarts:
        raise SoakError(f"{name} ({fault.what}): no rank was started anew")
    trained = [start for start in starts if any(start.runs.values())]
    lost = sum(max(0, old.last[0] + 1 - new.first[0]) for old, new in zip(trained, trained[1:]))
    if lost and not fault.may_lose:
        raise SoakError(f"{name} ({fault.what}): {lost} steps were lost")
    since = fault.at if len(starts) > 1 else fault.over
    went_on = min(run[2] / 1e9 for runs in starts[-1].runs.values() for run in runs if run[2] / 1e9 > max(since, 0))
    if len(starts) > 1 and fault.restarts is False:
        name = "two at once"  # slots that were free again were taken in meanwhile
    return Record(name, True, max(0.0, went_on - since), lost), fault.what


def check_restart(job: Job, fault: Fault, size: int, processes: set) -> None:
    """The log names the reason, and nothing is left of the start before."""
    said = job.said(size)
    is_resized = "there are slots for" in said
    if fault.restarts is False and not is_resized:
        raise SoakError(f"{fault.what}: ranks were started anew")
    missing = [pattern for pattern in fault.says if not re.search(pattern, said)]
    if missing and not is_resized:
        raise SoakError(f"{fault.what}: the log does not say {missing}")
    job.wait(lambda: not processes & set(job.processes()), "the processes of the start before to be gone")


def write_tables(records: list[Record], failed: list[str], seed: int, out: Path) -> None:
    """The table by kind, as text and as JSON."""
    rows, by_kind = [], {}
    for name in KINDS:
        own = [record for record in records if record.kind == name]
        if own:
            secs, lost = [record.secs for record in own], [record.steps_lost for record in own]
            by_kind[name] = {
                "count": len(own),
                "recovered": sum(record.has_recovered for record in own),
                "secs": [round(statistics.median(secs), 1), round(max(secs), 1)],
                "steps_lost": [statistics.median(lost), max(lost)],
            }
            (middle, worst), (median, most) = by_kind[name]["secs"], by_kind[name]["steps_lost"]
            rows.append(
                f"| {name} | {len(own)} | {by_kind[name]['recovered']} | {middle} / {worst} | {median:.0f} / {most} |"
            )
    head = ["| fault | count | recovered | s to the next step, median / worst | steps lost, median / worst |"]
    (out / "table.md").write_text("\n".join([*head, "| --- | --- | --- | --- | --- |", *rows, ""]))
    kept = {"seed": seed, "faults": len(records), "failed": failed, "kinds": by_kind}
    (out / "table.json").write_text(json.dumps(kept, indent=1))
