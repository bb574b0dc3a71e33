"""`npu_device` on two real ranks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from npu_bridge import collective


def exchanges(_):
    import npu_device as npu

    rank = collective.current().rank
    handle = npu.npu_device.NpuDeviceHandle(0, npu.global_options().training_options())
    facts = {"worker": (handle.workers_num, handle.worker_id, handle.is_cluster_worker())}
    reduce = npu.distribute.all_reduce
    facts["mean"] = float(reduce(np.float32(rank + 1)))
    facts["integers"] = float(reduce(tf.constant(rank)))
    total, nothing = reduce([tf.ones(2) * rank, None], "sum")
    facts["list"] = total.numpy().tolist(), nothing
    facts["in a function"] = tf.function(lambda value: reduce(value, "max"))(tf.constant(float(rank))).numpy()
    variables = [tf.Variable([rank + 1.0]), tf.Variable(rank)]
    npu.distribute.broadcast(variables, root_rank=1)
    facts["broadcast"] = [each.numpy().tolist() for each in variables]
    dataset, batch = npu.distribute.shard_and_rebatch_dataset(tf.data.Dataset.range(6), 4)
    facts["data"] = (list(dataset.as_numpy_iterator()), batch)
    try:
        npu.distribute.shard_and_rebatch_dataset(dataset, 3)
    except ValueError as error:
        facts["odd"] = "cannot share a batch" in str(error)
    for generation in ("current", "legacy"):
        facts[generation] = [scaled_training(generation, kind) for kind in (True, False)]
    pairs = npu.distribute.grouping_gradients_apply(list, [(tf.constant(float(rank)), "variable"), (None, "other")])
    facts["grouped"] = [(None if grad is None else grad.numpy(), name) for grad, name in pairs]
    return facts


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


def test_what_ranks_exchange(on_ranks):
    for rank, facts in enumerate(on_ranks(2, exchanges, None)):
        trained = [[9.0, 8.0, 1.0, 1.0], [9.0, 4.0, 2.0, 0.0], [8.0, 4.0, 3.0, 1.0]]
        assert facts == {
            "worker": (2, rank, True),
            "mean": 1.5,
            "integers": 0.5,
            "list": ([1.0, 1.0], None),
            "in a function": 1.0,
            "broadcast": [[2.0], 1],
            "data": ([rank, rank + 2, rank + 4], 2),
            "odd": True,
            "current": [trained, trained],
            "legacy": [trained, trained],
            "grouped": [(0.5, "variable"), (None, "other")],
        }


def gradients_through_a_sum():
    """On a rank: the gradients of a loss of sums over the ranks, in a function; one of the sums is of integers."""
    import npu_device as npu

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            first, _, second = npu.distribute.all_reduce([x * x, tf.constant(1), tf.gather(y, [0])], "sum")
            loss = tf.reduce_sum(first) * (1.0 + collective.current().rank) + tf.gather(second, 0)
        return tape.gradient(loss, [x, y])

    return [np.asarray(tf.convert_to_tensor(each)).tolist() for each in step(tf.constant([2.0, 3.0]), tf.ones([2]))]


def test_a_function_differentiates_sums_of_a_list_over_the_ranks(on_ranks):
    assert on_ranks(2, gradients_through_a_sum) == [[[12.0, 18.0], [2.0, 0.0]]] * 2
