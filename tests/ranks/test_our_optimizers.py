"""Our optimizers on ranks: fused is unfused, with the tail optimisation, with shared updates and in checkpoints."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_hook import broadcast_global_variables
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.estimator.npu.npu_saver import NPUSaver
from npu_bridge.optimizers import fused as fused_module
from npu_bridge.optimizers import tf1 as ours
from tests.goldens.two_layers import token_batches

v1 = tf.compat.v1
pytestmark = pytest.mark.ranks(2)
STEPS = 8
RULES = {
    # A group that only one variable is in, which one rank alone updates when the work is shared.
    "LAMB": lambda fused: ours.LAMB(
        0.01, weight_decay=0.1, exclude_from_weight_decay=["bias"], groups=[{"match": "scale$", "lr": 0.1}], fused=fused
    ),
    "Adam": lambda fused: ours.Adam(0.01, fused=fused),
}


def _manager():
    return ExponentialUpdateLossScaleManager(1024, 5, 1, 2, 0.5)


WAYS = {
    "tailed": lambda optimizer: NPUOptimizer(optimizer, _manager(), True, True, True),
    "shared": lambda optimizer: NPULossScaleOptimizer(
        NPUDistributedOptimizer(optimizer, is_weight_update_sharding=True), _manager(), is_distributed=True
    ),
}


def _train(rule, way, is_fused, first, end, checkpoint, folder):
    """Values of variables after steps from `first` on, and rank 0's checkpoint."""
    ranks = collective.current()
    with tf.Graph().as_default():
        v1.set_random_seed(1)
        normal = v1.random_normal_initializer(seed=1 + ranks.rank)  # the start comes from rank 0
        table = v1.get_variable("table", [20, 4], initializer=normal)
        layers = [
            (v1.get_variable(f"kernel_{i}", [4, 4], initializer=normal), v1.get_variable(f"bias_{i}", [4]))
            for i in range(2)
        ]
        scale = v1.get_variable("scale", [], initializer=v1.ones_initializer())
        tokens, poison = v1.placeholder(tf.int32, [None]), v1.placeholder(tf.float32, [])
        values = tf.nn.embedding_lookup(table, tokens)
        for kernel, bias in layers:
            values = tf.tanh(values @ kernel + bias)
        loss = tf.reduce_mean(tf.square(values * scale - 1.0)) + poison * tf.reduce_sum(layers[0][0])
        optimizer = WAYS[way](RULES[rule](is_fused))
        step = optimizer.minimize(loss, v1.train.get_or_create_global_step())
        saver, broadcast = NPUSaver(), broadcast_global_variables(0)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            if checkpoint is not None and ranks.rank == 0:
                saver.restore(session, checkpoint)
            session.run(broadcast)
            for number, batch in list(enumerate(token_batches(end, 12)))[first:]:
                own = np.array_split(batch, ranks.size)[ranks.rank]
                overflows = number in (2, 5) and ranks.rank == number % 2
                session.run(step, {tokens: own, poison: np.inf if overflows else 0.0})
            path = saver.save(session, os.path.join(folder, f"{rule}_{way}_{is_fused}_{first}_{ranks.rank}"))
            variables = session.run({variable.name: variable for variable in v1.trainable_variables()})
            return variables, path


def train_every_way(folder):
    """On a rank: trained fused and unfused, and changed over in the middle."""
    small, large = fused_module.JOINED_ELEMENTS, fused_module.FLAT_ELEMENTS
    fused_module.JOINED_ELEMENTS, fused_module.FLAT_ELEMENTS = 50, 24  # the table is large
    try:
        results = {
            (rule, way): {fused: _train(rule, way, fused, 0, STEPS, None, folder) for fused in (False, True)}
            for rule in RULES
            for way in WAYS
        }
        # Trained fused and shared, then unfused; trained unfused and shared, then fused and tailed.
        for first, way, second in ((True, "shared", False), (False, "tailed", True)):
            middle = _train("LAMB", "shared", first, 0, 4, None, folder)[1]
            results["LAMB", way]["changed"] = _train("LAMB", way, second, 4, STEPS, middle, folder)
        return results
    finally:
        fused_module.JOINED_ELEMENTS, fused_module.FLAT_ELEMENTS = small, large


@pytest.mark.slow("every rule trains twice; tests/optimizers has them on one rank")
def test_fused_is_unfused_on_ranks(on_ranks, tmp_path):
    results = on_ranks(2, train_every_way, str(tmp_path), time_limit_secs=280)
    for (rule, way), trained in results[0].items():
        for fused, (variables, _) in trained.items():
            for variable, value in variables.items():
                where = f"{rule} {way} {fused} {variable}"
                assert np.array_equal(value, results[1][rule, way][fused][0][variable]), where
                np.testing.assert_allclose(value, trained[False][0][variable], rtol=0, atol=2e-6, err_msg=where)
