"""Wire formats on real ranks: 16-bit numbers that are added up in float32, and nothing else that changes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.amp import DynamicLossScaleManager
from npu_bridge.collective import wire
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.npu_init import npu_keras_optimizer
from npu_bridge.tailing import optimize_tail
from npu_bridge.tailing.transfers import find_transfers
from tests.goldens.two_layers import OPTIMIZERS, assert_same_bits, in_graph, token_batches, train
from tests.rank_pool import on_each_rank
from tests.ranks.test_training import SCALE_INSIDE, WRAPPERS, dynamic, fixed, train_own_share
from tests.ranks.ways import LinesBySteps, started_session

tf1 = tf.compat.v1
SHAPES = ([3, 5], [], [7], [0, 4], [2, 1, 6])
ON_WIRE = [wrapper for wrapper in WRAPPERS if wrapper not in SCALE_INSIDE]


def values_of(rank, dtype):
    """The same numbers a test and a rank know, rounded to the wire's dtype."""
    random = np.random.RandomState(rank)
    return [tf.cast(np.float32(random.randn(*shape) * 100), dtype) for shape in SHAPES]


@in_graph
def means(format_name, is_shape_known):
    """On a rank: the mean of several tensors, as float32 arrays."""
    communicator, dtype = collective.current(), tf.as_dtype(format_name)
    with tf1.Session() as session:
        own = session.run([tf.cast(value, tf.float32) for value in values_of(communicator.rank, dtype)])
        inputs = [tf1.placeholder(tf.float32, value.shape if is_shape_known else None) for value in own]
        reduced = wire.average_tensors(communicator, [tf.cast(value, dtype) for value in inputs], "means")
        return session.run(reduced, dict(zip(inputs, own)))


@pytest.mark.few_fast(1, "other formats and numbers of ranks")
@pytest.mark.parametrize(
    ("format_name", "is_shape_known", "rank_count"),
    [("float16", True, 2), ("float16", False, 3), ("bfloat16", True, 3), ("bfloat16", False, 2)],
)
def test_the_mean_is_that_of_float32_and_rounded_on_the_way_back_only(
    on_ranks, format_name, is_shape_known, rank_count
):
    dtype = tf.as_dtype(format_name)
    with tf.Graph().as_default(), tf1.Session() as session:
        per_rank = [[tf.cast(value, tf.float32) for value in values_of(rank, dtype)] for rank in range(rank_count)]
        exact = [tf.add_n(same) / rank_count for same in zip(*per_rank)]
        # Two ranks need no way back.
        expected = exact if rank_count == 2 else [tf.cast(tf.cast(value, dtype), tf.float32) for value in exact]
        expected = session.run(expected)
    for results in on_ranks(rank_count, means, format_name, is_shape_known):
        for result, value in zip(results, expected):
            np.testing.assert_array_equal(result, value)


@pytest.mark.few_fast(2, "other wrappers and formats")
@pytest.mark.parametrize(
    ("wrapper", "wire_format"), [*((wrapper, "float16") for wrapper in ON_WIRE), ("nested", "bfloat16")]
)
def test_training_stays_near_that_of_whole_gradients(on_ranks, wrapper, wire_format):
    batches = token_batches(10, batch_size=16)
    whole, _ = train(lambda: NPUOptimizer(OPTIMIZERS["momentum"]()), batches=batches)
    first, second = on_ranks(2, train_own_share, "momentum", wrapper, batches, wire_format)
    assert_same_bits(first, second)
    for variable in ("embedding:0", "kernel:0"):
        np.testing.assert_allclose(first[variable], whole[variable], rtol=0.05, atol=0.01, err_msg=variable)
        assert first[variable].tobytes() != whole[variable].tobytes(), "nothing was rounded"


@pytest.mark.parametrize(
    ("wrapper", "wire_format", "of_ranks", "change"),
    [
        *((wrapper, "float16", (65504.0, 65504.0), -65504.0) for wrapper in ("unscaled", "NPUDistributedOptimizer")),
        *((wrapper, "float16", (1e6, 0.0), 0.0) for wrapper in ON_WIRE),
        ("unscaled", "bfloat16", (2.0**100, 2.0**100), -(2.0**100)),  # bfloat16 has the range of float32
    ],
)
@on_each_rank(2)
@in_graph
def test_what_fits_is_averaged_and_what_does_not_never_gets_to_a_variable(wrapper, wire_format, of_ranks, change):
    variable = tf1.get_variable("variable", [2], initializer=tf1.zeros_initializer())
    own = tf1.placeholder(tf.float32, [2])
    optimizer = WRAPPERS[wrapper](tf1.train.GradientDescentOptimizer(1.0), dynamic, wire_format)
    train_op = optimizer.minimize(tf.reduce_sum(variable * own), tf1.train.get_or_create_global_step())
    with started_session() as session:
        session.run(train_op, {own: np.float32([of_ranks[collective.current().rank], 1.0])})
        variable, step = session.run([variable, tf1.train.get_global_step()])
    np.testing.assert_array_equal(variable, np.float32([change, -1.0 if change else 0.0]))
    assert step == (change != 0.0)


