"""Steps that overlap in a loop of the graph: the same bits, the order that must be kept, or a reason not to."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.gradients.graph_mode import classic_control_flow
from npu_bridge.rewrite import NotLoopableError, put_in_crossing_loop
from tests.rewrite.looping import BATCHES, MODELS, Fresh, dense, loss_scaled, train_op_of, values_one_by_one_and_in
from tests.rewrite.waiting import nodes_of_graph
from tests.training import OPTIMIZERS, assert_same_bits

tf1 = tf.compat.v1
STEPS = 50
pytestmark = pytest.mark.filterwarnings("ignore:`tf.layers")


def assert_overlapping_steps_give_the_same_bits(train_op, steps=STEPS):
    loop = put_in_crossing_loop(train_op.graph, [train_op])
    one_by_one, looped = values_one_by_one_and_in(loop, train_op, steps)
    assert_same_bits(looped, one_by_one)
    return one_by_one


@pytest.mark.parametrize(
    "name, use_resource",
    [("momentum", True), ("adam", True), ("lamb", True), ("momentum", False), ("adam", False)],
)
def test_overlapping_steps_train_the_same_bits(graph, name, use_resource):
    tf1.get_variable_scope().set_use_resource(use_resource)
    optimizer = NPUOptimizer(OPTIMIZERS[name]()) if name == "lamb" else OPTIMIZERS[name]()
    assert_overlapping_steps_give_the_same_bits(train_op_of(dense, optimizer, repeats=5))


@pytest.mark.parametrize("name", ["momentum", "adam", "lamb"])
def test_an_overflow_skips_its_step_alone(graph, name):
    train_op = train_op_of(dense, loss_scaled(OPTIMIZERS[name]()), poisoned=(2, 5), repeats=5)
    trained = assert_overlapping_steps_give_the_same_bits(train_op)
    skipped = 2 * (STEPS // BATCHES)
    assert trained["global_step:0"] == STEPS - skipped


@pytest.mark.parametrize("model", [model for model in MODELS if model != "dense"])
def test_every_kind_of_layer(graph, model):
    train_op = train_op_of(MODELS[model], loss_scaled(OPTIMIZERS["adam"]()), repeats=5)
    assert_overlapping_steps_give_the_same_bits(train_op, steps=20)


def test_data_that_ends_in_the_loop_keeps_what_was_trained_and_nothing_else(graph):
    # Adam on rows of a table lets its averages decay before it looks at a gradient.
    train_op = train_op_of(MODELS["embedded"], OPTIMIZERS["adam"]())
    loop, fresh = put_in_crossing_loop(graph, [train_op]), Fresh()
    with fresh.session as session:
        for _ in range(BATCHES):
            session.run(train_op)
        one_by_one = fresh.values()
        for _ in range(10):  # a race would not be lost every time
            fresh.restart()
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(loop.op, {loop.count: 100})
            assert_same_bits(fresh.values(), one_by_one)


def slow_number():
    """A number that takes a while."""
    product = tf.random.uniform([300, 300])
    for _ in range(4):
        product = tf.matmul(product, product)
    return product[0, 0]


def late_numbers():
    """An iterator's next number, which takes a while and can be cancelled."""

    def wait(number):
        time.sleep(0.03)
        return number

    dataset = tf.data.Dataset.range(100).map(lambda number: tf.numpy_function(wait, [number], tf.int64))
    return tf1.data.make_one_shot_iterator(dataset).get_next()


def test_a_slow_step_is_done_before_the_end_of_data_is_told(graph):
    """What has gone wrong cancels whatever else waits for data in the same run."""
    numbers = tf1.data.make_one_shot_iterator(tf.data.Dataset.range(5)).get_next()
    trained = tf1.get_variable("trained", initializer=np.int64(0), use_resource=True)
    step = trained.assign_add(numbers + 10 * late_numbers())
    loop, fresh = put_in_crossing_loop(graph, [step.op]), Fresh()
    with fresh.session as session:
        with pytest.raises(tf.errors.OutOfRangeError):
            session.run(loop.op, {loop.count: STEPS})
        assert session.run(trained) == 11 * (0 + 1 + 2 + 3 + 4)


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_a_late_reader_sees_the_value_of_its_own_step(graph, use_resource):
    """It reads when the step is nearly over, and the next step would like to write."""
    number, total = (tf1.get_variable(name, initializer=0.0, use_resource=use_resource) for name in ("number", "total"))
    with tf.control_dependencies([slow_number(), number.assign_add(1.0)]):
        late = total.assign_add(number.read_value())
    assert assert_overlapping_steps_give_the_same_bits(tf.group(late))["total:0"] == STEPS * (STEPS + 1) / 2


