"""The decision about a step uses the sent values: every kind of gradient in every dtype, against a numpy model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.gradients.arithmetic import map_values
from tests.goldens.two_layers import in_graph
from tests.ranks.ways import open_session

tf1 = tf.compat.v1
ROWS, COLUMNS = 4, 2
DTYPES = ("float16", "bfloat16", "float32", "float64")
WIRES = ("none", "float16", "bfloat16")
# The rows that each read of the table takes, on rank 0 and on all others; None reads all of it.
READS = {
    "dense": ([None], [None]),
    "sparse": ([[1, 2]], [[2, 3]]),
    "sparse, repeated": ([[1, 1]], [[2, 3]]),
    "several sparse reads": ([[1], [2, 1]], [[3], [0, 3]]),
    "sparse and dense reads": ([None, [1]], [None, [2]]),
}
# The gradient of every row that is read, in true units, by rank. Multiples of 0.75 have exact means over 2 and 3 ranks.
SLOPES = [
    (0.75, 0.75, 1.5),
    (1.5, 0.75, 0.0),  # where a row comes twice on rank 0, the scaled sum is too large for the dtype of the scale
    (0.75, np.nan, 0.75),
    (np.inf, 0.75, 0.75),
    (1.5, 1.5, 1.5),  # what every rank sends fits, and a sum over the ranks does not
    (0.0, 1.5, -1.5),
]


def scale_of(dtype, wire):
    """A scale with which 1.5 fits the narrowest dtype on the way, and 3 does not."""
    return 2.0**15 if "float16" in (dtype, wire) else 2.0**127


def optimizer_of(way, dtype, wire, name):
    inner = tf1.train.GradientDescentOptimizer(1.0)
    manager = FixedLossScaleManager(scale_of(dtype, wire))
    if way == "sharded":
        return NPULossScaleOptimizer(NPUDistributedOptimizer(inner, True, name=name, wire=wire), manager, True)
    return NPUOptimizer(inner, manager, True, True, way != "as built", name=name, wire=wire)


def clipped(grads_and_vars):
    """Clips gradients so that only an overflow changes, into a usable number."""
    return [(map_values(grad, lambda values: tf.clip_by_value(values, -9, 9)), var) for grad, var in grads_and_vars]


def train_all(cases, is_tailing):
    """On a rank: the tables of all cases after every step."""
    parts = [cases[start : start + 20] for start in range(0, len(cases), 20)]  # a large graph starts slowly
    return [tables for part in parts for tables in train_some(part, is_tailing)]


@in_graph
def train_some(cases, is_tailing):
    """Returns the gradients of cases that share a graph."""
    ranks = collective.current()
    slope = tf1.placeholder(tf.float64, [])
    train_ops, tables = [], []
    for number, (kind, dtype, wire, way) in enumerate(cases):
        # Sharing an update needs a variable for each rank; the table is the largest.
        shapes = [[ROWS, COLUMNS]] + [[1]] * (ranks.size - 1 if way == "sharded" else 0)
        with tf1.variable_scope(f"case_{number}"):
            variables = [
                tf1.get_variable(f"v{position}", shape, dtype, tf1.ones_initializer(), use_resource=True)
                for position, shape in enumerate(shapes)
            ]
        terms = [tf.reduce_sum(other) for other in variables[1:]]
        for rows in READS[kind][min(ranks.rank, 1)]:
            terms.append(tf.reduce_sum(variables[0] if rows is None else tf.gather(variables[0], rows)))
        loss = tf.add_n(terms) * tf.cast(slope, dtype)
        optimizer = optimizer_of(way, dtype, wire, f"case_{number}")
        grads_and_vars = optimizer.compute_gradients(loss, variables)
        train_ops.append(optimizer.apply_gradients(clipped(grads_and_vars) if way == "clipped" else grads_and_vars))
        tables.append(variables[0])
    history = []
    with open_session(is_tailing) as session:
        session.run(tf1.global_variables_initializer())
        for slopes in SLOPES:
            session.run(train_ops, {slope: slopes[ranks.rank]})
            history.append(session.run(tables))
    return list(zip(*history))


def model_of(kind, dtype, wire, way, rank_count):
    """Returns the table after every step, computed in numpy."""
    as_dtype = tf.as_dtype(dtype).as_numpy_dtype
    is_wide = np.dtype(as_dtype).itemsize > 2
    as_wire = tf.as_dtype(wire).as_numpy_dtype if wire != "none" and is_wide else as_dtype
    scale = scale_of(dtype, wire)
    reads = [READS[kind][min(rank, 1)] for rank in range(rank_count)]
    table, history = np.ones([ROWS, COLUMNS], as_dtype), []
    for slopes in SLOPES:
        sent = [gradient_of(of_rank, as_dtype(scale * slope)).astype(as_wire) for of_rank, slope in zip(reads, slopes)]
        is_usable = all(np.all(np.isfinite(np.float64(gradient))) for gradient in sent)
        if way == "sharded" and wire == "none":
            # The scale is outside of the reduction, which adds up dense ones; there is one in every case.
            carrier = as_dtype if is_wide else np.float32
            others = sum(carrier(as_dtype(scale * slope)) for slope in slopes[:rank_count])
            is_usable &= bool(np.all(np.isfinite([others, *sum(gradient.astype(carrier) for gradient in sent).flat])))
        if is_usable:
            table = table - (sum(map(np.float64, sent)) / rank_count / scale).astype(as_dtype)
        history.append(table)
    return history


def gradient_of(reads, slope):
    """One rank's, dense: every read adds the slope to the rows it takes."""
    gradient = np.zeros([ROWS, COLUMNS], slope.dtype)
    for rows in reads:
        for row in range(ROWS) if rows is None else rows:
            gradient[row] += slope
    return gradient


# The cases of one launch, with tail optimisation and without. On three ranks sharded ones are left out, because the
# weight of a third, which their unscaled means have, is no exact number.
CASES = {
    (2, True): [
        *itertools.product(READS, DTYPES, WIRES, ["tailing", "sharded"]),
        *itertools.product(READS, DTYPES, ["none"], ["clipped"]),
    ],
    (2, False): [
        *itertools.product(READS, DTYPES, WIRES, ["as built"]),
        *itertools.product(READS, DTYPES, ["none"], ["sharded"]),
    ],
    (3, True): list(itertools.product(list(READS)[2:4], DTYPES[1:3], WIRES[::2], ["tailing", "clipped"])),
    (3, False): list(itertools.product(list(READS)[2:4], DTYPES[1:3], WIRES[::2], ["as built"])),
}


@pytest.mark.few_fast(1, "on two ranks there are 200 cases, and three share two cores")
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize(
    ("rank_count", "is_tailing", "cases"), [(2, True, CASES[3, True]), *((*key, CASES[key]) for key in CASES)]
)
def test_every_gradient_that_is_sent_was_judged(on_ranks, rank_count, is_tailing, cases):
    for rank, outcomes in enumerate(on_ranks(rank_count, train_all, cases, is_tailing, time_limit_secs=600)):
        for case, tables in zip(cases, outcomes):
            for number, (table, expected) in enumerate(zip(tables, model_of(*case, rank_count))):
                assert np.all(np.isfinite(np.float64(table))), (rank, case, number)
                assert table.tobytes() == expected.tobytes(), (rank, case, number, table, expected)
