"""Loops on ranks: five steps in a run give the bits of five runs, overflows and ends of data included."""

from __future__ import annotations

import os

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base import environment
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from tests.goldens.scaled_estimator import batches_of_rows, model_fn
from tests.goldens.two_layers import assert_same_bits
from tests.ranks.ways import AtEnd
from tests.session.precision.small_models import (
    Dense,
    dtypes_of,
    precision_of,
    run_with_graph,
    started,
    tell_steps,
    values_of,
)

tf1 = tf.compat.v1
BATCHES_PER_RANK = 23
OVERFLOWING = 7  # a batch in the middle of the second loop of five, on rank 1 alone


class Runs(AtEnd):
    """The global step after every run, and all variables at the end."""

    def __init__(self):
        self.steps = []

    def after_run(self, run_context, run_values):
        self.steps.append(int(run_context.session.run(tf1.train.get_global_step(run_context.session.graph))))


def input_fn():
    rank = collective.current().rank
    return batches_of_rows(BATCHES_PER_RANK, OVERFLOWING if rank == 1 else None, seed=5 + rank)


def train(folder, loop):
    model_dir = os.path.join(folder, str(collective.current().rank))
    config = NPURunConfig(model_dir=model_dir, save_checkpoints_steps=100, iterations_per_loop=loop)
    runs = Runs()
    NPUEstimator(model_fn, config=config, params={"noise": True, "is_distributed": True}).train(input_fn, hooks=[runs])
    return runs.steps, runs.values


def test_loops_skip_one_step_and_end_with_the_data_like_single_steps(on_ranks, tmp_path):
    single, looped = (on_ranks(2, train, str(tmp_path / str(loop)), loop) for loop in (1, 5))
    for rank in range(2):
        assert looped[rank][0] == [5, 9, 14, 19], "the overflow skips one step of its loop"
        assert looped[rank][1]["global_step:0"] == BATCHES_PER_RANK - 1
        assert_same_bits(looped[rank][1], single[rank][1])
    for name in ("kernel:0", "global_step:0"):
        assert looped[0][1][name].tobytes() == looped[1][1][name].tobytes()


# Ranks leave the low precision at the same step, whatever each of them sees.


def train_lowered(plan, progress_by_rank):
    """On a rank: the dtypes of every step's matrix products, and the variables at the end."""
    rank = collective.current().rank
    model = Dense(lambda: NPUOptimizer(tf1.train.MomentumOptimizer(0.01, 0.9), is_distributed=True))
    seen = []
    with started(model, precision_of(experimental_accelerate_train_mode=plan)) as session:
        for number, (goal, now) in enumerate(progress_by_rank[rank]):
            if "|step" in plan:
                tell_steps(now, goal)
            else:
                environment.write_variable("TARGET_LOSS", goal)
                environment.write_variable("LOSS_NOW", now)
            nodes = run_with_graph(session, model.train_op, model.batch(2 * number + rank))[1]
            seen.append("/".join(dtypes_of(nodes)))
        return seen, values_of(session, model.variables)


def both(on_ranks, plan, first, second):
    (seen, variables), (other_seen, other_variables) = on_ranks(2, train_lowered, plan, (first, second))
    assert seen == other_seen
    assert_same_bits(variables, other_variables)
    return seen


def test_a_rank_that_lags_is_waited_for(on_ranks):
    ahead, behind = [(10, step + 2) for step in range(8)], [(10, step) for step in range(8)]
    assert both(on_ranks, "fast|step|0.5", ahead, behind) == ["float16"] * 5 + ["float32"] * 3


def test_by_loss_when_every_rank_is_there(on_ranks):
    first = [(1.0, loss) for loss in (9.0, 1.2, 1.3, 1.1, 1.1, 1.0)]
    second = [(1.0, loss) for loss in (9.0, 8.0, 1.8, 1.7, 1.4, 1.9)]
    assert both(on_ranks, "fast|loss|1.5", first, second) == ["float16"] * 4 + ["float32"] * 2
