"""Several steps in a run of a session: the same bits as one by one, in a loop of the graph and by prepared calls."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import optimizers
from npu_bridge.estimator.npu import util
from npu_bridge.estimator.npu.npu_hook import SetIterationsVarHook
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.gradients.graph_mode import classic_control_flow
from npu_bridge.graph.loop import NotLoopableError, export_definition, ops_to_copy, put_in_loop
from npu_bridge.session import iterations, name_step
from npu_bridge.session.iterations import CALLER, POOL, LoopThreadChoice
from tests.goldens.two_layers import OPTIMIZERS, assert_same_bits
from tests.ranks.ways import started_session

tf1 = tf.compat.v1
pytestmark = pytest.mark.filterwarnings("ignore:`tf.layers")
BATCHES = 24


def loss_scaled(optimizer):
    manager = ExponentialUpdateLossScaleManager(1024, 2, 1, 2, 0.5)
    return NPUOptimizer(optimizer, loss_scale_manager=manager, is_loss_scale=True)


def values_of(session):
    return session.run({variable.name: variable for variable in tf1.global_variables()})


def dense(x):
    return tf1.layers.dense(tf1.layers.flatten(x), 3, tf.nn.relu)


def convolutional(x):
    x = tf1.layers.conv2d(x, 4, 3, activation=tf.nn.relu)
    x = tf1.layers.batch_normalization(x, training=True, fused=True)
    return tf1.layers.max_pooling2d(x, 2, 2)


def embedded(x):
    table = tf1.get_variable("table", [20, 4])
    return x[:, 0, :, 1:] * tf.nn.embedding_lookup(table, tf.cast(tf.abs(x[:, 0, :, 0]) * 5, tf.int32) % 20)


def attention(x):
    x = tf1.layers.dense(tf.reshape(x, [-1, 16, 8]), 8)
    x += tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True) / 8.0), x)
    x = tf1.layers.batch_normalization(x, training=True)
    return tf1.layers.dense(x, 4, lambda y: 0.5 * y * (1.0 + tf.math.erf(y / 2.0**0.5)))


def assert_same_bits_in_a_loop(step, count=7, initializers=()):
    """Runs a step so many times, then from the same start the loop made of it; gives the values reached."""
    loop = put_in_loop(step.graph, [step])
    reached = []
    with started_session() as session:
        start = values_of(session)
        for run in (
            lambda: [session.run(step) for _ in range(count)],
            lambda: session.run(loop.op, {loop.count: count}),
        ):
            session.run(list(initializers))
            for variable in tf1.global_variables():
                session.run(variable.initializer, {variable.initializer.inputs[1]: start[variable.name]})
            run()
            reached.append(values_of(session))
    assert_same_bits(reached[1], reached[0])
    return reached[0]


@pytest.mark.parametrize(
    "model, name, use_resource",
    [
        (dense, "sgd", True),
        (dense, "keras_legacy_adam", True),
        (convolutional, "momentum", False),
        (embedded, "adam", False),
        (attention, "lamb", True),
    ],
)
def test_a_loop_gives_the_bits_of_its_steps(graph, model, name, use_resource):
    tf1.get_variable_scope().set_use_resource(use_resource)
    tf1.set_random_seed(3)
    images = np.random.RandomState(0).randn(7, 4, 8, 8, 2).astype("f")
    images[[2, 5]] = np.inf  # these two steps are skipped
    iterator = tf1.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(images))
    loss = tf.reduce_mean(tf.square(model(iterator.get_next())))
    optimizer = OPTIMIZERS[name]()
    optimizer = loss_scaled(NPUOptimizer(optimizer) if "keras" in name else optimizer)
    train_op = optimizer.minimize(loss, tf1.train.get_or_create_global_step())
    step = tf.group(train_op, *tf1.get_collection(tf1.GraphKeys.UPDATE_OPS))
    reached = assert_same_bits_in_a_loop(step, initializers=[iterator.initializer])
    assert reached["global_step:0"] == 7 - 2


def test_conditions_and_sums_in_a_loop(graph):
    """TensorFlow adds up all of a sum at once, in the order of names."""
    count, total, scaled = (tf1.get_variable(name, initializer=0.0) for name in ("count", "total", "scaled"))
    weights = [tf1.get_variable(name, initializer=value) for name, value in (("small", 1.7), ("large", 3e7))]
    number = count.assign_add(1.0)
    first, second = (weight.read_value() for weight in weights)
    addends = [weights[1].read_value(), first, first * 3.1, -second, second * 0.7, number]
    with classic_control_flow():

        def inner():
            return tf.cond(number > 4, lambda: total.assign_add(count * 8), lambda: total.assign_sub(number))

        chosen = tf.cond(number % 2 > 0, inner, lambda: total.assign_add(sum(addends[1:], addends[0])))
    assert assert_same_bits_in_a_loop(tf.group(chosen, scaled.assign_add(second)))["count:0"] == 7


def test_what_is_fed_is_the_same_in_every_step_and_the_rest_goes_on(graph):
    iterator = tf1.data.make_initializable_iterator(tf.data.Dataset.range(10).batch(2))
    fed, other = tf.unstack(iterator.get_next(), num=2)
    pulled = tf1.get_variable("pulled", initializer=np.zeros(2, np.int64))
    loop = put_in_loop(graph, [pulled.assign_add([fed, other]).op], [fed.name])
    with tf1.Session() as session:
        session.run([pulled.initializer, iterator.initializer])
        session.run(loop.op, {loop.count: 5, fed: 7})
        assert session.run(pulled).tolist() == [35, 1 + 3 + 5 + 7 + 9]


def test_operators_are_copied_once(graph, monkeypatch):
    """Each NodeDef is a copy of the operator, a large constant included."""
    weight, copied, original = tf1.get_variable("weight", initializer=1.0), [], tf.Operation.node_def
    step = [weight.assign_add(tf.reduce_sum(tf.constant([1.0, 2.0]) * number)).op for number in range(5)]
    monkeypatch.setattr(tf.Operation, "node_def", property(lambda op: copied.append(op) or original.fget(op)))
    ops = ops_to_copy(step, ())
    assert copied == []
    export_definition(graph, ops)
    assert copied == ops


def _with_noise(of_graph=0, of_op=5):
    """The pair (0, 0) is no seed to TensorFlow; with another one an operator draws the same numbers each time."""
    tf1.set_random_seed(of_graph)
    return tf1.assign_add(tf1.get_variable("noisy", [2]), tf.random.uniform([2], seed=of_op)).op


def _with_a_loop():
    with classic_control_flow():
        return tf1.while_loop(lambda i: i < 3.0, lambda i: i + 1.0, [tf1.get_variable("b", initializer=0.0)]).op


def _with_python():
    return tf1.py_func(lambda: np.float32(1), [], tf.float32).op


def _with_slots_that_lie_flat():
    return optimizers.LAMB(0.01, fused=True).minimize(tf1.get_variable("c", initializer=1.0, use_resource=True))


@pytest.mark.parametrize(
    "build, reason, is_only_random",
    [
        (_with_noise, "keeps state", True),
        (lambda: _with_noise(0, 0), "keeps state", True),
        (lambda: _with_noise(7, 0), "keeps state", True),
        (_with_a_loop, "loop of its own", False),
        (_with_python, "keeps state", False),
        (_with_slots_that_lie_flat, "keeps state", False),
    ],
)
def test_a_step_that_a_copy_would_not_equal_is_left_alone(graph, build, reason, is_only_random):
    step = build()
    before = graph.version
    with pytest.raises(NotLoopableError, match=reason) as raised:
        put_in_loop(graph, [step])
    assert raised.value.is_only_random == is_only_random
    assert graph.version == before


class Numbered:
    """Trains a kernel on numbered batches, with a dropout if there is noise."""

    def __init__(self, noise=0.0):
        tf1.set_random_seed(1)
        rows = np.random.RandomState(0).randn(BATCHES, 8, 4).astype("f")
        iterator = tf1.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices((np.arange(BATCHES), rows)))
        self.number, rows = iterator.get_next()
        kernel = tf1.get_variable("kernel", [4, 1], initializer=tf1.random_normal_initializer(seed=2))
        self.kept = tf1.placeholder_with_default(1.0, [])
        rows = tf.nn.dropout(rows, rate=noise, seed=3) if noise else rows
        error = tf.reduce_mean(tf.square(tf.matmul(rows, kernel) - tf.reduce_sum(rows, axis=1, keepdims=True)))
        self.loss = self.kept * error
        self.step = tf1.train.get_or_create_global_step()
        self.train_op = tf1.train.AdamOptimizer(0.05).minimize(self.loss, self.step)
        self.init = tf.group(tf1.global_variables_initializer(), iterator.initializer)


def trained(size, noise=0.0, kept=None):
    """Returns the fetches of 10 steps, a run that does not train, a single step and data to the end; all variables."""
    with tf.Graph().as_default():
        model = Numbered(noise)
        feeds = {} if kept is None else {model.kept: kept}
        with tf1.Session() as session:
            session.run(model.init)
            step = util.set_iteration_per_loop(session, model.train_op, size)
            fetched = [session.run([step, model.number, model.loss], feeds)[1:] for _ in range(10 // size)]
            fetched.append([session.run(model.number), 0.0])
            session.run(model.train_op, feeds)
            with pytest.raises(tf.errors.OutOfRangeError):
                for _ in range(BATCHES):
                    session.run(step, feeds)
            return fetched, values_of(session)


@pytest.mark.parametrize("noise, way", [(0.0, "copied"), (0.3, "one by one")])
@pytest.mark.parametrize("kept", [None, 0.5])
def test_five_steps_in_a_run_are_five_runs(noise, way, kept, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "npu_bridge")
    # So that signals are heard, long loops are parts: here of 8 steps at most, then of 1.
    monkeypatch.setattr(iterations, "_FIRST_STEPS", 2)
    monkeypatch.setattr(iterations, "_LONGEST_CALL_SECS", 0.0)
    fetched_singly, single = trained(1, noise, kept)
    fetched, looped = trained(5, noise, kept)
    assert [number for number, _ in fetched] == [4, 9, 10]
    assert fetched == [*fetched_singly[4::5], fetched_singly[-1]]
    assert looped["global_step:0"] == BATCHES - 1, "of the last loop, too, as many steps as there was data for"
    assert_same_bits(looped, single)
    assert ("steps are repeated one by one" in caplog.text) == (way == "one by one")


@pytest.mark.parametrize("other", [tf.no_op, _with_noise])  # in a loop of the graph, one by one
def test_a_time_limit_holds_for_all_steps_of_a_run(graph, other):
    numbers = tf.data.Dataset.range(10**6).filter(lambda number: number < 2)  # after two, nothing for seconds
    train_op = tf.group(tf1.data.make_one_shot_iterator(numbers).get_next(), other())
    with started_session() as session:
        step = util.set_iteration_per_loop(session, train_op, 9)
        with pytest.raises(tf.errors.DeadlineExceededError):
            session.run(step, options=tf1.RunOptions(timeout_in_ms=100))


def test_two_steps_of_a_graph_repeat_on_their_own(graph):
    counts = [tf1.get_variable(name, initializer=0) for name in ("generator", "critic")]
    with started_session() as session:
        steps = [util.set_iteration_per_loop(session, count.assign_add(1).op, 3) for count in counts]
        session.run(steps[0])
        session.run(tf.group(steps[0], name="something_that_needs_it"))
        session.run(steps[1])
        assert session.run(counts) == [6, 3]
        session.run(steps)
        assert session.run(counts) == [9, 6]


def test_a_recovered_session_trains_in_loops_again(graph):
    model, runs = Numbered(), []

    class LoseOnce(tf.estimator.SessionRunHook):
        def after_run(self, run_context, run_values):
            runs.append(int(run_context.session.run(model.step)))
            if len(runs) == 2:
                raise tf.errors.AbortedError(None, None, "lost")

    step = name_step(model.train_op)
    scaffold = tf1.train.Scaffold(init_op=model.init)
    hooks = [SetIterationsVarHook(5), LoseOnce()]
    with tf1.train.MonitoredSession(tf1.train.ChiefSessionCreator(scaffold), hooks=hooks) as session:
        while len(runs) < 4:
            session.run(step)
    assert runs == [5, 10, 5, 10]  # no checkpoint: the new session begins anew


@pytest.mark.parametrize("pool, caller, settled", [(0.14, 0.09, CALLER), (0.09, 0.14, POOL), (1.5, 0.5, POOL)])
def test_threads_are_tried_in_turns_and_the_faster_stay(pool, caller, settled):
    threads, tried = LoopThreadChoice(), []
    millis = {POOL: pool, CALLER: caller}
    threads.record_duration(threads.choose(), 99, 60.0)  # the graph is prepared: no trial
    for _ in range(10):
        tried.append(threads.choose())
        threads.record_duration(tried[-1], 99, 99 * millis[tried[-1]] / 1000)
    expected = [POOL] if pool > 1.0 else [POOL, CALLER] * 3
    assert tried == expected + [settled] * (10 - len(expected))
