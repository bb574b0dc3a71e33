"""Training a network of three groups with a loss scale each, in each of the ways to train, and a model of it."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.amp.groups import GroupLossScaleManager, scale_boundary
from npu_bridge.amp.scaling import scale_loss, unscaled_gradients
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer

tf1 = tf.compat.v1
RATE, STEPS = 0.05, 12
SHAPES = {"first": (3, 4), "second": (4, 4), "third": (4, 2)}
FIRST_SCALES = (2.0**4, 2.0**12, 2.0**6)
GROWTH, BACKOFF = 2.0 ** (1 / 1000), 2.0**-0.5
# By group, rank and step, where the gradient of that group alone is not finite.
POISONS = {(1, 0, 2), (2, 1, 4), (0, 1, 7), (2, 0, 7)}


def start_values():
    random = np.random.RandomState(11)
    return {name: random.randn(*shape).astype(np.float32) for name, shape in SHAPES.items()}


def clean_batches(rank=0):
    """Of each step the features, and for each group what is added to its gradient."""
    random = np.random.RandomState(rank)
    return [(random.randn(5, 3).astype(np.float32), np.zeros(3, np.float32)) for _ in range(STEPS)]


def batches(rank):
    fed = clean_batches(rank)
    for group, of_rank, step in POISONS:
        if of_rank == rank:
            fed[step][1][group] = np.inf
    return fed


def loss_of(variables, features, poisons, mark=scale_boundary):
    """A loss whose gradients get an addend for each group, which has no way through another group."""
    read = [mark(value * poisons[number], number + 1, 0) for number, value in enumerate(variables.values())]
    hidden = tf.tanh(tf.matmul(mark(features, 0, 1), variables["first"]))
    hidden = tf.tanh(tf.matmul(mark(hidden, 1, 2), variables["second"]))
    output = mark(tf.matmul(mark(hidden, 2, 3), variables["third"]), 3, 0)
    return tf.reduce_mean(tf.square(output - 1.0)) + tf.add_n([tf.reduce_sum(each) for each in read])


def in_graph(make_manager=None, stages=(), fed=None, is_tailing=False):
    """`NPUOptimizer`; gives variables, overflow and scales of each step."""
    with tf.Graph().as_default(), tf1.Session() as session:
        variables = {
            name: tf1.get_variable(name, initializer=value, use_resource=name != "second")
            for name, value in start_values().items()
        }
        features, poisons = tf1.placeholder(tf.float32, [5, 3]), tf1.placeholder(tf.float32, [3])
        groups = list(variables.values()) if make_manager else list(variables)
        manager = make_manager(groups) if make_manager else GroupLossScaleManager(groups, FIRST_SCALES)
        is_grouped = isinstance(manager, GroupLossScaleManager)
        loss = loss_of(variables, features, poisons, scale_boundary if is_grouped else lambda x, i, j: x)
        inner = tf1.train.GradientDescentOptimizer(RATE)
        optimizer = NPUOptimizer(inner, manager, True, True, is_tailing, name="groups", stages=list(stages))
        train_op = optimizer.minimize(loss)
        session.run(tf1.global_variables_initializer())
        trace = []
        for batch in fed or batches(collective.current().rank):
            _, report = session.run([train_op, optimizer.last_step], dict(zip((features, poisons), batch)))
            trace.append((session.run(variables), report.overflow, report.loss_scale))
        return trace


def in_function(uses_passes):
    """A Keras optimizer in a `tf.function`, by `minimize` or by `scale_loss` around a pass."""
    variables = {name: tf.Variable(value, name=name) for name, value in start_values().items()}
    manager = GroupLossScaleManager(list(variables), list(FIRST_SCALES))
    optimizer = npu_keras_optimizer(tf.keras.optimizers.SGD(RATE), manager)

    @tf.function
    def step(features, poisons):
        if not uses_passes:
            optimizer.minimize(lambda: loss_of(variables, features, poisons), list(variables.values()))
            return
        with tf.GradientTape() as tape:
            loss = loss_of(variables, features, poisons)
        with scale_loss(loss, optimizer) as scaled:
            scaled.backward(tape, list(variables.values()))
        optimizer.apply_gradients(unscaled_gradients(optimizer))

    trace = []
    for batch in batches(collective.current().rank):
        step(*map(tf.constant, batch))
        report = optimizer.last_step
        trace.append(({name: each.numpy() for name, each in variables.items()}, report.overflow, report.loss_scale))
    return trace


WAYS = {
    "graph": in_graph,
    "graph, tailed": lambda: in_graph(is_tailing=True),
    "function": lambda: in_function(uses_passes=False),
    "function, passes": lambda: in_function(uses_passes=True),
}


def trained(ways):
    """On a rank: the trace of training in each of these ways."""
    return {way: WAYS[way]() for way in ways}


def model(ranks):
    """Variables, overflow and scales of each step, in float64 and without any scale."""
    variables = {name: tf.Variable(value.astype(np.float64)) for name, value in start_values().items()}
    fed, scales, trace = [batches(rank) for rank in range(ranks)], [np.float32(scale) for scale in FIRST_SCALES], []
    for step in range(STEPS):
        used = tuple(scales)
        bad = [any((group, rank, step) in POISONS for rank in range(ranks)) for group in range(3)]
        if not any(bad):
            with tf.GradientTape() as tape:
                losses = [
                    loss_of(variables, *(of_rank[step][part].astype(np.float64) for part in (0, 1)), lambda x, i, j: x)
                    for of_rank in fed
                ]
                mean = tf.add_n(losses) / ranks
            for variable, grad in zip(variables.values(), tape.gradient(mean, list(variables.values()))):
                variable.assign_sub(RATE * grad)
        scales = [np.float32(scale * np.float32(BACKOFF if is_bad else GROWTH)) for scale, is_bad in zip(scales, bad)]
        trace.append(({name: each.numpy() for name, each in variables.items()}, any(bad), used))
    return trace


def assert_equals_model(traces):
    """Traces of one way, by rank, against the model."""
    expected = model(len(traces))
    assert {is_bad for _, is_bad, _ in expected} == {True, False}
    for rank, trace in enumerate(traces):
        before = start_values()
        for step, ((values, overflow, scales), (wanted, is_bad, used)) in enumerate(zip(trace, expected)):
            where = f"rank {rank}, step {step}"
            np.testing.assert_array_equal(np.float32(scales), np.float32(used), err_msg=where)
            assert bool(overflow) == is_bad, where
            for name, value in values.items():
                np.testing.assert_allclose(value, wanted[name], rtol=1e-4, atol=1e-5, err_msg=f"{where}: {name}")
                assert not is_bad or value.tobytes() == before[name].tobytes(), f"{where}: {name} has changed"
                assert value.tobytes() == traces[0][step][0][name].tobytes(), f"{where}: {name} differs between ranks"
            before = values