def said_of_drops(way):
    """On a rank: what is said in four steps, of which the third and the fourth do not fit; the variable after each."""
    with LinesBySteps("npu_bridge.base.errors") as said:
        return said.lines, _DROPPING[way](said)


def _gradients_of_steps(said):
    """Gradients of this rank; only rank 1 has those that do not fit."""
    for said.steps, large in enumerate([1.0, 1.0, 1e6, 1e6]):
        yield np.float32([large if collective.current().rank == 1 else 1.0])


@in_graph
def _dropping_in_session(said, wrapper):
    variable = tf1.get_variable("variable", [1], initializer=tf1.zeros_initializer())
    own = tf1.placeholder(tf.float32, [1])
    optimizer = WRAPPERS[wrapper](OPTIMIZERS["sgd"](), fixed, "float16")
    train_op = optimizer.minimize(tf.reduce_sum(variable * own))
    values = []
    with started_session() as session:
        for gradient in _gradients_of_steps(said):
            session.run(train_op, {own: gradient})
            values.append(float(session.run(variable)[0]))
    return values


def _dropping_in_loop(said, wrap):
    variable = tf.Variable([0.0])
    optimizer = npu_keras_optimizer(tf.keras.optimizers.SGD(0.1), wire="float16")
    step, values = wrap(lambda own: optimizer.apply_gradients([(own, variable)])), []
    for gradient in _gradients_of_steps(said):
        step(tf.constant(gradient))
        values.append(float(variable[0]))
    return values


_DROPPING = {
    "session": lambda said: _dropping_in_session(said, "NPUDistributedOptimizer"),
    "eager": lambda said: _dropping_in_loop(said, lambda step: step),
    "function": lambda said: _dropping_in_loop(said, tf.function),
    "scaled": lambda said: _dropping_in_session(said, "scaled"),
    "scaled outside": lambda said: _dropping_in_session(said, "nested"),
}


@pytest.mark.parametrize("way", _DROPPING)
def test_the_first_step_that_is_dropped_without_a_loss_scale_is_told_with_the_fix(on_ranks, way):
    (lines, values), (others, _) = on_ranks(2, said_of_drops, way)
    np.testing.assert_allclose(values, [-0.1, -0.2, -0.2, -0.2], rtol=1e-6)
    assert others == [] and len(lines) == (0 if "scaled" in way else 1)
    for step, line in lines:
        assert step == 2
        assert "does not fit float16" in line and "wire='bfloat16'" in line


@pytest.mark.horovod("the pass finds its all-reduces")
@pytest.mark.few_fast(1, "other formats and three ranks take the same way")
@pytest.mark.parametrize(("format_name", "rank_count"), [("float16", 2), ("bfloat16", 3)])
@on_each_rank("rank_count")
@in_graph
def test_the_pass_of_tail_optimisation_finds_what_travels_in_16_bits(format_name, rank_count):
    table, kernel = (tf1.get_variable(name, [4, 3], use_resource=True) for name in ("table", "kernel"))
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2, 1])) + tf.reduce_sum(tf.square(kernel))
    WRAPPERS["nested"](OPTIMIZERS["momentum"](), dynamic, format_name).minimize(loss)
    graph = tf1.get_default_graph()
    transfers = find_transfers(graph.get_operations())
    sizes = [[tensor.shape.num_elements() for tensor in transfer.sent] for transfer in transfers]
    dtypes = {tensor.dtype.name for transfer in transfers for tensor in (*transfer.sent, *transfer.arrived)}
    assert len(sizes) == len({transfer.entry.name for transfer in transfers}) == 2
    assert 12 in [size for (size,) in sizes]  # the dense one, filled up to a multiple of the ranks
    assert dtypes == {format_name}
    report = optimize_tail(graph, collective.current())
    assert list(report.freed) and report.kept == {}


@on_each_rank(2, gives=[-80000.0])
def test_gradients_that_fit_once_they_are_scaled_are_applied():
    """Trains with a gradient beyond float16 that fits once it is scaled; returns the variable."""
    variable, manager = tf.Variable([0.0]), DynamicLossScaleManager(0.5)
    optimizer = npu_keras_optimizer(tf.keras.optimizers.SGD(1.0), manager, wire="float16")
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(tf.reduce_sum(variable) * 80000.0)
    optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(tape.gradient(loss, [variable])), [variable]))
    return variable.numpy().tolist()


def test_an_unknown_format_is_refused_with_the_choices():
    for make in (NPUOptimizer, NPUDistributedOptimizer):
        with pytest.raises(ValueError, match="'none', 'float16', 'bfloat16'; got wire='fp16'"):
            make(OPTIMIZERS["sgd"](), wire="fp16")


def test_one_process_rounds_nothing():
    bare, _ = train(lambda: NPUOptimizer(OPTIMIZERS["adam"](), fixed(), True, True))
    rounded, _ = train(lambda: NPUOptimizer(OPTIMIZERS["adam"](), fixed(), True, True, wire="float16"))
    assert_same_bits(rounded, bare)


def test_values_that_have_16_bits_are_sent_as_they_are():
    values = tf.constant([1.0 + 2.0**-9], tf.float16)
    assert wire.round_for_sending(values, tf.bfloat16) is values
