"""Jobs of 256 ranks: small processes without TensorFlow, which speak to the launcher as ranks do."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal

import pytest

from npu_run.job.limits import raise_open_file_limit
from tests.loose_code import module_at
from tests.npu_run.launching import is_alive, needs_horovod, npu_run, start, wait_for, write_script

many_ranks = module_at("benchmarks/many_ranks.py")
SIZE = 256
MOST_LINES = 10
# How often the launcher asks the system about a rank.
COUNTING = """
import atexit
from npu_run.job import rank_process
rank_process._ROUND_SECS = 1e9
calls, collect = [], rank_process.RankProcess.collect
rank_process.RankProcess.collect = lambda process: calls.append(1) or collect(process)
atexit.register(lambda: print("asked", len(calls), flush=True))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "rank.py"
    path.write_text(many_ranks.RANK)
    return path


def come_up(script, prepare=""):
    job = many_ranks.Job(script, SIZE, many_ranks.PREPARE + prepare)
    return job, {rank: process for rank, (process, *_) in job.come_up().items()}


def finish(job, processes):
    """Returns the further output of a job, and its exit code; nothing of it is left."""
    _, lines = job.finish()
    wait_for(lambda: not any(map(is_alive, processes.values())), "all ranks to be gone")
    return job.process.returncode, lines


@pytest.mark.slow("256 processes")
@needs_horovod
def test_a_rank_of_many_is_named_and_the_launcher_asks_about_each_once(script):
    job, processes = come_up(script, COUNTING)
    assert len(processes) == SIZE
    os.kill(processes[100], signal.SIGKILL)
    code, lines = finish(job, processes)
    assert code == 137
    *_, told, asked = lines
    assert told.startswith(f"npu-run: rank 100 of {SIZE} was killed by SIGKILL")
    assert int(asked.split()[1]) <= 2 * SIZE


@pytest.mark.slow("256 processes")
@needs_horovod
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_the_death_of_all_ranks_is_a_short_story(script, number):
    job, processes = come_up(script)
    for process in processes.values():
        with contextlib.suppress(ProcessLookupError):  # the launcher may already be ending the rest
            os.kill(process, number)
    code, lines = finish(job, processes)
    lines = [line for line in lines if "a line of its own" not in line]
    how = "was killed by SIGKILL" if number == signal.SIGKILL else "ended with ValueError: no loss"
    assert code == (137 if number == signal.SIGKILL else 1)
    assert len(lines) <= MOST_LINES and max(map(len, lines)) < 200, lines
    assert re.search(rf"npu-run: rank \d+ of {SIZE} {how}", lines[-1]), lines


@pytest.mark.slow("256 processes")
@needs_horovod
def test_many_ranks_end_after_one_step(script):
    job, processes = come_up(script)
    job.process.send_signal(signal.SIGTERM)
    code, lines = finish(job, processes)
    assert code == 75
    assert lines[-1] == "npu-run: ended after step 7; exit code 75. The same command resumes from there."


# The system's limits.

RAISE_LIMIT = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (4000, 4000))\n"
# The launcher sets the limit of a rank just after its start, long before a script runs that imports anything.
TELL_LIMIT = """
import resource, time
began = time.monotonic()
while resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 80 and time.monotonic() < began + 10:
    time.sleep(0.1)
print('limit', resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def run_below(tmp_path, limits, prepare=""):
    """Starts 32 ranks that tell their limit on open files, from a process with the given limits; code and lines."""
    write_script(tmp_path, TELL_LIMIT)
    prepare += "".join(f"import resource\nresource.setrlimit({kind}, {pair})\n" for kind, pair in limits.items())
    code, output = npu_run("-np", 32, "train.py", cwd=tmp_path, prepare=f"{many_ranks.PREPARE}{prepare}")
    return code, output.splitlines()


@needs_horovod
def test_the_limit_on_open_files_is_raised_for_the_launcher_alone(tmp_path):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code, lines = run_below(tmp_path, {resource.RLIMIT_NOFILE: (80, hard)})
    assert code == 0
    assert [line.partition("limit ")[2] for line in lines] == [f"(80, {hard})"] * 32


def test_the_limit_on_open_files_is_as_before_after_a_job():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = (900, before[1])
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, lower)
        with raise_open_file_limit(900, "ranks") as changed:
            assert changed == lower and resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 900
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == lower
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@needs_horovod
def test_a_limit_on_open_files_that_cannot_be_raised_is_told_at_the_start(tmp_path):
    code, lines = run_below(tmp_path, {resource.RLIMIT_NOFILE: (80, 100)})
    assert code == 2
    (line,) = lines
    assert line.startswith("npu-run: 32 ranks need 195 open files here. Expected a limit (ulimit -Hn) of at least 195;")
    assert "ulimit -n 195" in line


@needs_horovod
@pytest.mark.skipif(os.getuid() != 0, reason="becomes a user that may have few processes")
def test_a_limit_on_processes_is_told(tmp_path):
    leave = "import os\nimport encodings.idna, horovod.runner.gloo_run, psutil, npu_run.cli\n"
    leave += "os.setuid(65534)\n"
    tmp_path.chmod(0o755)
    code, lines = run_below(tmp_path, {resource.RLIMIT_NPROC: (2, 2)}, leave)
    assert code == 2, lines
    (line,) = lines
    assert line.startswith("npu-run: one more rank cannot be started (Resource temporarily unavailable).")
    assert "got ulimit -u 2, or the limit of a container" in line


@needs_horovod
def test_a_rank_hears_the_launcher_through_a_link_of_any_number(tmp_path):
    write_script(tmp_path, "import os, time\nopen(f'pid{os.getpid()}', 'w').close()\ntime.sleep(600)")
    many_files = "import os\nkept = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]\n"
    launcher = start("-np", 2, "train.py", cwd=tmp_path, prepare=f"{RAISE_LIMIT}{many_files}")
    wait_for(lambda: len(list(tmp_path.glob("pid*"))) == 2, "both ranks to be there")
    launcher.kill()
    launcher.communicate()
    processes = [int(path.name[3:]) for path in tmp_path.glob("pid*")]
    wait_for(lambda: not any(map(is_alive, processes)), "ranks to notice that the launcher is gone", 60)
