"""`npu_device` on two real ranks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from tests.rank_pool import on_each_rank


@on_each_rank(2)
def test_what_ranks_exchange():
    import npu_device as npu

    rank = collective.current().rank
    handle = npu.npu_device.NpuDeviceHandle(0, npu.global_options().training_options())
    assert (handle.workers_num, handle.worker_id, handle.is_cluster_worker()) == (2, rank, True)
    reduce = npu.distribute.all_reduce
    assert float(reduce(np.float32(rank + 1))) == 1.5
    assert float(reduce(tf.constant(rank))) == 0.5
    total, nothing = reduce([tf.ones(2) * rank, None], "sum")
    assert total.numpy().tolist() == [1.0, 1.0] and nothing is None
    assert tf.function(lambda value: reduce(value, "max"))(tf.constant(float(rank))).numpy() == 1.0
    variables = [tf.Variable([rank + 1.0]), tf.Variable(rank)]
    npu.distribute.broadcast(variables, root_rank=1)
    assert [each.numpy().tolist() for each in variables] == [[2.0], 1]
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="a TF 1 graph. Write session.run"):
        npu.distribute.grouping_broadcast([tf.Variable(1.0)])
    dataset, batch = npu.distribute.shard_and_rebatch_dataset(tf.data.Dataset.range(6), 4)
    assert (list(dataset.as_numpy_iterator()), batch) == ([rank, rank + 2, rank + 4], 2)
    with pytest.raises(ValueError, match="cannot share a batch"):
        npu.distribute.shard_and_rebatch_dataset(dataset, 3)
    for generation in ("current", "legacy"):
        for is_function in (True, False):
            trained = [[9.0, 8.0, 1.0, 1.0], [9.0, 4.0, 2.0, 0.0], [8.0, 4.0, 3.0, 1.0]]
            assert scaled_training(generation, is_function) == trained
    pairs = npu.distribute.grouping_gradients_apply(list, [(tf.constant(float(rank)), "variable"), (None, "other")])
    assert [(None if grad is None else grad.numpy(), name) for grad, name in pairs] == [
        (0.5, "variable"),
        (None, "other"),
    ]


def scaled_training(generation, is_function):
    """Steps of gradients 1, 3 on the two ranks, where the second step overflows on rank 1 alone."""
    import npu_device as npu

    rank = collective.current().rank
    kinds = tf.keras.optimizers if generation == "current" else tf.keras.optimizers.legacy
    inner = npu.distribute.npu_distributed_keras_optimizer_wrapper(kinds.SGD(0.5))
    optimizer = npu.train.optimizer.NpuLossScaleOptimizer(inner, initial_scale=8.0)
    variable = tf.Variable(10.0)

    def step(factor):
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(variable * factor)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [variable]))
        optimizer.apply_gradients(zip(gradients, [variable]))

    step = tf.function(step) if is_function else step
    states = []
    for number in range(3):
        step(tf.constant(np.inf if (number, rank) == (1, 1) else 1.0 + 2 * rank))
        got = variable, optimizer.loss_scale, optimizer.iterations, optimizer.last_step_finite
        states.append([float(each.numpy()) for each in got])
    return states


@on_each_rank(2, gives=[[12.0, 18.0], [2.0, 0.0]])
def test_a_function_differentiates_sums_of_a_list_over_the_ranks():
    """One of the sums is of integers."""
    import npu_device as npu

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            first, _, second = npu.distribute.all_reduce([x * x, tf.constant(1), tf.gather(y, [0])], "sum")
            loss = tf.reduce_sum(first) * (1.0 + collective.current().rank) + tf.gather(second, 0)
        return tape.gradient(loss, [x, y])

    return [np.asarray(tf.convert_to_tensor(each)).tolist() for each in step(tf.constant([2.0, 3.0]), tf.ones([2]))]
