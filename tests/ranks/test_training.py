"""Several real ranks: they train one model, agree on every decision, and equal one process with the whole batch."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective, stages
from npu_bridge.estimator.npu.npu_hook import broadcast_global_variables
from npu_bridge.estimator.npu.npu_loss_scale_manager import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
)
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import (
    NPUDistributedOptimizer,
    NPUOptimizer,
    npu_distributed_optimizer_wrapper,
)
from npu_bridge.gradients import collections
from npu_bridge.gradients import optimizer as optimizer_module
from npu_bridge.reporting import LossScaleCollapseError, LossScaleCollapseHook
from tests.goldens.two_layers import OPTIMIZERS, assert_all_finite, assert_same_bits, in_graph, token_batches, train
from tests.once import lines_said
from tests.rank_pool import on_each_rank
from tests.ranks.ways import started_session
from tests.transfers import is_transfer

tf1 = tf.compat.v1
WRAPPERS = {
    "unscaled": lambda opt, scale, wire="none": NPUOptimizer(opt, is_distributed=True, wire=wire),
    "scaled": lambda opt, scale, wire="none": NPUOptimizer(opt, scale(), True, True, wire=wire),
    "tailed": lambda opt, scale, wire="none": NPUOptimizer(opt, scale(), True, True, True, wire=wire),
    "nested": lambda opt, scale, wire="none": NPULossScaleOptimizer(
        NPUDistributedOptimizer(opt, wire=wire), scale(), is_distributed=True
    ),
    "inside out": lambda opt, scale, wire="none": NPUDistributedOptimizer(
        NPULossScaleOptimizer(opt, scale()), wire=wire
    ),
    "around in place": lambda opt, scale, wire="none": npu_distributed_optimizer_wrapper(
        NPULossScaleOptimizer(opt, scale())
    ),
    "NPUDistributedOptimizer": lambda opt, scale, wire="none": NPUDistributedOptimizer(opt, wire=wire),
}
SCALE_INSIDE = ("inside out", "around in place")


def fixed():
    return FixedLossScaleManager(1024)


def dynamic():
    return ExponentialUpdateLossScaleManager(1024, 5, 1, 2, 0.5)


def train_own_share(name, wrapper, batches, wire="none"):
    communicator = collective.current()
    shares = [np.array_split(batch, communicator.size)[communicator.rank] for batch in batches]
    variables, _ = train(lambda: WRAPPERS[wrapper](OPTIMIZERS[name](), fixed, wire), batches=shares)
    return variables


@pytest.mark.few_fast(4, "other optimizers and wrappers")
@pytest.mark.parametrize(
    ("name", "wrapper"),
    [*(("momentum", wrapper) for wrapper in WRAPPERS), *((name, "tailed") for name in ("adam", "lamb", "keras_adam"))],
)
def test_two_ranks_equal_one_process_with_the_whole_batch(on_ranks, name, wrapper):
    batches = token_batches(20, batch_size=16)
    whole, _ = train(lambda: NPUOptimizer(OPTIMIZERS[name]()), batches=batches)
    first, second = on_ranks(2, train_own_share, name, wrapper, batches)
    assert_same_bits(first, second)
    for variable, value in whole.items():
        np.testing.assert_allclose(first[variable], value, rtol=2e-4, atol=2e-5, err_msg=variable)


def clip_by_value(grads_and_vars):
    """Clips each dense gradient so far away that only overflows change: they become usable numbers."""
    far = 1e3
    return [
        (grad if grad is None or isinstance(grad, tf.IndexedSlices) else tf.clip_by_value(grad, -far, far), variable)
        for grad, variable in grads_and_vars
    ]


# Gradients of all ranks that are finite. Scaled, their sum is not, or their squares; with a wire, the numbers on it.
LARGE = {"none": (3e35, 1e19), "float16": (300.0, 3e4), "bfloat16": (300.0, 3e4)}


def train_with_overflows(wrapper, seed, steps, wire="none"):
    """Trains with random overflows of this rank alone, and now and then huge gradients on all ranks."""
    communicator = collective.current()
    everywhere, here = np.random.RandomState(seed), np.random.RandomState(seed + 1 + communicator.rank)
    poisons = []
    for _ in range(steps):
        poison = here.choice([0.0, np.nan, np.inf, -np.inf], p=[0.85, 0.05, 0.05, 0.05])
        poisons.append(everywhere.choice([poison, *LARGE[wire]], p=[0.8, 0.1, 0.1]))
    # some ranks see other batches
    batches = token_batches(steps, seed=seed + communicator.rank)
    variables, trace = train(
        lambda: WRAPPERS[wrapper](OPTIMIZERS["adam"](), dynamic, wire),
        batches=batches,
        poisons=poisons,
        change=clip_by_value if wrapper in SCALE_INSIDE else None,
        fetch=[collections.STEP_SKIPPED, collections.LOSS_SCALE],
    )
    return variables, [(bool(skipped), float(scale)) for skipped, scale in trace], poisons


@pytest.mark.few_fast(["2-none", "2-float16"], "the same on three ranks and in another format")
@pytest.mark.parametrize(("rank_count", "wire"), [(2, "none"), (3, "none"), (2, "float16"), (3, "bfloat16")])
def test_ranks_agree_on_every_decision_and_tailing_changes_nothing(on_ranks, rank_count, wire):
    scaled, tailed = (
        on_ranks(rank_count, train_with_overflows, wrapper, 11, 50, wire) for wrapper in ("scaled", "tailed")
    )
    variables, trace, _ = scaled[0]
    for outcome in [*scaled, *tailed]:
        assert_same_bits(outcome[0], variables)
        assert outcome[1] == trace
    assert_all_finite(variables)
    overflowed = np.array([outcome[2] for outcome in scaled])
    expected_skips = np.any(~np.isfinite(overflowed) | (np.abs(overflowed) > 1e18), axis=0)
    skips = np.array([skipped for skipped, _ in trace])
    if wire == "float16":  # which some large gradients fit, once the scale is small
        assert all(skips[expected_skips]) and sum(skips) > sum(expected_skips)
    else:
        assert list(skips) == list(expected_skips)
    assert 5 < sum(skips) < 45


@pytest.mark.slow("the usual order has a fast case")
@pytest.mark.parametrize("wrapper", SCALE_INSIDE)
def test_ranks_agree_when_the_reduction_is_around_the_loss_scale(on_ranks, wrapper):
    """An Inf that one rank alone has had, and clipping hides, skips the step on the other one, too."""
    expected = on_ranks(2, train_with_overflows, "scaled", 11, 50)
    for outcome in on_ranks(2, train_with_overflows, wrapper, 11, 50):
        assert outcome[1] == expected[0][1]
        for name, value in expected[0][0].items():
            np.testing.assert_allclose(outcome[0][name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@on_each_rank(2)
@in_graph
def test_the_norm_of_a_sparse_gradient_is_that_of_the_dense_one():
    """Both ranks have some of the rows."""
    table = tf1.get_variable("table", [4, 2], initializer=tf1.zeros_initializer())
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 1, 2 + collective.current().rank]))
    optimizers = {wrapper: make(tf1.train.GradientDescentOptimizer(1.0), fixed) for wrapper, make in WRAPPERS.items()}
    optimizers["rounded"] = WRAPPERS["scaled"](tf1.train.GradientDescentOptimizer(1.0), fixed, "float16")
    grads = {name: optimizer.compute_gradients(loss)[0][0] for name, optimizer in optimizers.items()}
    assert all(isinstance(grad, tf.IndexedSlices) for grad in grads.values())
    with started_session() as session:
        norms = session.run({name: tf.linalg.global_norm([grad]) for name, grad in grads.items()})
    dense = np.array([[0, 0], [2, 2], [0.5, 0.5], [0.5, 0.5]])
    assert norms == pytest.approx(dict.fromkeys([*WRAPPERS, "rounded"], np.linalg.norm(dense)), rel=1e-6)


@pytest.mark.parametrize("wrapper", ["scaled", "tailed", "nested"])
@on_each_rank(2, gives=([2.0, 2.0, 3.5], 512.0))
@in_graph
def test_gradients_that_were_added_up_are_applied_without_a_batch(wrapper):
    """Accumulates the gradients of two batches, and applies them in a run without a batch."""
    rank = collective.current().rank
    slope = tf1.placeholder(tf.float32, [])
    weight = tf1.get_variable("weight", [], initializer=tf1.zeros_initializer())
    total = tf1.get_variable("total", [], initializer=tf1.zeros_initializer(), trainable=False)
    optimizer = WRAPPERS[wrapper](tf1.train.GradientDescentOptimizer(1.0), dynamic)
    ((gradient, _),) = optimizer.compute_gradients(-weight * slope, [weight])
    add_up = tf1.assign_add(total, gradient / 2)
    apply = optimizer.apply_gradients([(total.read_value(), weight)])
    values = []
    with started_session() as session:
        for window in ((1.0, 3.0), (1.0, np.inf if rank == 1 else 1.0), (2.0 * rank, 2.0)):
            for number in window:
                session.run(add_up, {slope: number})
            session.run(apply)
            session.run(total.initializer)
            values.append(float(session.run(weight)))
        return values, float(session.run("loss_scale:0"))


OF_16_BITS = ([60000.0, -60000.0, 1.0], [60000.0, 60000.0, 3.0]), 1, 2.0**-10, np.float32([-60000, 0, -2]) / 1024
# Once it is scaled, each number and the mean are finite, their sum is not.
OF_32_BITS = ([2e38 / 2.0**100],) * 2, 2.0**100, 1.0, -np.float32([2e38 / 2.0**100])


@pytest.mark.parametrize("is_tailing", [False, True])
@pytest.mark.parametrize(
    ("dtype_name", "case", "rtol"),
    [("float16", OF_16_BITS, 1e-2), ("bfloat16", OF_16_BITS, 1e-2), ("float32", OF_32_BITS, 0)],
    ids=["float16", "bfloat16", "float32"],
)
@on_each_rank(2)
@in_graph
def test_gradients_that_fit_do_not_overflow_in_the_sum(dtype_name, case, rtol, is_tailing):
    of_ranks, scale, rate, expected = case
    dtype, own = tf.as_dtype(dtype_name), of_ranks[collective.current().rank]
    variable = tf1.get_variable("variable", [len(own)], dtype, tf1.zeros_initializer())
    manager = FixedLossScaleManager(scale)
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(rate), manager, True, True, is_tailing)
    loss = tf.reduce_sum(variable * tf.constant(own, dtype))
    train_op = optimizer.minimize(loss, tf1.train.get_or_create_global_step())
    with started_session() as session:
        session.run(train_op)
        variable, global_step = session.run([tf.cast(variable, tf.float32), tf1.train.get_global_step()])
    np.testing.assert_allclose(variable, expected, rtol=rtol)
    assert global_step == 1


@pytest.mark.parametrize("is_tailing", [False, True])
@on_each_rank(2)
@in_graph
def test_all_ranks_end_when_every_step_is_skipped_and_the_guilty_one_says_why(is_tailing):
    """Numbers are zero on rank 1 alone, and their root has no gradient there."""
    variable = tf1.get_variable("variable", [2], initializer=tf1.ones_initializer())
    values = tf1.placeholder_with_default([1.0 - collective.current().rank] * 2, [2])
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.1), FixedLossScaleManager(8), True, True, is_tailing)
    train_op = optimizer.minimize(tf.reduce_sum(tf.sqrt(variable * values)))
    why = ("3 steps in a row.*no NaN or Inf on this rank", "its gradients are not.*SqrtGrad")[collective.current().rank]
    with pytest.raises(LossScaleCollapseError, match=why):
        with tf1.train.MonitoredSession(hooks=[LossScaleCollapseHook(3)]) as session:
            for _ in range(10):
                session.run(train_op)


@in_graph
def broadcast_everything():
    """Starts from this rank's own values, then takes those of rank 0."""
    rank = collective.current().rank
    with tf1.variable_scope("model"):
        for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64, tf.bool):
            tf1.get_variable(dtype.name, initializer=tf.cast(tf.fill([3], rank + 1), dtype), trainable=False)
    ExponentialUpdateLossScaleManager(2.0 ** (rank + 4), 5)
    tf1.assign(tf1.train.get_or_create_global_step(), rank)
    broadcast = broadcast_global_variables(0)
    with started_session() as session:
        session.run(broadcast)
        return session.run({variable.name: variable for variable in tf1.global_variables()})


