"""Real Horovod jobs that go wrong: each ends with one line that names the rank and, where known, the tensor."""

from __future__ import annotations

import time

import pytest

from tests.launch.launching import finish, is_alive, needs_horovod, npu_run, start, wait_for, write_script

pytestmark = [pytest.mark.ranks(2), pytest.mark.timeout(120), needs_horovod]

# Two ranks sum two variables in each of eight steps; rank 1 does what the argument says.
SCRIPT = """
    import os, pathlib, signal, sys, time
    import horovod.tensorflow as hvd
    import tensorflow as tf
    mischief = sys.argv[1]
    pathlib.Path(f"pid.{os.environ['RANK_ID']}").write_text(str(os.getpid()))
    # Importing takes longer on one rank than on the other: that is no standstill to be tested here.
    while not os.path.exists("pid.0") or not os.path.exists("pid.1"):
        time.sleep(0.01)
    hvd.init()
    is_bad = hvd.rank() == 1
    shape = [3 if is_bad and mischief == "shape" else 2]
    zeros = tf.compat.v1.zeros_initializer()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        one = tf.compat.v1.get_variable("one", shape, tf.float32, zeros)
        two = tf.compat.v1.get_variable("two", shape, tf.float32, zeros)
        sums = [hvd.allreduce(one, name="grad_one", op=hvd.Sum)]
        if not (is_bad and mischief == "variables"):
            sums.append(hvd.allreduce(two, name="grad_two", op=hvd.Sum))
        session.run(tf.compat.v1.global_variables_initializer())
        for step in range(8):
            if is_bad and step == 4:
                if mischief == "sleep":
                    time.sleep(600)
                if mischief == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if mischief == "raise":
                    raise ValueError("bad batch")
            session.run(sums)
"""
STALL_SECS = 3


def run(folder, mischief, *options):
    """Runs the script; gives exit code and last line, after checking that nothing stays behind."""
    write_script(folder, SCRIPT)
    code, output = npu_run("-np", "2", *options, "train.py", mischief, cwd=folder)
    pids = [int((folder / f"pid.{rank}").read_text()) for rank in (0, 1)]
    wait_for(lambda: not any(map(is_alive, pids)), f"the end of {pids}", limit_secs=5)
    return code, output.splitlines()[-1]


@pytest.mark.parametrize(
    ("mischief", "code", "part"),
    [
        ("raise", 1, "rank 1 of 2 ended with ValueError: bad batch"),
        ("shape", 1, "Mismatched ALLREDUCE tensor shapes"),
    ],
)
def test_failing_job_ends_with_its_reason(tmp_path, mischief, code, part):
    got, verdict = run(tmp_path, mischief)
    assert got == code
    assert verdict.startswith("npu-run: rank ") and part in verdict
    if "Mismatched" in part:
        assert "grad_one" in verdict or "grad_two" in verdict
        assert "The ranks disagree" in verdict


def test_hanging_rank_is_named_with_the_tensor_others_wait_for(tmp_path):
    code, verdict = run(tmp_path, "sleep", "--stall-secs", STALL_SECS)
    assert code == 124
    assert verdict.startswith(f"npu-run: no progress for {STALL_SECS} s: rank 0 waiting for grad_")
    assert "rank 1 missing, it stays at train.py:" in verdict and "time.sleep(600)" in verdict


def test_ranks_with_different_variables_are_told_what_each_waits_for(tmp_path):
    code, verdict = run(tmp_path, "variables", "--stall-secs", STALL_SECS)
    assert code == 124
    assert "rank 0 waiting for grad_two" in verdict
    assert "rank 1 waiting for grad_one" in verdict


def test_stopped_process_is_named(tmp_path):
    code, verdict = run(tmp_path, "stop", "--stall-secs", STALL_SECS)
    assert code == 124
    assert "rank 0 waiting at train.py:" in verdict
    assert "rank 1 missing, its process is stopped" in verdict


def test_a_job_that_moves_is_not_ended_however_long_it_takes(tmp_path):
    write_script(
        tmp_path,
        """
        import os, pathlib, time
        import horovod.tensorflow as hvd
        import tensorflow as tf
        pathlib.Path(f"up.{os.environ['RANK_ID']}").touch()
        while not os.path.exists("up.0") or not os.path.exists("up.1"):
            time.sleep(0.01)
        hvd.init()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            value = tf.compat.v1.placeholder(tf.float32, [])
            total = hvd.allreduce(value, op=hvd.Sum, name="total")
            for step in range(4):
                if step % 2 == hvd.rank():
                    time.sleep(1.5)
                session.run(total, {value: 1.0})
        """,
    )
    began = time.monotonic()
    process = start("-np", "2", "--stall-secs", "5", "train.py", cwd=tmp_path)
    assert finish(process)[0] == 0
    assert time.monotonic() - began > 5
