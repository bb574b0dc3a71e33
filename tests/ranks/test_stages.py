"""Values that each rank keeps are saved, restored and never lost; and sums that are sent as a whole."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective, stages
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.hccl import hccl_ops
from tests.goldens import checks
from tests.goldens.cases import GOLDENS, TABLES
from tests.goldens.problems import Fed
from tests.goldens.two_layers import assert_same_bits, in_graph
from tests.goldens.ways import InGraph
from tests.rank_pool import on_each_rank
from tests.ranks.ways import started_session

tf1 = tf.compat.v1


KEEPING = "accumulate + clip by norm + top k"


def fed_to(rank, steps):
    return GOLDENS[KEEPING].problem.fed_to(rank, steps)


@pytest.mark.few_fast(1, "the other kind of file")
@pytest.mark.parametrize("is_broadcast", [False, True])
@on_each_rank(2)
def test_what_each_rank_keeps_gets_to_it_from_a_restore_on_rank_0_alone(is_broadcast, tmp_path):
    """Trains on after the restore, as a training does that was not interrupted."""
    ranks = collective.current()
    fed = fed_to(ranks.rank, 16)
    before, after = (InGraph(GOLDENS[KEEPING]) for _ in range(2))
    before.train(fed[:10])
    before.sync()
    if ranks.rank == 0:
        after.restore(before.save(f"{tmp_path}/{is_broadcast}"))
    if is_broadcast:
        after.broadcast()
    for training in (before, after):
        training.train(fed[10:])
    assert_same_bits(after.everything(), before.everything())


CONSERVING = ("top k", "threshold")


def conserved(steps):
    """Returns, on a rank, the sums applied, still to send, and of this rank's gradients, by chain."""
    rank, found, last = collective.current().rank, {}, steps - 1
    bad = {
        (step, step % 2, "kernel"): value for step, value in ((3, np.inf), (30, np.nan), (31, -np.inf), (last, 1e25))
    }
    fed = Fed(steps, 7, bad).fed_to(rank)
    used = [grads for step, grads in enumerate(fed) if not any(step == number for number, *_ in bad)]
    for chain in CONSERVING:
        training = InGraph(GOLDENS[KEEPING]._replace(stages=(TABLES[chain],)))
        training.train(fed)
        values, kept = training.values(), checks.kept_in(training.everything(), "not_sent")
        start = Fed().start_values()
        assert training.updates() == len(used) == steps - 4
        found[chain] = {
            name: (
                (start[name].astype(float) - values[name]) / GOLDENS[KEEPING].rate,
                kept[name].astype(float),
                sum(grads[name].astype(float) for grads in used),
            )
            for name in ("kernel", "vector")
        }
    return found


@pytest.mark.few_fast(1, "more of the same steps")
@pytest.mark.parametrize("steps", [40, 200])
def test_nothing_that_was_not_sent_is_lost(on_ranks, steps):
    """The applied and the kept values are together the mean of all gradients, also after skipped steps."""
    results = on_ranks(2, conserved, steps)
    for chain in CONSERVING:
        for name in ("kernel", "vector"):
            applied, kept, had = np.mean([result[chain][name] for result in results], axis=0)
            assert np.linalg.norm(kept) > 1e-3
            assert np.linalg.norm(applied + kept - had) <= 1e-5 * np.linalg.norm(had), f"{chain}, {name}"


DENSE = {
    "alone": lambda: [],
    "window": lambda: [stages.Accumulate(1)],
    "reduced_window": lambda: [stages.Accumulate(1, exchange="batch")],
    "frozen": lambda: [stages.Freeze({"groups": [["kernel"], ["table"]], "kind": "explicit", "sequence": [0]})],
}


