"""Real Horovod jobs that go wrong: each ends with one line that names the rank and, where known, the tensor."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import psutil
import pytest

from tests.npu_run.launching import PATIENT, is_alive, needs_horovod, npu_run, wait_for, write_script

pytestmark = [pytest.mark.ranks(2), needs_horovod]

# The ranks train and save, then build the same model again and continue; some of them obey the argument.
TRAINING = """
    import os, pathlib, signal, sys, threading, time
    import tensorflow as tf
    from hccl.manage.api import get_rank_id
    from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
    from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
    tf1 = tf.compat.v1
    rank = get_rank_id()

    def build():
        variables = [tf1.get_variable("kernel", [3, 4]), tf1.get_variable("bias", [4])]
        manager = FixedLossScaleManager(2**10)
        optimizer = NPUOptimizer(tf1.train.AdamOptimizer(), manager, is_distributed=True, is_loss_scale=True)
        loss = tf.add_n([tf.reduce_sum(variable**2) for variable in variables])
        return optimizer.minimize(loss, tf1.train.get_or_create_global_step(), variables)

    def numbers():
        pathlib.Path("hanging").touch()
        while True:
            time.sleep(0.1)
        yield 1.0

    def train(mischief=""):
        with tf.Graph().as_default(), tf1.Session() as session:
            train_op, saver = build(), tf1.train.Saver(max_to_keep=3)
            signature = tf.TensorSpec([], tf.float32)
            batches = tf.data.Dataset.from_generator(numbers, output_signature=signature)
            batch = tf1.data.make_one_shot_iterator(batches).get_next()
            session.run(tf1.global_variables_initializer())
            if mischief == "kill":
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
            for step in range(10_000 if sys.argv[1] == "kill" and mischief != "first" else 3):
                session.run(train_op)
                if step == 1 and mischief == "hang":
                    time.sleep(600)
                if step == 1 and mischief == "input":
                    session.run(batch)
                if rank == 0:
                    # Each training under a name of its own: TensorFlow replaces a checkpoint file by file.
                    saver.save(session, f"model/{mischief or 'again'}", tf1.train.get_global_step())

    train("first")
    # The rank that is killed is the one that saves, in the middle of it as likely as not.
    ways = {"kill": ["kill", ""], "hang": ["", "hang", "input"]}
    train(ways[sys.argv[1]][rank])
