"""Ranks that are lost in the middle of steps that overlap: named as everywhere, within seconds."""

from __future__ import annotations

import signal

import pytest

from tests.npu_run.launching import PATIENT, needs_horovod, npu_run, write_script

pytestmark = [pytest.mark.ranks(2), needs_horovod]
TRAINING = """
import os, pathlib, signal, sys, threading
import tensorflow as tf
from hccl.manage.api import get_rank_id
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.session.iterations import name_step, train_in_loops
tf1 = tf.compat.v1
tf1.disable_v2_behavior()


def suffer():
    pathlib.Path("hanging").touch()
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))


values = tf.ones([64, 64])
for layer in range(8):
    values = tf.tanh(tf.matmul(values, tf1.get_variable(f"layer_{layer}", [64, 64])))
step = NPUOptimizer(tf1.train.AdamOptimizer(), is_distributed=True).minimize(tf.reduce_mean(values))
step = name_step(step)
with tf1.Session() as session:
    session.run(tf1.global_variables_initializer())
    train_in_loops(session, 5)
    for _ in range(4):
        session.run(step)
    assert any(op.name.startswith("overlapped_loop/") for op in session.graph.get_operations())
    print("OVERLAPS", flush=True)
    train_in_loops(session, 10**6)
    if get_rank_id() == 1:
        threading.Timer(1.0, suffer).start()
    session.run(step)
"""


@pytest.mark.slow("a rank is lost in single steps, too")
@pytest.mark.parametrize(
    ("fault", "code", "story"),
    [
        ("SIGKILL", 128 + signal.SIGKILL, "rank 1 of 2 was killed by SIGKILL"),
        ("SIGSTOP", 124, "rank 1 missing, its process is stopped"),
    ],
)
def test_a_rank_that_is_lost_in_the_middle_is_named(tmp_path, monkeypatch, fault, code, story):
    monkeypatch.setenv("NPU_OVERLAPPED_STEPS", "1")
    write_script(tmp_path, TRAINING)
    found, output = npu_run("-np", 2, "--stall-secs", 4, "train.py", fault, cwd=tmp_path, prepare=PATIENT)
    assert output.count("OVERLAPS") >= 2, output
    assert (found, story in output.splitlines()[-1]) == (code, True), output
