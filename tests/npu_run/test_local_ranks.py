"""Jobs of real processes: their output, their environment, and how they end."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import pytest

from tests.npu_run.launching import (
    LIMIT_SECS,
    PATIENT,
    ROOT,
    finish,
    is_alive,
    needs_horovod,
    npu_run,
    read_screen,
    read_until,
    start,
    wait_for,
    write_script,
)

pytestmark = [pytest.mark.ranks(2), needs_horovod]

# Ranks that say who they are, start a child of their own, and then wait for ever.
WAITING = """
    import os, pathlib, signal, subprocess, sys, time
    rank = os.environ["RANK_ID"]
    if "deaf" in sys.argv:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    pathlib.Path(f"pids.{rank}.new").write_text(f"{os.getpid()} {child.pid}")
    os.rename(f"pids.{rank}.new", f"pids.{rank}")
    time.sleep(600)
"""


def start_waiting(folder, *options, arguments=()):
    """Starts two waiting ranks; gives the launcher and the four pids."""
    write_script(folder, WAITING)
    process = start("-np", "2", *options, "train.py", *arguments, cwd=folder)
    return process, wait_for_pids(folder)


def wait_for_pids(folder):
    """Waits until two waiting ranks are up; gives their pids and those of their children."""
    files = [folder / "pids.0", folder / "pids.1"]
    wait_for(lambda: all(file.exists() for file in files), "both ranks to be up")
    return [int(pid) for file in files for pid in file.read_text().split()]


def assert_all_gone(pids):
    wait_for(lambda: not any(is_alive(pid) for pid in pids), f"the end of {pids}")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A job of three ranks that ends well: its folder, exit code and output, and what it had printed half-way."""
    folder = tmp_path_factory.mktemp("healthy")
    write_script(
        folder,
        """
        import json, os, sys, time
        rank = os.environ["RANK_ID"]
        names = "RANK_ID RANK_SIZE DEVICE_ID ASCEND_DEVICE_ID".split()
        names += "HOROVOD_RANK HOROVOD_SIZE HOROVOD_CONTROLLER".split()
        names += "OMP_NUM_THREADS TF_NUM_INTRAOP_THREADS TF_NUM_INTEROP_THREADS TF_CPP_MIN_LOG_LEVEL".split()
        with open(f"rank{rank}.json", "w") as file:
            json.dump({name: os.environ.get(name) for name in names}, file)
        for line in range(50):
            sys.stdout.write(f"line {line} of {rank}\\n")  # in one piece: parts of lines are shown, too
            sys.stderr.write(f"note {line} of {rank}\\n")
        sys.stdout.write("half-way\\n")
        while not os.path.exists("seen"):
            time.sleep(0.02)
        child = os.fork()
        if not child:
            sys.exit(3)
        _, status = os.waitpid(child, 0)
        time.sleep(0.5)  # longer than the launcher takes to be sure of a cause
        sys.stdout.write(f"the child ended with {os.waitstatus_to_exitcode(status)}\\n")
        print("unfinished", end="", flush=True)
        if rank == "2":
            os._exit(0)  # that is to end well, too
        """,
    )
    process = start("-np", "3", "train.py", cwd=folder)
    early = read_until(process, "\nhalf-way\n")
    (folder / "seen").touch()
    code, output = finish(process)
    return SimpleNamespace(folder=folder, code=code, lines=(early + output).splitlines())


def test_a_killed_rank_is_a_failure_also_if_a_parent_ignores_the_ends_of_children(tmp_path):
    write_script(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    ignoring = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    code, output = npu_run("--restarts", 1, "train.py", cwd=tmp_path, prepare=ignoring)
    assert code == 137 and "SIGKILL" in output


def test_a_child_that_prints_without_end_keeps_no_job(tmp_path):
    write_script(tmp_path, """import subprocess\nsubprocess.Popen(["yes"])""")
    process = start("--restarts", 1, "train.py", cwd=tmp_path, output=subprocess.DEVNULL)
    assert process.wait(LIMIT_SECS) == 0


def test_a_signal_ends_a_job_whose_output_nobody_reads(tmp_path):
    write_script(tmp_path, """while True:\n    print("x" * 1000)""")
    process = start("--restarts", 1, "train.py", cwd=tmp_path)
    wait_for(lambda: _is_full(process.stdout), "a full pipe")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_SECS) == 143
    process.stdout.close()


