"""Ranks that are reached through ssh: here an `ssh` that runs commands on this very machine, under other names.

`tests/hosts` does the same over a network of its own, where that is possible.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import time
import types

import pytest

from npu_bridge.base.memory_folders import make_memory_folder
from npu_run.job.watched_rank import WatchedRank
from npu_run.remote.host import RemoteHost, RemoteProcess
from tests.holding import python
from tests.npu_run.launching import (
    LIMIT_SECS,
    ONE,
    OTHER,
    ROOT,
    SSH,
    finish,
    is_alive,
    needs_horovod,
    npu_run,
    start,
    wait_for,
    write_script,
    write_ssh,
)
from tests.npu_run.test_hosts import write_table
from tests.npu_run.test_local_ranks import WAITING, assert_all_gone, run_through_failures, wait_for_pids

pytestmark = [pytest.mark.ranks(2), needs_horovod]


@pytest.fixture
def ssh(tmp_path):
    """Variables for `npu_run` with which it finds our `ssh`."""
    return write_ssh(tmp_path)


def start_waiting(folder, ssh):
    """Starts one waiting rank on each of two hosts; gives the launcher and the four pids."""
    write_script(folder, WAITING)
    process = start("-H", f"{ONE}:1,{OTHER}:1", "train.py", cwd=folder, **ssh)
    return process, wait_for_pids(folder)


def test_ranks_run_in_place_with_their_variables_and_arguments(tmp_path, ssh):
    write_script(
        tmp_path,
        """
        import json, os, sys
        names = "RANK_ID RANK_SIZE DEVICE_ID HOROVOD_LOCAL_RANK HOROVOD_CROSS_RANK GREETING NPU_RUN_SET SSH_CLIENT"
        with open(f"seen.{os.environ['RANK_ID']}", "w") as file:
            json.dump([sys.argv[1:], *(os.environ.get(name) for name in names.split())], file)
        """,
    )
    given = ["--flag", "a b", "$HOME", "'", ""]
    variables = {"GREETING": 'it\'s "so"\nand so', "SSH_CLIENT": "the launcher's own"}
    words = ["-H", f"localhost:1,{ONE}:2,{OTHER}:1", "--set", "hccl_timeout=5"]
    code, output = npu_run(*words, "train.py", *given, cwd=tmp_path, **ssh, **variables)
    assert (
        code == 0 and output.startswith("npu-run: --set hccl_timeout=5 changed nothing: ") and output.count("\n") == 1
    )
    assert sorted((tmp_path / "hosts_reached").read_text().split()) == [ONE, OTHER]
    seen = [json.loads((tmp_path / f"seen.{rank}").read_text()) for rank in range(4)]
    places = [("0", "0"), ("0", "1"), ("1", "1"), ("0", "2")]  # local rank, host; device = local rank
    setting = '["hccl_timeout=5"]'
    for rank, (local_rank, host) in enumerate(places):
        own = "the launcher's own" if rank == 0 else None
        # The cross rank counts among the hosts that have such a local rank.
        cross = "0" if local_rank == "1" else host
        assert seen[rank] == [given, str(rank), "4", local_rank, local_rank, cross, variables["GREETING"], setting, own]


def test_output_logs_and_devices_are_those_of_ranks_of_this_machine(tmp_path, ssh):
    write_table(tmp_path, [(ONE, [(0, 6)]), (OTHER, [(1, 4)])])
    write_script(
        tmp_path,
        """
        import os, sys
        rank = os.environ["RANK_ID"]
        for line in range(2000):
            sys.stdout.write(f"line {line} of {rank} \\u00e4\\n")  # in one piece: parts of lines are shown, too
        sys.stderr.buffer.write(b"\\xff note of " + rank.encode() + b"\\n")
        sys.stdout.write(f"devices {os.environ['DEVICE_ID']} {os.environ['ASCEND_DEVICE_ID']}\\n")
        print("unfinished", end="")
        """,
    )
    options = ["--rank-table", "table.json", "--logs"]
    # Where a piece of the output ends in the middle of a line, its end may come late.
    code = "from npu_run.job import output\noutput._PARTIAL_LINE_SECS = 200.0\n"
    code += "from npu_run.cli import main\nmain()"
    process = subprocess.run(
        [sys.executable, "-c", code, *options, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), **ssh},
        capture_output=True,
        timeout=LIMIT_SECS,
    )
    assert process.returncode == 0
    out, err = process.stdout.decode().splitlines(), process.stderr.splitlines()
    for rank, prefix in enumerate(["", "[rank 1] "]):
        expected = [f"{prefix}line {line} of {rank} \u00e4" for line in range(2000)]
        assert [text for text in out if text.startswith(f"{prefix}line")] == expected
        assert prefix.encode() + b"\xff note of %d" % rank in err
        log = (tmp_path / "logs" / f"rank_{rank}.log").read_text(errors="replace").splitlines()
        assert [text for text in log if text.startswith("line")] == [text.removeprefix(prefix) for text in expected]
    assert {"devices 6 6", "[rank 1] devices 4 4", "[rank 1] unfinished"} <= set(out)


@pytest.mark.slow("jobs on this host have a fast case")
def test_a_job_on_other_hosts_is_started_again_after_each_failure_and_nothing_stays_behind(tmp_path, ssh):
    run_through_failures(tmp_path, "-H", f"{ONE}:1,{OTHER}:1", **ssh)


@pytest.mark.few_fast(1, "the other signal takes the same way")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_signals_to_the_launcher_end_everything(tmp_path, ssh, number, code):
    process, pids = start_waiting(tmp_path, ssh)
    process.send_signal(number)
    assert finish(process)[0] == code
    assert_all_gone(pids)


def test_a_host_that_cannot_be_reached_is_named_with_the_reason(tmp_path, ssh):
    write_script(tmp_path, "import time\ntime.sleep(600)")
    code, output = npu_run("-H", f"{ONE}:1,192.0.2.9:1", "train.py", cwd=tmp_path, **ssh)
    assert code == 255
    assert output.splitlines()[-1].startswith(
        "npu-run: rank 1 of 2 was lost: the connection to 192.0.2.9 has ended (ssh, exit code 255: ssh: connect to "
        "host 192.0.2.9 port 22: Connection refused); exit code 255."
    )


def test_what_a_remote_shell_prints_as_it_starts_is_passed_on(tmp_path, ssh):
    write_script(tmp_path, "print('trained')")
    talking = SSH.replace("exec env", "echo 'Welcome,'; printf '2 users'\nexec env")
    (tmp_path / "bin" / "ssh").write_text(talking)
    code, output = npu_run("-H", f"{ONE}:1", "train.py", cwd=tmp_path, **ssh)
    assert (code, output) == (0, f"{ONE}: Welcome,\n{ONE}: 2 users\ntrained\n")


def test_the_end_of_ssh_is_seen_while_another_process_holds_its_error_stream(tmp_path, ssh):
    """Such as the one that keeps a connection of OpenSSH open for later ones."""
    (tmp_path / "bin" / "ssh").write_text("#!/bin/sh\nsleep 600 > /dev/null &\necho $! > keeper\nexit 255\n")
    write_script(tmp_path, "")
    code, output = npu_run("-H", f"{ONE}:1", "train.py", cwd=tmp_path, **ssh)
    with contextlib.suppress(ProcessLookupError):  # if ssh's processes are not ended together
        os.kill(int((tmp_path / "keeper").read_text()), signal.SIGKILL)
    assert code != 0 and "exit code 255" in output and "nothing was heard" not in output, output


UNKILLABLE = """#!{python} -S
import json, os, sys, threading, time
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
ending = dict(when=0, code=1, summary="OSError: lost", trace="OSError: lost", tensor="", secondary=False)
print(json.dumps(dict(rank=0, channel="link", text=json.dumps(dict(ending=ending)) + "\\n", now=0)), flush=True)
while True:
    print(json.dumps(dict(stopped=[], now=time.monotonic())), flush=True)
    time.sleep(0.1)