def test_broadcast_covers_every_global_variable(on_ranks):
    first, second = on_ranks(2, broadcast_everything)
    assert_same_bits(second, first)
    assert second["loss_scale:0"] == 16
    assert len(second) == 7 + 3 + 1


@on_each_rank(2)
@in_graph
def test_no_transfer_is_optimised_away():
    """A transfer that one rank runs and another does not leaves the first waiting for ever."""
    communicator = collective.current()
    variable = tf1.get_variable("variable", [3])
    predictable = [tf.zeros_like(variable), tf.ones_like(variable), tf.shape(variable), variable * tf.zeros([3])]
    sums = [communicator.reduce(tensor, "sum", f"sum_{number}") for number, tensor in enumerate(predictable)]
    sums += communicator.all_reduce([tf.zeros([3]), tf.ones([2])], "grouped", average=False)
    options, metadata = tf1.RunOptions(output_partition_graphs=True), tf1.RunMetadata()
    with started_session() as session:
        values = session.run(sums, options=options, run_metadata=metadata)
    nodes = [node for graph in metadata.partition_graphs for node in graph.node]
    assert len([node for node in nodes if is_transfer(node.op)]) == 5
    assert [value.tolist() for value in values] == [[0, 0, 0], [2, 2, 2], [6], [0, 0, 0], [0, 0, 0], [2, 2]]


