"""How much hooks bring from the device to the host in each step: a few numbers, and no tensor of the model."""

from __future__ import annotations

import io

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.reporting import HistoryHook, ProgressHook
from tests.goldens.two_layers import OPTIMIZERS

tf1 = tf.compat.v1
pytestmark = pytest.mark.slow("for a GPU that most machines do not have")
# The loss, its scale, whether the step was skipped, and the learning rate where it is a tensor.
NUMBERS = 4


def brought(metadata, processor):
    """Returns how many tensors a run has brought to the host: copies of the GPU, or what the CPU's graphs return."""
    if processor == "GPU":
        return sum(
            "MEMCPYDtoH" in f"{node.node_name} {node.timeline_label}"
            for device in metadata.step_stats.dev_stats
            for node in device.node_stats
        )
    return sum(node.op == "_Retval" for graph in metadata.partition_graphs for node in graph.node)


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_step_brings_no_more_than_a_few_numbers(is_watched, processor, tmp_path):
    """Also in the steps of which the progress line shows nothing: the history keeps the loss of each."""
    with tf.Graph().as_default():
        kernel = tf1.get_variable("kernel", [256, 256], use_resource=True)
        loss = tf.reduce_mean(tf.square(tf.matmul(tf.ones([64, 256]), kernel)))
        manager = ExponentialUpdateLossScaleManager(2.0**10, 1000, 1, 2, 0.5)
        step = NPUOptimizer(OPTIMIZERS["adam"](), manager, is_loss_scale=True).minimize(
            loss, tf1.train.get_or_create_global_step()
        )
        options = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE, output_partition_graphs=True)
        hooks = [ProgressHook(every_n_steps=10, stream=io.StringIO()), HistoryHook(str(tmp_path / "history.jsonl"))]
        with tf1.train.MonitoredSession(hooks=hooks if is_watched else []) as session:
            for _ in range(3):
                session.run(step)
            for _ in range(3):
                metadata = tf1.RunMetadata()
                session.run(step, options=options, run_metadata=metadata)
                count = brought(metadata, processor)
                assert (1 <= count <= NUMBERS) if is_watched else count == 0