@pytest.mark.slow("one to four ranks, one after the other")
@on_each_rank(3)
def test_gradients_that_are_sent_as_a_whole_are_the_mean_on_any_number_of_ranks():
    """Sums of three are multiplied by a quarter, and some code must do the rest of the mean."""
    rank, found = collective.current().rank, {}
    kernel, table = tf.Variable(tf.zeros([4]), name="kernel"), tf.Variable(tf.zeros([4, 1]), name="table")
    for case, others in DENSE.items():
        for manager in (None, FixedLossScaleManager(8.0)):
            added = [stages.TopK(0.9, error_feedback=False), *others()]
            name = case if manager is None else f"{case}_scaled"
            pipeline = stages.pipeline(name, manager, is_distributed=True, stages=added)

            @tf.function
            def combined(pipeline=pipeline):
                step = pipeline.begin()
                scale = pipeline.scale(tf.constant(1.0), step)
                rows = tf.IndexedSlices(tf.fill([1, 1], 3.0 * scale), tf.constant([rank]), tf.constant([4, 1]))
                pairs = pipeline.combine(step, [(tf.range(4.0) * (rank + 1.0) * scale, kernel), (rows, table)])
                pipeline.apply(step, pairs, lambda pairs: pairs[0][1].assign_add(tf.zeros_like(pairs[0][1])))
                return [tf.convert_to_tensor(grad) for grad, _ in pairs]

            found[name] = [grad.numpy().tolist() for grad in combined()]
    assert len(found) == 2 * len(DENSE)
    for name, (kernel, table) in found.items():
        np.testing.assert_allclose(kernel, np.arange(4.0) * 2.0, rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(table, [[1.0], [1.0], [1.0], [0.0]], rtol=1e-6, err_msg=name)


class LargestOfRanks(stages.ReducingStage):
    """Takes the largest value of all ranks; overrides one hook, as docs/stages.md shows."""

    def all_reduce(self, step):
        step.map(lambda grad: hccl_ops.allreduce(grad, "max"))


@pytest.mark.parametrize("is_scaled", [True, False])
@on_each_rank(2)
@in_graph
def test_a_reduction_of_your_own_is_checked_on_all_ranks(is_scaled):
    """In the second of three steps, rank 1 has an infinite gradient."""
    kernel = tf1.get_variable("kernel", initializer=[0.0, 0.0])
    slopes = tf1.placeholder(tf.float32, [2])
    manager = FixedLossScaleManager(8.0) if is_scaled else None
    sgd = tf1.train.GradientDescentOptimizer(1.0)
    optimizer = NPUOptimizer(sgd, manager, True, is_scaled, stages=[LargestOfRanks()])
    train_op = optimizer.minimize(tf.reduce_sum(kernel * slopes))
    rank, seen = collective.current().rank, []
    with started_session() as session:
        for slope in ([1.0, 4.0 + rank], [1.0, np.inf if rank else 0.0], [2.0 - rank, 1.0]):
            session.run(train_op, {slopes: slope})
            seen.append(session.run(kernel).tolist())
    assert seen == [[-1.0, -5.0], [-1.0, -5.0], [-3.0, -6.0]]


@on_each_rank(2)
def test_a_sum_with_what_was_not_sent_is_checked():
    """With the unsent values, the second gradient is too large."""
    kernel = tf.Variable(tf.zeros([4]))
    pipeline = stages.pipeline("squares", is_distributed=True, stages=[stages.TopK(0.25)])
    for gradient in ([1.2e19, 1.1e19, 0.0, 0.0], [0.0, 1.5e19, 0.0, 0.0]):
        step = pipeline.begin()
        pairs = pipeline.combine(step, [(tf.constant(gradient), kernel)])
        pipeline.apply(step, pairs, lambda pairs: kernel.assign_add(tf.square(pairs[0][0])))
    values = kernel.numpy()
    assert np.isfinite(values).all() and values[0] > 0.0


@on_each_rank(2)
def test_every_reduction_keeps_unscaled_gradients_in_float32():
    """Updates a float16 variable with a gradient of 1e-8."""
    for added in ([], [stages.TopK(0.25)], [stages.Threshold(1e-9)], [stages.Adasum()], [stages.Accumulate(1)]):
        variable, sgd = tf.Variable(tf.ones([4], tf.float16)), tf1.train.GradientDescentOptimizer(1e7)
        optimizer = NPUOptimizer(sgd, FixedLossScaleManager(2.0**16), True, True, stages=added)
        optimizer.minimize(lambda kept=variable: tf.cast(kept[0], tf.float32) * 1e-8, var_list=[variable])
        np.testing.assert_allclose(variable.numpy(), [0.9, 1.0, 1.0, 1.0], atol=1e-3, err_msg=repr(added))


class ChangeOwnGradients(stages.Stage):
    """Multiplies the gradients of rank r by `factor` + r, in one hook, at the place of user-defined stages."""

    def __init__(self, hook, factor=3.0):
        self._hook, self._factor = hook, factor

    def get_config(self):
        return {"hook": self._hook, "factor": self._factor}

    def each_batch(self, step):
        self._change("each_batch", step)

    def before_reduce(self, step):
        self._change("before_reduce", step)

    def _change(self, hook, step):
        if hook == self._hook:
            step.map(lambda grad: grad * (self._factor + collective.current().rank))


def value_after_two_steps(*chain):
    """Returns, on a rank, a variable that begins at 0 after two steps of size 1 with gradients of 1."""
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", [], initializer=tf.compat.v1.zeros_initializer())
        inner = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        manager = FixedLossScaleManager(4.0)
        optimizer = NPUOptimizer(inner, manager, is_distributed=True, is_loss_scale=True, stages=list(chain))
        step = optimizer.minimize(variable * 1.0)
        with started_session() as session:
            for _ in range(2):
                session.run(step)
            return float(session.run(variable))


def values_with_own_stage(hook):
    return [
        value_after_two_steps(ChangeOwnGradients(hook)),
        value_after_two_steps(ChangeOwnGradients(hook), stages.Accumulate(2)),
        value_after_two_steps(ChangeOwnGradients(hook), stages.ClipLocally(0.5)),
        value_after_two_steps(ChangeOwnGradients(hook, np.nan)),
    ]


@pytest.mark.parametrize("hook", ["each_batch", "before_reduce"])
def test_changes_of_own_gradients_by_a_users_stage_are_summed_clipped_checked_and_sent(on_ranks, hook):
    assert values_with_own_stage(hook) == [-6.0, -3.0, -1.0, 0.0]
    for values in on_ranks(2, values_with_own_stage, hook):
        assert values == [-7.0, -3.5, -1.0, 0.0]
