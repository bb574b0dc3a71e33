"""Ranks and GPUs: which one a rank sees, two ranks on one GPU, and two GPUs where there are two."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

pytestmark = [pytest.mark.slow("for a GPU that most machines do not have"), pytest.mark.ranks(2)]
SCRIPT = """
import os
import numpy as np
from npu_bridge.npu_init import *
rank, size = get_rank_id(), get_rank_size()
random = np.random.RandomState(0)
rows = random.randn(16, 8).astype("f")[rank::size]
kernel = tf.get_variable("kernel", [8, 1], initializer=tf.ones_initializer())
product = tf.matmul(rows, kernel, name="product")
loss = tf.reduce_mean(tf.square(product - rows.sum(axis=1, keepdims=True) * 2.0))
manager = ExponentialUpdateLossScaleManager(2.0**10, 3, 1, 2, 0.5)
optimizer = NPUOptimizer(tf.train.AdamOptimizer(0.1), manager, size > 1, True, is_tailing_optimization=size > 1)
step = optimizer.minimize(loss)
metadata, options = tf.RunMetadata(), tf.RunOptions(output_partition_graphs=True)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for number in range(10):
        session.run(step)
    session.run(product, options=options, run_metadata=metadata)
    where = {node.device for graph in metadata.partition_graphs for node in graph.node if "MatMul" in node.op}
    print("values", rank, *session.run(kernel).ravel().tolist())
print("device", rank, *where, os.environ.get("CUDA_VISIBLE_DEVICES", "-"))
"""


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs the script on some ranks and gives values and devices, by rank."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def start(size, engine="horovod"):
        command = [sys.executable, "-m", "npu_bridge.run", "-np", str(size), "--collectives", engine, "train.py"]
        job = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert job.returncode == 0, job.stdout + job.stderr
        lines = [line.partition("] ")[2] if line.startswith("[rank") else line for line in job.stdout.splitlines()]
        words = [line.split() for line in lines if line.startswith(("values", "device"))]
        values = {int(rank): [float(number) for number in rest] for kind, rank, *rest in words if kind == "values"}
        devices = {int(rank): rest for kind, rank, *rest in words if kind == "device"}
        return values, devices

    return start


@pytest.mark.parametrize("engine", ["horovod", "tensorflow"])
def test_two_ranks_train_as_one_and_share_a_gpu_where_there_is_one(run, processor, engine):
    (one, _), (two, devices) = run(1), run(2, engine)
    assert sorted(two) == [0, 1] and two[0] == two[1]
    np.testing.assert_allclose(two[0], one[0], rtol=1e-4)
    assert all(f"device:{processor}:0" in devices[rank][0] for rank in two), devices


def test_each_rank_sees_a_gpu_of_its_own_where_there_are_two(run, real_gpu):
    if len(tf.config.list_physical_devices("GPU")) < 2:
        pytest.skip("one GPU on this machine")
    _, devices = run(2)
    assert [devices[rank][-1] for rank in (0, 1)] == ["0", "1"]
