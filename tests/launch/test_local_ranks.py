"""Jobs of real processes: their output, their environment, and how they end."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest

from tests.launch.launching import LIMIT_SECS, finish, is_alive, needs_horovod, npu_run, start, wait_for, write_script

pytestmark = [pytest.mark.ranks(2), needs_horovod]

# Ranks that say who they are, start a child of their own, and then wait for ever.
WAITING = """
    import os, pathlib, signal, subprocess, sys, time
    rank = os.environ["RANK_ID"]
    if "deaf" in sys.argv:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(f"pids.{rank}.new").write_text(f"{os.getpid()} {child.pid}")
    os.rename(f"pids.{rank}.new", f"pids.{rank}")
    time.sleep(600)
"""


def start_waiting(folder, *arguments):
    """Starts two waiting ranks; gives the launcher and the four pids."""
    write_script(folder, WAITING)
    process = start("-np", "2", "train.py", *arguments, cwd=folder)
    files = [folder / "pids.0", folder / "pids.1"]
    wait_for(lambda: all(file.exists() for file in files), "both ranks to be up")
    return process, [int(pid) for file in files for pid in file.read_text().split()]


def assert_all_gone(pids):
    wait_for(lambda: not any(is_alive(pid) for pid in pids), f"the end of {pids}")


def test_the_last_line_is_one_of_its_own_when_a_rank_is_stopped_in_the_middle_of_one(tmp_path):
    write_script(
        tmp_path,
        """
        import os, pathlib, sys, time
        if os.environ["RANK_ID"] == "0":
            print("half of a li", end="", file=sys.stderr, flush=True)
            pathlib.Path("said").touch()
            time.sleep(600)
        while not pathlib.Path("said").exists():
            time.sleep(0.01)
        time.sleep(0.5)
        sys.exit(3)
        """,
    )
    code, output = npu_run("-np", "2", "train.py", cwd=tmp_path)
    assert code == 3
    first, *_, last = output.splitlines()
    assert first == "half of a li"
    assert last.startswith("npu-run: rank 1 of 2 ended with sys.exit(3)")


def test_every_rank_gets_its_variables_and_a_share_of_the_cores(tmp_path):
    write_script(
        tmp_path,
        """
        import json, os
        names = "RANK_ID RANK_SIZE DEVICE_ID ASCEND_DEVICE_ID".split()
        names += "HOROVOD_RANK HOROVOD_SIZE HOROVOD_CONTROLLER".split()
        names += "OMP_NUM_THREADS TF_NUM_INTRAOP_THREADS TF_NUM_INTEROP_THREADS TF_CPP_MIN_LOG_LEVEL".split()
        with open(f"rank{os.environ['HOROVOD_RANK']}.json", "w") as file:
            json.dump({name: os.environ.get(name) for name in names}, file)
        """,
    )
    code, _ = npu_run("-np", "2", "train.py", cwd=tmp_path)
    assert code == 0
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in "01":
        seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert seen == {
            "RANK_ID": rank,
            "RANK_SIZE": "2",
            "DEVICE_ID": rank,
            "ASCEND_DEVICE_ID": rank,
            "HOROVOD_RANK": rank,
            "HOROVOD_SIZE": "2",
            "HOROVOD_CONTROLLER": "gloo",
            "OMP_NUM_THREADS": str(share),
            "TF_NUM_INTRAOP_THREADS": str(share),
            "TF_NUM_INTEROP_THREADS": str(max(2, share)),
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }


def test_variables_of_the_caller_are_kept(tmp_path):
    write_script(
        tmp_path,
        """
        import os
        if os.environ["HOROVOD_RANK"] == "0":
            print(os.environ["DEVICE_ID"], os.environ["OMP_NUM_THREADS"], os.environ["TF_CPP_MIN_LOG_LEVEL"])
        """,
    )
    variables = {"DEVICE_ID": "5", "OMP_NUM_THREADS": "3", "TF_CPP_MIN_LOG_LEVEL": "0"}
    assert npu_run("-np", "2", "train.py", cwd=tmp_path, **variables) == (0, "5 3 0\n")


def test_rank_0_speaks_plainly_and_the_others_behind_their_number(tmp_path):
    write_script(
        tmp_path,
        """
        import os, sys
        for line in range(50):
            print("line", line, "of", os.environ["RANK_ID"])
            print("note", line, "of", os.environ["RANK_ID"], file=sys.stderr)
        print("unfinished", end="")
        """,
    )
    code, output = npu_run("-np", "3", "train.py", cwd=tmp_path)
    assert code == 0
    lines = output.splitlines()
    for rank, prefix in enumerate(["", "[rank 1] ", "[rank 2] "]):
        for stream in ("line", "note"):
            expected = [f"{prefix}{stream} {line} of {rank}" for line in range(50)]
            assert [text for text in lines if text.startswith(f"{prefix}{stream}")] == expected
    assert "[rank 2] unfinished" in lines


def test_output_appears_while_the_ranks_run(tmp_path):
    write_script(
        tmp_path,
        """
        import os, time
        if os.environ["RANK_ID"] == "0":
            print("step 1")
        while not os.path.exists("seen"):
            time.sleep(0.02)
        """,
    )
    process = start("-np", "2", "train.py", cwd=tmp_path)
    assert [process.stdout.readline() for _ in range(2)] == ["npu-run: starting 2 ranks of train.py\n", "step 1\n"]
    (tmp_path / "seen").touch()
    assert finish(process)[0] == 0


def test_rank_0_keeps_the_terminal(tmp_path):
    write_script(
        tmp_path,
        """
        import os, sys
        if os.environ["RANK_ID"] == "0":
            print("terminal", sys.stdout.isatty(), sys.stderr.isatty())
        """,
    )
    screen, terminal = os.openpty()
    process = start("-np", "2", "train.py", cwd=tmp_path, output=terminal)
    os.close(terminal)
    assert process.wait(timeout=LIMIT_SECS) == 0
    assert os.read(screen, 1000).splitlines()[1:] == [b"terminal True True"]
    os.close(screen)


def test_exception_on_one_rank_ends_the_job_and_is_printed_last(tmp_path):
    write_script(
        tmp_path,
        """
        import os, time
        def fail():
            raise ValueError("bad batch")
        if os.environ["RANK_ID"] == "1":
            fail()
        time.sleep(600)
        """,
    )
    code, output = npu_run("-np", "2", "train.py", cwd=tmp_path)
    assert code == 1
    *_, cause, verdict = output.splitlines()
    assert cause == "ValueError: bad batch"
    assert verdict.startswith("npu-run: rank 1 of 2 ended with ValueError: bad batch; exit code 1.")
    tail = output[output.rindex("npu-run: traceback of rank 1:") :]
    assert "line 4, in fail" in tail


def test_killed_rank_is_named_and_nothing_stays_behind(tmp_path):
    process, pids = start_waiting(tmp_path)
    os.kill(pids[2], signal.SIGKILL)
    code, output = finish(process)
    assert code == 128 + signal.SIGKILL
    assert output.splitlines()[-1].startswith("npu-run: rank 1 of 2 was killed by SIGKILL")
    assert_all_gone(pids)


@pytest.mark.parametrize(
    ("statement", "code", "how"),
    [
        ("sys.exit(7)", 7, "ended with sys.exit(7)"),
        ("sys.exit('no data')", 1, "ended with sys.exit('no data')"),
        ("os._exit(9)", 9, "ended without an exception"),
        ("os.abort()", 128 + signal.SIGABRT, "was killed by SIGABRT"),
    ],
)
def test_exit_code_is_that_of_the_rank_that_failed(tmp_path, statement, code, how):
    write_script(
        tmp_path,
        f"""
        import os, sys, time
        if os.environ["RANK_ID"] == "1":
            {statement}
        time.sleep(600)
        """,
    )
    got, output = npu_run("-np", "2", "train.py", cwd=tmp_path)
    assert got == code
    assert f"npu-run: rank 1 of 2 {how}" in output.splitlines()[-1]


def test_the_end_of_a_forked_process_is_not_that_of_its_rank(tmp_path):
    write_script(
        tmp_path,
        """
        import os, sys, time
        child = os.fork()
        if not child:
            sys.exit(3)
        _, status = os.waitpid(child, 0)
        time.sleep(0.5)  # longer than the launcher takes to be sure of a cause
        print("the child ended with", os.waitstatus_to_exitcode(status))
        """,
    )
    code, output = npu_run("-np", "2", "train.py", cwd=tmp_path)
    assert code == 0
    assert sorted(output.splitlines()) == ["[rank 1] the child ended with 3", "the child ended with 3"]


def test_the_cause_is_named_and_not_its_echo(tmp_path):
    write_script(
        tmp_path,
        """
        import os, time
        class HorovodInternalError(RuntimeError):
            pass
        import pathlib
        pathlib.Path(os.environ["RANK_ID"]).touch()
        while not os.path.exists("0") or not os.path.exists("1"):
            time.sleep(0.01)
        if os.environ["RANK_ID"] == "0":
            raise RuntimeError("training stopped") from HorovodInternalError("a peer is gone")
        time.sleep(1)
        raise KeyError("the cause")
        """,
    )
    code, output = npu_run("-np", "2", "train.py", cwd=tmp_path)
    assert code == 1
    assert output.splitlines()[-1].startswith("npu-run: rank 1 of 2 ended with KeyError: 'the cause'")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("arguments", [[], ["deaf"]])
def test_signals_stop_every_rank(tmp_path, number, code, arguments):
    process, pids = start_waiting(tmp_path, *arguments)
    process.send_signal(number)
    got, output = finish(process)
    assert got == code
    name = signal.Signals(number).name
    assert f"npu-run: {name}, stopping 2 ranks" in output
    assert output.splitlines()[-1] == f"npu-run: stopped by {name}; exit code {code}. All ranks were stopped."
    assert_all_gone(pids)


def test_ranks_end_when_the_launcher_is_killed(tmp_path):
    process, pids = start_waiting(tmp_path, "deaf")
    process.kill()
    finish(process)
    assert_all_gone(pids)


def test_closed_output_ends_the_job(tmp_path):
    write_script(tmp_path, "import time\nwhile True:\n    print('x' * 1000)\n    time.sleep(0.01)\n")
    process = start("-np", "2", "train.py", cwd=tmp_path)
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=LIMIT_SECS) == 128 + signal.SIGPIPE


def test_horovod_sums_over_the_started_ranks(tmp_path):
    write_script(
        tmp_path,
        """
        import horovod.tensorflow as hvd
        import tensorflow as tf
        hvd.init()
        total = hvd.allreduce(tf.constant([1.0 + hvd.rank()]), op=hvd.Sum)
        print("total", float(total[0]), "size", hvd.size(), "local", hvd.local_size())
        """,
    )
    code, output = npu_run("-np", "2", "train.py", cwd=tmp_path)
    assert code == 0
    assert "total 3.0 size 2 local 2" in output.splitlines()
    assert "[rank 1] total 3.0 size 2 local 2" in output.splitlines()


def test_rank_that_dies_in_a_collective_is_named_and_not_the_one_left_waiting(tmp_path):
    write_script(
        tmp_path,
        """
        import os, signal
        import horovod.tensorflow as hvd
        import tensorflow as tf
        hvd.init()
        for step in range(1000):
            if step == 3 and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(tf.constant([1.0]), name="gradient")
        """,
    )
    code, output = npu_run("-np", "2", "train.py", cwd=tmp_path)
    assert code == 128 + signal.SIGKILL
    assert output.splitlines()[-1].startswith("npu-run: rank 1 of 2 was killed by SIGKILL")


def test_a_rank_that_is_gone_without_a_word_is_named_and_not_those_that_notice(tmp_path):
    write_script(
        tmp_path,
        """
        import os, time
        class HorovodInternalError(RuntimeError):
            pass
        if os.environ["RANK_ID"] == "1":
            os._exit(0)
        time.sleep(0.5)
        raise HorovodInternalError("a peer is gone")
        """,
    )
    code, output = npu_run("-np", "3", "--log-dir", "logs", "train.py", cwd=tmp_path)
    assert code == 1
    survivors, verdict = output.splitlines()
    # One of them may have been stopped before it could say so.
    pattern = "npu-run: ranks? (0|2|0, 2) ended with HorovodInternalError: a peer is gone after that"
    found = re.fullmatch(pattern, survivors)
    assert verdict == (
        "npu-run: rank 1 of 3 was gone before its script came to its end, without an exception, as after os._exit(0); "
        "exit code 1. The other ranks were stopped."
    )
    # What a survivor would have printed is in the log.
    assert "Traceback (most recent call last):" in (tmp_path / "logs" / f"rank_{found[1][0]}.log").read_text()


def test_ranks_that_all_leave_by_os_exit_have_done_well(tmp_path):
    write_script(tmp_path, "import os\nprint('done', flush=True)\nos._exit(0)")
    assert npu_run("-np", "2", "train.py", cwd=tmp_path)[0] == 0