@in_graph
def warnings_of_foreign_gradients(added=()):
    """On a rank: warnings for gradients of two variables, of which `compute_gradients` has covered the first.

    The last gradients are the script's own, of a variable that is covered.
    """
    first, second = (tf1.get_variable(name, initializer=[1.0], use_resource=True) for name in ("first", "second"))
    inner = tf1.train.GradientDescentOptimizer(0.1)
    optimizer = NPUOptimizer(inner, is_distributed=True, stages=added) if added else NPUDistributedOptimizer(inner)
    pairs = optimizer.compute_gradients(tf.reduce_sum(first), var_list=[first])
    of_both = []
    own = tf.gradients(tf.reduce_sum(first**2), first)
    for given in (pairs, [*pairs, (tf.ones([1]), second)], [(own[0], first)]):
        with lines_said(optimizer_module.__name__) as lines:
            optimizer.apply_gradients(given)
        of_both.append(lines)
    return of_both


def test_gradients_that_were_not_averaged_are_named_unless_ranks_synchronise_variables(on_ranks):
    for averaged, (line,), (of_own,) in on_ranks(2, warnings_of_foreign_gradients):
        assert averaged == []
        assert "the gradients of second:0 were not averaged over the ranks" in line
        assert "the gradients of first:0 were not averaged over the ranks" in of_own
    assert on_ranks(2, warnings_of_foreign_gradients, [stages.PartialSync()]) == [[[], [], []]] * 2
