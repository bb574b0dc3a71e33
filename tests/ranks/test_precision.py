"""Ranks leave the low precision at the same step, whatever each of them sees."""

from __future__ import annotations

import pytest

from npu_bridge import collective
from npu_bridge.base import environment
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from tests.goldens.two_layers import assert_same_bits
from tests.session.precision.small_models import (
    Dense,
    dtypes_of,
    precision_of,
    run_with_graph,
    session_of,
    tell_steps,
    tf1,
    values_of,
)

pytestmark = pytest.mark.ranks(2)


def train(plan, progress_by_rank):
    """On a rank: the dtypes of every step's matrix products, and the variables at the end."""
    rank = collective.current().rank
    model = Dense(lambda: NPUOptimizer(tf1.train.MomentumOptimizer(0.01, 0.9), is_distributed=True))
    seen = []
    with session_of(model.graph, precision_of(experimental_accelerate_train_mode=plan)) as session:
        session.run(model.init)
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
    (seen, variables), (other_seen, other_variables) = on_ranks(2, train, plan, (first, second))
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
