"""Real ranks that build different things are refused before they reduce anything; ranks that can differ are not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base import environment
from npu_bridge.collective import groups
from npu_bridge.collective.checks.agreement import RanksDisagreeError
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager, FixedLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer, npu_allreduce
from npu_bridge.gradients import AllReduce, LossScaling, OverflowCheck, Pipeline
from tests.goldens.two_layers import in_graph
from tests.rank_pool import on_each_rank
from tests.ranks.ways import started_session, tells_disagreement

tf1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class Build:
    names: tuple = ("kernel", "bias")
    bias_shape: tuple = (4,)
    dtype: str = "float32"
    is_sparse: bool = False
    uses_bias: bool = True
    scale: float = 1024.0
    is_dynamic: bool = False
    is_tailing: bool = False
    wire: str = "none"
    in_flight: str = "3"
    last_indices: tuple = ()


# The difference of rank 1, and its words in the sentence.
DIFFERENCES = {
    "missing variable": (Build(names=("kernel",)), "the variable bias:0 of shape (4,)", "no such variable"),
    "one more variable": (Build(names=("kernel", "bias", "new")), "the same variables", "also new:0 of shape (4,)"),
    "other name": (Build(names=("kernel", "beta")), "the variable bias:0", "no such variable"),
    "other order": (Build(names=("bias", "kernel")), "kernel:0 at position 0", "bias:0"),
    "shape": (Build(bias_shape=(5,)), "the shape (4,) of bias:0", "(5,)"),
    "dtype": (Build(dtype="float64"), "the dtype float32 of kernel:0", "float64"),
    "sparse": (Build(is_sparse=True), "a dense gradient of kernel:0", "a sparse gradient"),
    "unused": (Build(uses_bias=False), "a dense gradient of bias:0", "no gradient"),
    "manager": (
        Build(is_dynamic=True),
        "loss_scale_manager=FixedLossScaleManager",
        "loss_scale_manager=ExponentialUpdateLossScaleManager",
    ),
    "scale": (Build(scale=512.0), "loss_scale=1024.0", "loss_scale=512.0"),
    "tailing": (Build(is_tailing=True), "is_tailing_optimization=False", "is_tailing_optimization=True"),
    "wire": (Build(wire="float16"), "wire=none", "wire=float16"),
    "window": (Build(in_flight="2"), "NPU_TRANSFERS_IN_FLIGHT=3", "NPU_TRANSFERS_IN_FLIGHT=2"),
    "split strategy": (Build(last_indices=(0, 1)), "bias:0 in fragment 0 of 1", "fragment 1 of 2"),
}


def build(how):
    """Makes a small model in a graph of its own and takes its gradients; gives the sentence of the error, or None."""
    strategies = groups.groups_of_process().strategies
    if how.last_indices:
        strategies.set_last_indices(groups.WORLD, how.last_indices)
    try:
        in_flight = environment.set_variables_temporarily(lambda: {"NPU_TRANSFERS_IN_FLIGHT": how.in_flight})
        with in_flight, tf.Graph().as_default():
            shapes = {"kernel": [3, 4], "bias": how.bias_shape}
            variables = [tf1.get_variable(name, shapes.get(name, [4]), how.dtype) for name in how.names]
            loss = tf.add_n([_term(variable, how) for variable in variables])
            _optimizer(how).compute_gradients(loss, var_list=variables)
        return None
    except RanksDisagreeError as error:
        return str(error)
    finally:
        strategies.reset(groups.WORLD)


def _term(variable, how):
    if variable.op.name == "bias" and not how.uses_bias:
        return tf.constant(0.0, how.dtype)
    is_sparse = how.is_sparse and variable.op.name == "kernel"
    return tf.reduce_sum(tf.nn.embedding_lookup(variable, [0, 1]) if is_sparse else tf.square(variable))


def _optimizer(how):
    inner = tf1.train.GradientDescentOptimizer(0.1)
    manager = ExponentialUpdateLossScaleManager(how.scale, 5) if how.is_dynamic else FixedLossScaleManager(how.scale)
    return NPUOptimizer(inner, manager, True, True, how.is_tailing, wire=how.wire)


def build_in_turns(rank_1_builds):
    """Builds on a rank once for each case, like the other ranks or, on rank 1, otherwise."""
    rank = collective.current().rank
    return [build(other if rank == 1 else Build()) for other in rank_1_builds]


def test_every_difference_is_found_at_construction_and_names_the_ranks_and_both_sides(on_ranks):
    cases = [None, *DIFFERENCES]
    both = list(zip(*on_ranks(2, build_in_turns, [Build(), *(other for other, _, _ in DIFFERENCES.values())])))
    for case, sentences in zip(cases, both):
        if case is None:
            assert sentences == (None, None)
            continue
        _, expected, got = DIFFERENCES[case]
        assert any(sentences), case
        for sentence in filter(None, sentences):
            assert "Optimizer: rank 1 and rank 0 " in sentence, case
            assert f"Expected {expected}" in sentence and f"got {got}" in sentence, f"{case}: {sentence}"
            assert sentence.endswith(("on every rank.", "before the optimizer is used.", "same settings.")), case
            assert len(sentence) < 300, "longer than the launcher's last line can hold"


def model_with_an_optimizer_in_every_mode(features, mode):
    """Only in training does the optimizer see both variables."""
    variables = [tf1.get_variable("kernel", [3, 1]), tf1.get_variable("bias", [1])]
    loss = tf.reduce_sum(tf.matmul(features, variables[0]) + variables[1])
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.1), is_distributed=True)
    trained = variables if mode == tf.estimator.ModeKeys.TRAIN else variables[:1]
    train_op = optimizer.minimize(loss, tf1.train.get_or_create_global_step(), trained)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


@on_each_rank(2)
def test_rank_0_may_build_an_optimizer_to_evaluate(tmp_path):
    """Trains two steps; rank 0 evaluates in between."""
    rank = collective.current().rank
    config = NPURunConfig(model_dir=f"{tmp_path}/rank_{rank}", save_checkpoints_steps=1)
    estimator = NPUEstimator(model_with_an_optimizer_in_every_mode, config=config)
    batches = lambda: tf.data.Dataset.from_tensors(tf.ones([2, 3])).repeat()  # noqa: E731 - an input_fn
    estimator.train(batches, steps=1)
    if rank == 0:
        estimator.evaluate(batches, steps=1)
    estimator.train(batches, steps=1)


@tells_disagreement
@in_graph
def nested_with_other_managers():
    """Reduces alike on all ranks, under a loss scale that differs."""
    rank = collective.current().rank
    variable = tf1.get_variable("variable", [2])
    optimizer = NPULossScaleOptimizer(
        NPUDistributedOptimizer(tf1.train.AdamOptimizer()), FixedLossScaleManager(2.0**rank), is_distributed=True
    )
    optimizer.compute_gradients(tf.reduce_sum(tf.square(variable)))


@tells_disagreement
@in_graph
def reduced_by_hand():
    """Reduces, on a rank, gradients of other shapes with as many elements; sparse ones may differ in rows."""
    rank = collective.current().rank
    rows = tf.IndexedSlices(tf.ones([1 + rank, 2]), tf.range(1 + rank), tf.constant([4, 2]))
    npu_allreduce([tf.ones([2, 3]), rows], "sum")
    npu_allreduce([tf.ones([2, 3] if rank == 0 else [3, 2]), tf.ones([4])])


@on_each_rank(2)
@in_graph
def test_ranks_that_do_not_share_anything_may_differ():
    rank = collective.current().rank
    variable = tf1.get_variable("variable", [2 + rank])
    optimizer = NPULossScaleOptimizer(tf1.train.AdamOptimizer(), FixedLossScaleManager(2.0**rank))
    train_op = optimizer.minimize(tf.reduce_sum(tf.square(variable)))
    with started_session() as session:
        session.run(train_op)


@on_each_rank(2)
def test_functions_may_be_traced_and_layers_numbered_differently():
    """Traces a function for each length of batch, between eager steps, after layers that rank 1 alone has."""
    ranks = collective.current()
    for _ in range(ranks.rank):
        tf.keras.layers.Dense(3).build([None, 4])  # on rank 1 the next layers get other numbers
    model = tf.keras.Sequential([tf.keras.layers.Dense(3), tf.keras.layers.Dense(3)])
    model.build([None, 4])
    name = "traced"
    manager = FixedLossScaleManager(8)
    pipeline = Pipeline([LossScaling(manager), AllReduce(name), OverflowCheck(name, True, checks_local_gradients=True)])

    step = tf.function(_gradients)
    for length in [4, 4, 4] if ranks.rank == 0 else [4, 2, 3]:
        step(pipeline, model, tf.ones([length, 4]))
    shapes = [np.shape(gradient) for gradient in _gradients(pipeline, model, tf.ones([4, 4]))]
    assert shapes == [(4, 3), (3,), (3, 3), (3,)]


def _gradients(pipeline, model, features):
    step = pipeline.begin()
    with tf.GradientTape() as tape:
        loss = pipeline.scale(tf.reduce_sum(model(features)), step)
    gradients = tape.gradient(loss, model.trainable_variables)
    return [grad for grad, _ in pipeline.combine(step, zip(gradients, model.trainable_variables))]


@tells_disagreement
def traced_with_other_shapes():
    """Traces a Keras step on a rank without running it; rank 1 has a wider layer."""
    model = tf.keras.Sequential([tf.keras.layers.Dense(3 + collective.current().rank, name="top")])
    model.build([None, 4])
    pipeline = Pipeline([AllReduce("traced_only")])
    tf.function(_gradients).get_concrete_function(pipeline, model, tf.ones([2, 4]))


@pytest.mark.parametrize(
    ("build_otherwise", "start", "part"),
    [
        (nested_with_other_managers, "NPULossScaleOptimizer", "Expected loss_scale=1.0 as on rank 0"),
        (
            reduced_by_hand,
            "npu_allreduce: rank 1 and rank 0 would reduce different gradients.",
            "Expected the shape (2, 3) of value 0 as on rank 0; got (3, 2).",
        ),
        (traced_with_other_shapes, "", "Expected the shape (4, 3) of top/kernel:0 as on rank 0; got (4, 4)."),
    ],
    ids=["loss scaling around a distributed optimizer", "gradients reduced by hand", "a Keras step while it is traced"],
)
def test_other_ways_to_reduce_are_compared_too(on_ranks, build_otherwise, start, part):
    sentences = list(filter(None, on_ranks(2, build_otherwise)))
    assert sentences
    for sentence in sentences:
        assert sentence.startswith(start) and part in sentence


def declare_another_place(variable, value):
    """Sets a variable that a script could read, on a rank, and returns the message; rank 1 tells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, value)
        try:
            collective.current()
        except RuntimeError as refused:
            return str(refused)


@pytest.mark.parametrize(
    ("variable", "value", "part"), [("RANK_SIZE", "1", "= 2; got 1"), ("RANK_ID", "0", "= 1; got 0")]
)
def test_a_rank_of_another_number_than_its_environment_declares_is_refused(on_ranks, variable, value, part):
    assert part in on_ranks(2, declare_another_place, variable, value)[1]