def _is_full(pipe):
    """Returns whether a pipe is full: its content stays the same although its writer does not stop."""
    before = _unread_bytes(pipe)
    time.sleep(0.5)
    return 0 < before == _unread_bytes(pipe)


def _unread_bytes(pipe):
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_every_rank_gets_its_variables_and_a_share_of_the_cores(healthy):
    assert healthy.code == 0
    share = max(1, len(os.sched_getaffinity(0)) // 3)
    for rank in "012":
        seen = json.loads((healthy.folder / f"rank{rank}.json").read_text())
        assert seen == {
            "RANK_ID": rank,
            "RANK_SIZE": "3",
            "DEVICE_ID": rank,
            "ASCEND_DEVICE_ID": rank,
            "HOROVOD_RANK": rank,
            "HOROVOD_SIZE": "3",
            "HOROVOD_CONTROLLER": "gloo",
            "OMP_NUM_THREADS": str(share),
            "TF_NUM_INTRAOP_THREADS": str(share),
            "TF_NUM_INTEROP_THREADS": str(max(2, share)),
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }


def test_rank_0_speaks_plainly_and_the_others_behind_their_number(healthy):
    for rank, prefix in enumerate(["", "[rank 1] ", "[rank 2] "]):
        for stream in ("line", "note"):
            expected = [f"{prefix}{stream} {line} of {rank}" for line in range(50)]
            assert [text for text in healthy.lines if text.startswith(f"{prefix}{stream}")] == expected
    assert "[rank 2] unfinished" in healthy.lines


def test_the_end_of_a_forked_process_is_not_that_of_its_rank(healthy):
    said = [line.partition("the child")[0] for line in healthy.lines if line.endswith("the child ended with 3")]
    assert sorted(said) == ["", "[rank 1] ", "[rank 2] "]


@pytest.mark.slow("three starts of TensorFlow")
def test_a_process_that_is_forked_after_training_ends_and_its_error_is_shown(tmp_path):
    """The sessions of the rank hang in that process."""
    script = """
        import os, sys
        import tensorflow.compat.v1 as tf
        tf.disable_v2_behavior()
        weight = tf.get_variable("weight", initializer=1.0)
        step = tf.train.get_or_create_global_step()
        train = tf.train.GradientDescentOptimizer(0.1).minimize(weight, step)
        session = tf.Session()
        session.run(tf.global_variables_initializer())
        session.run(train)
        for code in (0, 1):
            child = os.fork()
            if not child and code:
                raise ValueError("of the child")
            elif not child:
                sys.exit()
            print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    code, output = npu_run("-np", 2, write_script(tmp_path, script), cwd=tmp_path)
    assert code == 0
    for line in ("ended with 0", "ended with 1", "ValueError: of the child"):
        assert f"[rank 1] {line}" in output.splitlines() and line in output.splitlines()


@pytest.mark.slow("a job for one line")
def test_the_last_line_is_one_of_its_own_when_a_rank_is_stopped_in_the_middle_of_one(tmp_path):
    write_script(
        tmp_path,
        """
        import os, sys, time
        if os.environ["RANK_ID"] == "0":
            print("half of a li", end="", file=sys.stderr, flush=True)
            time.sleep(600)
        while not os.path.exists("seen"):
            time.sleep(0.01)
        def fail():
            raise ValueError("bad batch")
        fail()
        """,
    )
    process = start("-np", "2", "train.py", cwd=tmp_path)
    assert read_until(process, "li") == "npu-run: starting 2 ranks of train.py\nhalf of a li"
    (tmp_path / "seen").touch()
    code, output = finish(process)
    assert code == 1
    rest, *_, cause, last = output.splitlines()
    assert rest == ""
    assert "line 9, in fail" in output[output.rindex("npu-run: traceback of rank 1:") :]
    assert cause == "ValueError: bad batch"
    assert last.startswith("npu-run: rank 1 of 2 ended with ValueError: bad batch; exit code 1.")


@pytest.mark.parametrize("options", [[], ["--logs"]], ids=["plain", "logged"])
def test_rank_0_keeps_the_terminal(tmp_path, options):
    write_script(
        tmp_path,
        """
        import os, sys
        if os.environ["RANK_ID"] == "0":
            print("terminal", sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size().columns)
        """,
    )
    screen, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 111, 0, 0))
    process = start("-np", "2", *options, "train.py", cwd=tmp_path, output=terminal)
    os.close(terminal)
    assert process.wait(timeout=LIMIT_SECS) == 0
    assert read_screen(screen)[-1] == b"terminal True True 111"
    if options:
        log = (tmp_path / "logs" / "rank_0.log").read_text()
        assert log.splitlines()[1:] == ["terminal True True 111"]


WAYS_TO_FAIL = {
    "os.kill(os.getpid(), signal.SIGKILL)": (128 + signal.SIGKILL, "was killed by SIGKILL"),
    "sys.exit(7)": (7, "ended with sys.exit(7)"),
    "sys.exit('no data')": (1, "ended with sys.exit('no data')"),
    "os._exit(9)": (9, "ended without an exception"),
    "os.abort()": (128 + signal.SIGABRT, "was killed by SIGABRT"),
    "raise ValueError('bad batch')": (1, "ended with ValueError: bad batch"),
}


def run_through_failures(folder, *options, **variables):
    """Rank 1 of 2 fails in all ways there are, one in each attempt, while the other rank and its child wait."""
    write_script(
        folder,
        f"""
        import os, pathlib, signal, subprocess, sys, time
        rank, ways = os.environ["RANK_ID"], {list(WAYS_TO_FAIL)!r}
        attempt = len(list(pathlib.Path(".").glob(f"pids.{{rank}}.*")))
        secs = 600 if attempt < len(ways) else 0
        child = subprocess.Popen([sys.executable, "-S", "-c", f"import time; time.sleep({{secs}})"])
        pathlib.Path(f"new.{{rank}}").write_text(f"{{os.getpid()}} {{child.pid}}")
        os.rename(f"new.{{rank}}", f"pids.{{rank}}.{{attempt}}")
        while not os.path.exists(f"pids.{{1 - int(rank)}}.{{attempt}}"):
            time.sleep(0.01)
        if secs and rank == "1":
            exec(ways[attempt])
        time.sleep(secs)
        sys.stdout.write(f"done in attempt {{attempt + 1}} of 1 + {{os.environ['NPU_RUN_RESTARTS']}}\\n")
        """,
    )
    code, output = npu_run(*options, "--restarts", "7", "--logs", "train.py", cwd=folder, **variables)
    assert code == 0
    said = [line for line in output.splitlines() if line.startswith("npu-run: r")]
    expected = []
    for number, (code, how) in enumerate(WAYS_TO_FAIL.values(), 1):
        expected += [f"npu-run: rank 1 of 2 {how}", f"npu-run: restart {number} of 7, after exit code {code}"]
    assert [line.startswith(start) for line, start in zip(said, expected)] == [True] * len(expected), said
    assert "done in attempt 7 of 1 + 7" in output.splitlines()
    assert (folder / "logs" / "rank_1.log").read_text().count("\n---") == 6
    assert_all_gone([int(pid) for file in folder.glob("pids.*") for pid in file.read_text().split()])


def test_the_whole_job_is_started_again_until_it_succeeds_and_each_failure_is_told_with_its_exit_code(tmp_path):
    run_through_failures(tmp_path, "-np", "2")


@pytest.mark.few_fast(1, "the other signal in the same way")
@pytest.mark.parametrize(
    ("number", "arguments"),
    [(signal.SIGINT, []), (signal.SIGTERM, ["deaf"])],
)
def test_signals_stop_every_rank_and_nothing_is_started_again(tmp_path, number, arguments):
    process, pids = start_waiting(tmp_path, "--restarts", "3", arguments=arguments)
    process.send_signal(number)
    code, output = finish(process)
    assert code == 128 + number
    name = signal.Signals(number).name
    assert f"npu-run: {name}, stopping 2 ranks" in output
    assert output.splitlines()[-1] == f"npu-run: stopped by {name}; exit code {code}. All ranks were stopped."
    assert "restart" not in output
    assert_all_gone(pids)


def test_a_signal_while_failed_ranks_are_ended_keeps_the_job_from_starting_again(tmp_path):
    write_script(
        tmp_path,
        """
        import os, pathlib, signal, sys, time
        if os.environ["RANK_ID"] == "0":
            signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGTERM))
            pathlib.Path("ready").touch()
            time.sleep(600)
        while not os.path.exists("ready"):
            time.sleep(0.01)
        sys.exit(7)
        """,
    )
    code, output = npu_run("-np", "2", "--restarts", "3", "train.py", cwd=tmp_path)
    assert code == 7
    assert "SIGTERM came while the ranks were ended: the job does not start again" in output
    assert "restart" not in output


OUTER_JOBS = {
    "a rank of npu-run": {"RANK_ID": 1, "RANK_SIZE": 2, "DEVICE_ID": 1, "HOROVOD_RANK": 1, "HOROVOD_SIZE": 2},
    "a process of mpiexec": {"PMI_RANK": 3, "PMI_SIZE": 8},
}


@pytest.mark.parametrize("outer", OUTER_JOBS.values(), ids=OUTER_JOBS)
@pytest.mark.parametrize("size", [1, 2])
def test_who_names_the_number_of_ranks_starts_a_job_of_its_own(tmp_path, size, outer):
    write_script(tmp_path, "import os\nprint(*map(os.environ.get, ('RANK_ID', 'RANK_SIZE', 'DEVICE_ID')))")
    variables = {name: str(value) for name, value in outer.items()}
    code, output = npu_run("-np", size, "train.py", cwd=tmp_path, **variables)
    found = sorted(line.removeprefix("[rank 1] ") for line in output.splitlines() if "npu-run" not in line)
    assert (code, found) == (0, [f"{rank} {size} {rank}" for rank in range(size)]), output


def test_nothing_stays_behind_when_a_rank_is_killed(tmp_path):
    process, pids = start_waiting(tmp_path)
    os.kill(pids[2], signal.SIGKILL)
    code, output = finish(process)
    assert code == 128 + signal.SIGKILL
    assert output.splitlines()[-1].startswith("npu-run: rank 1 of 2 was killed by SIGKILL")
    assert_all_gone(pids)


def test_ranks_end_when_the_launcher_is_killed(tmp_path):
    process, pids = start_waiting(tmp_path, arguments=["deaf"])
    process.kill()
    finish(process)
    assert_all_gone(pids)


def test_closed_output_ends_the_job(tmp_path):
    write_script(tmp_path, "import time\nwhile True:\n    print('x' * 1000)\n    time.sleep(0.01)\n")
    process = start("-np", "2", "train.py", cwd=tmp_path)
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=LIMIT_SECS) == 128 + signal.SIGPIPE


FAILING_ONE_AFTER_THE_OTHER = """
    import contextlib, os, pathlib, time
    class HorovodInternalError(RuntimeError):
        pass
    def wait_for_the_end_of(rank):
        while not os.path.exists(f"pid.{rank}"):
            time.sleep(0.01)
        with contextlib.suppress(OSError):  # it has ended
            while pathlib.Path(f"/proc/{pathlib.Path(f'pid.{rank}').read_text()}/cmdline").read_text():
                time.sleep(0.01)
    rank = os.environ["RANK_ID"]
    pathlib.Path(f"new.{rank}").write_text(str(os.getpid()))
    os.rename(f"new.{rank}", f"pid.{rank}")
