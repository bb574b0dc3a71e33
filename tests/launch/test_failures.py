"""Real Horovod jobs that go wrong: each ends with one line that names the rank and, where known, the tensor."""

from __future__ import annotations

import contextlib
import re
import time

import numpy as np
import psutil
import pytest

from npu_bridge.launch.job.hosts import Plan
from tests.launch.launching import finish, is_alive, needs_horovod, npu_run, start, wait_for, write_script

pytestmark = [pytest.mark.ranks(2), needs_horovod]

# Two ranks train and save, then build the same model again and go on; one of them does what the argument says.
TRAINING = """
    import os, signal, sys, threading, time
    import tensorflow as tf
    from hccl.manage.api import get_rank_id
    from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
    from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
    tf1 = tf.compat.v1
    rank = get_rank_id()

    def build(mischief=""):
        shape = [3, 5] if mischief == "shape" else [3, 4]
        variables = [tf1.get_variable("kernel", shape), tf1.get_variable("bias", [4])]
        manager = FixedLossScaleManager(2**10)
        optimizer = NPUOptimizer(tf1.train.AdamOptimizer(), manager, is_distributed=True, is_loss_scale=True)
        loss = tf.add_n([tf.reduce_sum(variable**2) for variable in variables])
        return optimizer.minimize(loss, tf1.train.get_or_create_global_step(), variables)

    def train(mischief=""):
        with tf.Graph().as_default(), tf1.Session() as session:
            train_op, saver = build(mischief), tf1.train.Saver(max_to_keep=3)
            session.run(tf1.global_variables_initializer())
            if mischief == "kill":
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
            for step in range(10_000 if sys.argv[1] == "kill" and mischief != "first" else 3):
                session.run(train_op)
                if step == 1 and mischief == "raise":
                    raise ValueError("bad batch")
                if step == 1 and mischief == "hang":
                    time.sleep(600)
                if rank == 0:
                    saver.save(session, "model/saved", tf1.train.get_global_step())

    train("first")
    # The rank that is killed is the one that saves, in the middle of it as likely as not.
    train(sys.argv[1] if rank == (0 if sys.argv[1] == "kill" else 1) else "")
"""
STALL_SECS = 3
ENDS = {
    "kill": (137, "rank 0 of 2 was killed by SIGKILL"),
    "raise": (1, "rank 1 of 2 ended with ValueError: bad batch"),
    "hang": (124, "rank 1 missing, it stays at train.py:"),
    # All other differences end in the same way: tests/ranks/test_agreement.py has them.
    "shape": (1, "Expected the shape (3, 4) of kernel:0 as on rank 0; got (3, 5)"),
}


@pytest.mark.parametrize("mischief", ENDS)
def test_a_training_that_fails_ends_with_its_reason_and_leaves_a_whole_checkpoint(tmp_path, mischief):
    write_script(tmp_path, TRAINING)
    options = ["--stall-secs", STALL_SECS] if mischief == "hang" else []
    code, output = npu_run("-np", "2", *options, "train.py", mischief, cwd=tmp_path)
    expected_code, reason = ENDS[mischief]
    verdict = output.splitlines()[-1]
    assert verdict.startswith("npu-run: ") and reason in verdict
    if "as on rank 0" in reason:
        assert "RanksDisagreeError: NPUOptimizerAdamOptimizer: rank 1 and rank 0 " in verdict
        assert "every rank" in verdict
    if mischief == "hang":
        assert re.search(r"rank 0 waiting for \S*NPUOptimizerAdamOptimizer\S* at train\.py:", verdict)
    assert code == expected_code
    # Of the other rank there is a line and not the story.
    assert output.count("Horovod has been shut down") + output.count("gloo/transport") <= (mischief != "hang")
    assert "[[{{node" not in output
    wait_for(lambda: not processes_in(tmp_path), "the end of all processes")
    assert_restorable(tmp_path / "model")


def processes_in(folder):
    """The processes that were started in a folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def assert_restorable(folder):
    """The latest checkpoint holds every variable of a training that has made steps, whole."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(folder))
    values = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    assert {"kernel", "bias", "kernel/Adam", "bias/Adam_1", "global_step"} <= set(values)
    assert values["global_step"] >= 1
    assert all(np.all(np.isfinite(value)) for value in values.values())