def test_unseeded_numbers_are_new_in_every_step(graph):
    count = tf1.get_variable("count", initializer=0.0, use_resource=True)
    last = tf1.get_variable("last", initializer=0.0, use_resource=True)
    drawn = tf.random.uniform([])
    step = tf.group(count.assign_add(tf.cast(drawn != last, tf.float32)), last.assign(drawn))
    loop, fresh = put_in_crossing_loop(graph, [step]), Fresh()
    with fresh.session as session:
        session.run(loop.op, {loop.count: STEPS})
        assert session.run(count) == STEPS


def waited_for(nodes, start):
    """Names of the nodes that one waits for in its own iteration, and in the one before by way of a token."""
    own, tokens = _until_tokens(nodes, [start])
    before, _ = _until_tokens(nodes, [name.replace("/here", "/done") for name in tokens])
    return own, before - {name.replace("/here", "/done") for name in tokens}


def _until_tokens(nodes, stack):
    seen, tokens = set(), set()
    while stack:
        name = stack.pop()
        if name.endswith("/here"):
            tokens.add(name)
        elif name not in seen and name in nodes and nodes[name].kind not in ("Enter", "RefEnter"):
            seen.add(name)
            stack.extend([*nodes[name].data, *nodes[name].control])
    return seen, tokens


def test_a_layer_waits_for_its_own_update_and_for_no_other(graph):
    """Read from the graph: of the step before, the first product waits for the update of the first kernel alone."""
    values = tf.ones([2, 4])
    for layer in range(4):
        kernel = tf1.get_variable(f"kernel_{layer}", [4, 4], use_resource=True)
        values = tf.tanh(tf.matmul(values, kernel, name=f"product_{layer}"))
    train_op = OPTIMIZERS["adam"]().minimize(tf.reduce_sum(values))
    put_in_crossing_loop(graph, [train_op])
    nodes = nodes_of_graph(graph)
    for layer in range(4):
        _, before = waited_for(nodes, f"iteration_loop/step/product_{layer}")
        updates = {name for name in before if nodes[name].kind == "ResourceApplyAdam"}
        assert updates == {f"iteration_loop/step/Adam/update_kernel_{n}/ResourceApplyAdam" for n in range(layer + 1)}


def _assigning(value):
    return tf1.get_variable("assigned", shape=[], use_resource=True).assign(value).op


def _seeded_dropout():
    return _assigning(tf.reduce_sum(tf.nn.dropout(tf.ones([2]), rate=0.5, seed=1)))


def _loop():
    return _assigning(tf1.while_loop(lambda i: i < 3.0, lambda i: i + 1.0, [tf.constant(0.0)]))


def _python():
    return _assigning(tf1.py_func(lambda: np.float32(1), [], tf.float32))


def _queue():
    return _assigning(tf.queue.FIFOQueue(1, tf.float32, []).dequeue())


def _function():
    return _assigning(tf.function(lambda: tf.constant(1.0), autograph=False)())


def _condition_in_condition():
    flag = tf1.placeholder_with_default(True, [])
    variable = tf1.get_variable("assigned", shape=[], use_resource=True)

    def inner():
        return tf.cond(tf.identity(flag), lambda: variable.assign(1.0), lambda: tf.identity(0.0))

    return tf.cond(flag, inner, lambda: tf.identity(0.0)).op


def _variable_in_the_input_pipeline():
    variable = tf1.get_variable("assigned", shape=[], use_resource=True)
    dataset = tf.data.Dataset.range(3).map(lambda number: variable.read_value())
    return variable.assign_add(tf1.data.make_initializable_iterator(dataset).get_next()).op


@pytest.mark.parametrize(
    "build, reason",
    [
        (_seeded_dropout, "keeps state"),
        (_loop, "loop of its own"),
        (_python, "keeps state"),
        (_queue, "FIFOQueue"),
        (_function, "calls a function"),
        (_condition_in_condition, "condition within a condition"),
        (_variable_in_the_input_pipeline, "input pipeline reads"),
    ],
)
def test_what_is_not_understood_is_left_alone(graph, build, reason):
    with classic_control_flow():
        step = build()
    before = graph.version
    with pytest.raises(NotLoopableError, match=reason):
        put_in_crossing_loop(graph, [step])
    assert graph.version == before