"""


def test_the_cause_is_named_and_not_a_secondary_failure(tmp_path):
    write_script(
        tmp_path,
        f"""{FAILING_ONE_AFTER_THE_OTHER}
    if rank == "0":
        raise RuntimeError("training stopped") from HorovodInternalError("a peer is gone")
    wait_for_the_end_of(0)
    raise KeyError("the cause")
        """,
    )
    code, output = npu_run("-np", "2", "train.py", cwd=tmp_path, prepare=PATIENT)
    assert code == 1
    assert output.splitlines()[-1].startswith("npu-run: rank 1 of 2 ended with KeyError: 'the cause'")


def test_a_rank_that_is_gone_without_a_word_is_named_and_not_those_that_notice(tmp_path):
    write_script(
        tmp_path,
        f"""{FAILING_ONE_AFTER_THE_OTHER}
    if rank == "1":
        os._exit(0)
    wait_for_the_end_of(1)
    raise HorovodInternalError("a peer is gone")
        """,
    )
    code, output = npu_run("-np", "3", "--logs", "train.py", cwd=tmp_path, prepare=PATIENT)
    assert code == 1
    assert output == (
        "npu-run: rank 1 of 3 was gone before the end of its script, without an exception, as after os._exit(0); "
        "exit code 1. The other ranks were stopped.\n"
    )
    # Output that survivors would have printed is in their logs. One of them can be stopped before it prints.
    logs = [(tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 2)]
    assert any("Traceback (most recent call last):" in log and "a peer is gone" in log for log in logs)


@pytest.mark.parametrize(
    "prepare, problem",
    [
        (
            "ip link set lo up",
            "Horovod cannot find this machine by name. Expected an address for the name nowhere.invalid; got none. Add "
            "a line to /etc/hosts: 127.0.0.1 nowhere.invalid",
        ),
        (
            "ip link set lo up; ip link set lo down; hostname localhost",
            "no network interface that is up has the address 127.0.0.1. Bring one up: ip link set lo up",
        ),
    ],
    ids=["name", "interface"],
)
def test_a_machine_that_ranks_cannot_find_is_told_before_they_start(tmp_path, prepare, problem):
    apart = ["unshare", "--net", "--uts", "sh", "-ec", f'hostname nowhere.invalid; {prepare}; exec "$@"', "sh"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here, which takes root, unshare, ip and hostname")
    write_script(tmp_path, "open('started', 'w')")
    command = [*apart, sys.executable, "-m", "npu_bridge.run", "-np", "2", "train.py"]
    names = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=names, capture_output=True, text=True, check=False)
    assert ran.stderr.splitlines()[1:] == [f"npu-run: {problem}"] and ran.returncode == 2
    assert not (tmp_path / "started").exists()


OWN_LOOP = """
import numpy as np
import tensorflow as tf
from npu_bridge.npu_init import npu_keras_optimizer

model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=[2])])
optimizer = npu_keras_optimizer(tf.keras.optimizers.Adam(0.1))


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))


for _ in range(3):
    step(tf.ones([4, 2]), tf.ones([4, 1]))
print("trained")
"""


@pytest.mark.slow("a whole training; how jobs end is in test_failures.py")
@pytest.mark.parametrize("options", [("-np", 2), ("--logs",)], ids=["two ranks", "one rank that is watched"])
def test_an_own_loop_ends_without_errors_of_objects_that_outlive_their_modules(options, tmp_path):
    write_script(tmp_path, OWN_LOOP)
    code, text = npu_run(*options, "train.py", cwd=tmp_path)
    assert (code, "trained" in text) == (0, True) and "Exception ignored" not in text