# Without an optimizer of ours: two ranks sum two variables in each of eight steps; rank 1 does what the argument says.
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
        if mischief == "input":
            def numbers():
                while is_bad:
                    time.sleep(0.1)
                yield 1.0
            batches = tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec([], tf.float32))
            batch = tf.compat.v1.data.make_one_shot_iterator(batches.repeat()).get_next()
            with tf.control_dependencies([batch]):
                sums = [hvd.allreduce(one + batch, name="grad_batch", op=hvd.Sum)]
        for step in range(8):
            if is_bad and step == 4:
                if mischief == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
            session.run(sums)
"""


def run(folder, mischief, *options):
    """Runs the script; gives exit code and last line, after checking that nothing stays behind."""
    write_script(folder, SCRIPT)
    code, output = npu_run("-np", "2", *options, "train.py", mischief, cwd=folder)
    pids = [int((folder / f"pid.{rank}").read_text()) for rank in (0, 1)]
    wait_for(lambda: not any(map(is_alive, pids)), f"the end of {pids}")
    return code, output.splitlines()[-1]


def test_ranks_with_different_shapes_are_told_the_tensor(tmp_path):
    code, verdict = run(tmp_path, "shape")
    assert code == 1
    assert verdict.startswith("npu-run: rank ") and "Mismatched ALLREDUCE tensor shapes" in verdict
    assert "grad_one" in verdict or "grad_two" in verdict
    assert "The ranks disagree" in verdict


def test_ranks_with_different_variables_are_told_what_each_waits_for(tmp_path):
    code, verdict = run(tmp_path, "variables", "--stall-secs", STALL_SECS)
    assert code == 124
    assert "rank 0 waiting for grad_two" in verdict
    assert "rank 1 waiting for grad_one" in verdict


def test_a_rank_whose_input_never_comes_is_named_with_its_place(tmp_path):
    code, verdict = run(tmp_path, "input", "--stall-secs", STALL_SECS)
    assert code == 124
    assert "rank 0 waiting for grad_batch at train.py:" in verdict
    assert re.search(r"rank 1 is in its input pipeline \(train\.py:\d+\)", verdict)


def test_stopped_process_is_named(tmp_path):
    code, verdict = run(tmp_path, "stop", "--stall-secs", STALL_SECS)
    assert code == 124
    assert "rank 0 waiting at train.py:" in verdict
    assert "rank 1 missing, its process is stopped" in verdict


def test_a_job_that_can_never_go_on_ends_by_itself_and_one_that_computes_does_not(tmp_path, monkeypatch, capfdbinary):
    """The default bound, made short: a single run of rank 0 takes longer than that, and the others wait for it."""
    script = write_script(
        tmp_path,
        """
        import time
        import horovod.tensorflow as hvd
        import tensorflow as tf
        hvd.init()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            end = tf.timestamp() + (11.0 if hvd.rank() == 0 else 0.0)
            square = tf.ones([100, 100])
            work = lambda matrix: (tf.matmul(matrix, square) / 100.0,)
            (busy,) = tf.while_loop(lambda matrix: tf.timestamp() < end, work, [square], parallel_iterations=1)
            together = hvd.allreduce(tf.reduce_mean(busy), op=hvd.Sum, name="together")
            apart = hvd.allreduce(tf.ones([]), op=hvd.Sum, name=f"apart_{hvd.rank()}")
            assert session.run(together) == 3.0
            print("computed", flush=True)
            session.run(apart)
        """,
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "DEFAULT_STALL_SECS", 7.0)
    outcome = job.run_ranks(str(script), [], Plan(3, {}))
    out, err = (text.decode() for text in capfdbinary.readouterr())
    print(out, err)
    assert "computed" in out
    assert outcome == job.Outcome(124, has_failed=True)
    verdict = err.splitlines()[-1]
    assert all(f"rank {rank} waiting for apart_{rank} at train.py:" in verdict for rank in range(3))


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