"""
ENDS = {
    "kill": (137, "rank 0 of 2 was killed by SIGKILL"),
    "hang": (124, "no progress for "),
}


@pytest.mark.slow("two trainings; test_local_ranks.py names who was killed")
@pytest.mark.parametrize("mischief", ENDS)
def test_a_training_that_fails_ends_with_its_reason_and_leaves_a_whole_checkpoint(tmp_path, mischief):
    write_script(tmp_path, TRAINING)
    options, prepare = ["-np", "2"], PATIENT
    if mischief == "hang":
        # A rank that is stuck in its input does not end because Horovod does.
        options, prepare = ["-np", "3", "--stall-secs", "5"], f"{PATIENT}\nsupervisor.SECONDARY_GRACE_SECS = 20.0"
    code, output = npu_run(*options, "train.py", mischief, cwd=tmp_path, prepare=prepare)
    expected_code, reason = ENDS[mischief]
    verdict = output.splitlines()[-1]
    assert verdict.startswith(f"npu-run: {reason}")
    if mischief == "hang":
        assert re.search(r"rank 0 waiting for \S*NPUOptimizerAdamOptimizer\S* at train\.py:", verdict)
        assert re.search(r"rank 1 missing, it (stays|is) at train\.py:\d+ \(time\.sleep\(600\)\)", verdict)
        assert re.search(r"rank 2 is in its input pipeline \(train\.py:\d+\)", verdict)
    assert code == expected_code
    # Of the other rank there is a line and not the story; Horovod itself may log one, if it was in a transfer.
    told = [line for line in output.splitlines() if "Horovod background loop uncaught exception" not in line]
    story = [line for line in told if "Horovod has been shut down" in line or "gloo/transport" in line]
    assert len(story) <= (mischief != "hang")
    assert "[[{{node" not in output
    wait_for(lambda: not processes_in(tmp_path), "the end of all processes")
    assert_restorable(tmp_path / "model")


def processes_in(folder):
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


def test_ranks_that_disagree_are_told_the_tensor_and_a_stopped_process_is_named(tmp_path):
    """Without an optimizer of ours. One sum of different shapes is refused on both ranks; then one of them stops."""
    write_script(
        tmp_path,
        """
        import os, pathlib, signal, sys
        import horovod.tensorflow as hvd
        import tensorflow as tf
        from npu_run.rank.report import describe_exception
        hvd.init()
        pathlib.Path(f"pid.{hvd.rank()}").write_text(str(os.getpid()))
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            # No constants: TensorFlow would take their sums out of the graph.
            one, two = tf.compat.v1.get_variable("one", [2 + hvd.rank()]), tf.compat.v1.get_variable("two", [2])
            different = hvd.allreduce(one, name="grad_one", op=hvd.Sum)
            same = hvd.allreduce(two, name="grad_two", op=hvd.Sum)
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(same)
            try:
                session.run(different)
            except tf.errors.OpError as error:
                report = describe_exception(error, __file__, 1)
                # In one piece: parts of lines are shown, too.
                sys.stdout.write(f"{report['summary']} {report['tensor']} {report['secondary']}\\n")
            session.run(same)
            if hvd.rank() == 1:
                pathlib.Path("hanging").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            session.run(same)
        """,
    )
    code, output = npu_run("-np", "2", "--stall-secs", "3", "train.py", cwd=tmp_path, prepare=PATIENT)
    # Later versions of TensorFlow say it in lines of their own, too.
    lines = [line for line in output.splitlines() if "local_rendezvous.cc" not in line]
    told = [line for line in lines if "Mismatched ALLREDUCE tensor shapes" in line]
    # The launcher's addition to such a summary: test_first_failure.py.
    assert len(told) == 2 and all(re.search(r"\(in \S*grad_one\S*\) \S*grad_one\S* False$", line) for line in told)
    assert code == 124
    verdict = output.splitlines()[-1]
    assert "rank 0 waiting at train.py:" in verdict
    assert "rank 1 missing, its process is stopped" in verdict
    pids = [int((tmp_path / f"pid.{rank}").read_text()) for rank in (0, 1)]
    wait_for(lambda: not any(map(is_alive, pids)), f"the end of {pids}")


@pytest.mark.slow("waits for ranks that never come")
def test_a_group_that_one_rank_alone_makes_ends_the_job_and_names_the_others(tmp_path):
    """Said at half of the limit, and the end at the limit: that of the environment here, 60 and 120 s without it."""
    write_script(
        tmp_path,
        """
        import time
        from hccl.manage.api import create_group, get_rank_id
        if get_rank_id() == 0:
            create_group("pair", 2, [0, 1])
        time.sleep(300)
        """,
    )
    code, output = npu_run("-np", "2", "train.py", cwd=tmp_path, HCCL_CONNECT_TIMEOUT="4")
    assert code == 1
    lines = [line for line in output.splitlines() if "not every rank takes part in making group 'pair'" in line]
    assert "got no call from rank 1 for 2 of 4 seconds" in lines[0]
    assert "rank 0 of 2 ended with RanksMissingError" in lines[-1]
    assert "got no call from rank 1 within 4 seconds" in lines[-1] and "Add the missing call" in lines[-1]


@pytest.mark.slow("waits for what hangs")
def test_a_job_that_can_never_go_on_ends_by_itself_and_one_that_computes_does_not(tmp_path):
    """The default limit, made short: a single run of rank 0 takes longer than that, and the other one waits for it."""
    write_script(
        tmp_path,
        """
        import pathlib
        import horovod.tensorflow as hvd
        import tensorflow as tf
        from npu_run.rank import stuck_call
        stuck_call._NOTICE_SECS = stuck_call._AGAIN_SECS = 0.5
        hvd.init()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            end = tf.timestamp() + (16.0 if hvd.rank() == 0 else 0.0)
            square = tf.ones([100, 100])
            work = lambda matrix: (tf.matmul(matrix, square) / 100.0,)
            (busy,) = tf.while_loop(lambda matrix: tf.timestamp() < end, work, [square], parallel_iterations=1)
            together = hvd.allreduce(tf.reduce_mean(busy), op=hvd.Sum, name="together")
            weight = tf.compat.v1.get_variable("weight", [])  # the sum of a constant would be taken out of the graph
            apart = hvd.allreduce(weight, op=hvd.Sum, name=f"apart_{hvd.rank()}")
            session.run(weight.initializer)
            pathlib.Path("hanging").touch()
            assert session.run(together) == 2.0
            print("computed", flush=True)
            session.run(apart)
        """,
    )
    limit = f"{PATIENT}\nhang.IDLE_LIMIT_SECS = 12.0"
    code, output = npu_run("-np", "2", "train.py", cwd=tmp_path, prepare=limit)
    assert code == 1
    assert "computed" in output.splitlines()
    verdict = output.splitlines()[-1]
    assert all(f"rank {rank} waiting for apart_{rank} at train.py:" in verdict for rank in range(2))


UNEQUAL = """
    import sys
    import numpy as np
    import tensorflow as tf
    from hccl.manage.api import get_rank_id
    from npu_bridge.estimator.npu.npu_config import NPURunConfig
    from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
    from npu_bridge.estimator.npu.npu_optimizer import KerasDistributeOptimizer, NPUDistributedOptimizer

    tf1 = tf.compat.v1

    def input_fn():
        batch = np.ones([2, 3], np.float32), np.ones([2, 1], np.float32)
        return tf.data.Dataset.from_tensors(batch).repeat(9 if get_rank_id() == 0 else 4)

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(tf.matmul(features, tf1.get_variable("kernel", [3, 1])) - labels))
        optimizer = NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(0.1))
        train_op = optimizer.minimize(loss, tf1.train.get_or_create_global_step())
        return NPUEstimatorSpec(mode, loss=loss, train_op=train_op)

    if sys.argv[1] == "loop":
        with tf.Graph().as_default():
            spec = model_fn(tf.ones([2, 3]), tf.ones([2, 1]), "train")
            with tf1.Session() as session:
                session.run(tf1.global_variables_initializer())
                for number in range(9 if get_rank_id() == 0 else 4):
                    session.run([spec.train_op, spec.loss] if number % 2 else spec.train_op)  # the same training
    elif sys.argv[1] == "estimator":
        config = NPURunConfig(model_dir="out", log_step_count_steps=None)
        NPUEstimator(model_fn, config=config).train(input_fn)
    else:
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
        model.compile(KerasDistributeOptimizer(tf.keras.optimizers.SGD(0.1)), "mse")
        model.fit(input_fn(), verbose=0)
"""


@pytest.mark.few_fast(1, "of an Estimator, ranks wait 20 s for each other; a loop is slow, too")
@pytest.mark.parametrize(
    ("way", "what"),
    [("keras", "was through with model.fit"), ("estimator", "came to the end of its input"), ("loop", "ended")],
)
def test_a_rank_whose_input_ends_early_is_named_with_its_step_and_what_to_do(tmp_path, way, what):
    code, output = npu_run("-np", 2, write_script(tmp_path, UNEQUAL), way, cwd=tmp_path)
    last = output.splitlines()[-1]
    assert code == 1
    assert f"rank 1 of 2 {what} after 4 steps, and rank 0 continued to step 5, which needs every rank" in last
    assert "EndTogether" in last and "Traceback" not in output