"""


def test_a_rank_that_the_system_does_not_end_is_told_and_not_waited_for(tmp_path, ssh):
    """A process that waits for a device cannot be killed; here an agent says so of its rank."""
    (tmp_path / "bin" / "ssh").write_text(UNKILLABLE.format(python=sys.executable))
    write_script(tmp_path, "")
    quick = "from npu_run.job import supervisor\nsupervisor._KILL_SECS = supervisor.STOP_SECS = 0.5"
    code, output = npu_run("-H", f"{ONE}:1", "train.py", cwd=tmp_path, prepare=quick, **ssh)
    assert code == 1 and "OSError: lost" in output
    assert output.count("rank 0: no end is known 0 s after SIGKILL") == 1, output


def test_missing_ssh_is_told_in_one_line(tmp_path):
    write_script(tmp_path, "")
    code, output = npu_run("-H", f"{ONE}:1,{OTHER}:1", "train.py", cwd=tmp_path, PATH=str(tmp_path))
    assert code == 2
    assert output == f"npu-run: {ONE} is reached through ssh, which is not installed here.\n"


@pytest.mark.slow("waits for a host that is silent")
def test_a_host_that_falls_silent_is_lost(tmp_path, ssh, monkeypatch):
    """The launcher's side of a cut: the agent is stopped, so its connection stays open and says nothing."""
    monkeypatch.setenv("PATH", ssh["PATH"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path, WAITING)
    host = RemoteHost(ONE, errors=None, silence_secs=LIMIT_SECS)
    try:
        rank = WatchedRank(5, streams={})
        rank.process = RemoteProcess(5, host)
        host.start([rank], [{"HOROVOD_RANK": "5", "RANK_ID": "5"}], "train.py", [], [], peer=OTHER)
        wait_for((tmp_path / "pids.5").exists, "the rank to be up")
        assert look(host, rank) is None
        os.kill(host._process.pid, signal.SIGSTOP)
        # Long enough for the rank to report that it is stuck: its link is closed with an unread report in it.
        host._silence_secs = host._limit_secs = 4.0
        wait_for(lambda: look(host, rank) is not None, "the loss to be noticed")
        assert rank.ending.exit_code == 255
        assert rank.ending.disconnect_reason == f"nothing was heard from {ONE} for 4 s"
    finally:
        host.close()
    assert_all_gone([int((tmp_path / "pids.5").read_text().split()[0])])


def look(host, rank):
    for file in host.files():
        host.read(file)
    return rank.poll()


def start_agent(folder, facts):
    """An agent that has got a job: one rank of train.py, unless `facts` say otherwise."""
    job = {"silence_secs": LIMIT_SECS, "ranks": [{"rank": 0, "variables": {}}], "script": "train.py", "arguments": []}
    job.update(devices=[], peer=OTHER, environment={"PYTHONPATH": str(ROOT)})
    agent = python(
        "from npu_run.remote.host_agent import main\nmain()",
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    tell(agent, **{**job, **facts})
    return agent


def tell(agent, **facts):
    agent.stdin.write(json.dumps(facts) + "\n")
    agent.stdin.flush()


@pytest.mark.slow("waits for a host that is silent")
def test_ranks_of_a_host_that_hears_nothing_any_more_are_killed(tmp_path):
    """The host's side of a cut: the connection stays open, and no sign of life comes through it."""
    write_script(tmp_path, WAITING)
    job = {"ranks": [{"rank": 5, "variables": {"RANK_ID": "5"}}], "arguments": ["deaf"]}
    agent = start_agent(tmp_path, job)
    pids_file = tmp_path / "pids.5"
    wait_for(pids_file.exists, "the rank to be up")
    pids = [int(pid) for pid in pids_file.read_text().split()]
    silence_secs = 8.0
    end = time.monotonic() + 1.2 * silence_secs
    while time.monotonic() < end:
        tell(agent, silence_secs=silence_secs)
        assert is_alive(pids[0])
        time.sleep(0.1)
    os.kill(pids[0], signal.SIGSTOP)  # it cannot notice by itself that its agent is gone
    assert agent.wait(timeout=LIMIT_SECS) == 0
    assert_all_gone(pids)
    agent.stdin.close()


@pytest.mark.skipif(make_memory_folder() is None, reason="there are no folders in memory here")
@pytest.mark.parametrize("goes_on", [True, False])
def test_state_in_memory_is_kept_for_a_job_that_goes_on(tmp_path, goes_on):
    """As the launcher of another machine would have it: its own folder has the same name."""
    write_script(tmp_path, "import os; open(os.environ['NPU_RUN_MEMORY_FOLDER'] + '/state', 'w').close()")
    name = secrets.token_hex(8)
    job = {"environment": {"PYTHONPATH": str(ROOT), "NPU_RUN_MEMORY_FOLDER": f"/elsewhere/npu_bridge-1-{name}"}}
    folder = pathlib.Path(f"/dev/shm/npu_bridge-{os.getuid()}-{name}")
    agent = start_agent(tmp_path, job)
    wait_for((folder / "state").exists, "the rank to write")
    agent.communicate(json.dumps({"goes_on": goes_on}) + "\n", timeout=LIMIT_SECS)
    assert (folder / "state").exists() == goes_on
    if goes_on:
        make_memory_folder(name).close()
    assert not folder.exists()


def test_times_of_another_clock_become_the_launchers():
    rank = WatchedRank(3, streams={})
    rank.process = RemoteProcess(
        3, types.SimpleNamespace(check_connection=lambda: None, codes={}, disconnect_reason="")
    )
    stuck = b'{"stuck": {"since": 100.0, "where": "train.py:1", "waits": true}}\n{"ending": {"when"'
    rank.receive("link", stuck, clock_lead_secs=50.0)
    assert rank.stuck.since == 150.0
    rank.receive("link", b': 120.0, "code": 1, "summary": "ValueError: boom"}}\n', clock_lead_secs=50.5)
    assert rank.poll().when == 170.5
    rank.receive("link", b'{"stuck": null}\n')
    assert rank.stuck is None


def test_a_log_takes_an_error_that_names_a_file_of_another_encoding():
    logged = []
    log = types.SimpleNamespace(receive_output=lambda *words: logged.append(words))
    ending = {"ending": {"when": 1.0, "code": 1, "trace": "ValueError: bad picture \udce9.png"}}
    WatchedRank(0, streams={}, log=log).receive("link", json.dumps(ending).encode() + b"\n")
    assert logged == [("stderr", b"ValueError: bad picture \\udce9.png")]


def test_the_keeper_needs_neither_tensorflow_nor_horovod(tmp_path):
    code = "import sys, npu_run.remote.host_agent; print({'tensorflow', 'horovod'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=pathlib.Path(ROOT), text=True) == "set()\n"
