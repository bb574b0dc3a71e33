"""Several training steps in one run: the bits, the fetches, the ends, and what is left alone."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu import util
from npu_bridge.estimator.npu.npu_hook import SetIterationsVarHook
from npu_bridge.session import iterations
from npu_bridge.session.loop_threads import CALLER, POOL, LoopThreads
from tests.training import assert_same_bits

tf1 = tf.compat.v1
BATCHES = 24


class Model:
    """Trains a kernel on numbered batches; `loss` is the number of the batch it was computed from, and a bit more."""

    def __init__(self, noise=0.0, use_resource=False):
        tf1.set_random_seed(1)
        rows = np.random.RandomState(0).randn(BATCHES, 8, 4).astype("f")
        dataset = tf.data.Dataset.from_tensor_slices((np.arange(BATCHES, dtype="f"), rows))
        iterator = tf1.data.make_initializable_iterator(dataset)
        number, rows = iterator.get_next()
        initializer = tf1.random_normal_initializer(seed=2)
        self.kernel = tf1.get_variable("kernel", [4, 1], initializer=initializer, use_resource=use_resource)
        self.kept = tf1.placeholder_with_default(1.0, [], name="kept")
        if noise:
            rows = tf.nn.dropout(rows, rate=noise, seed=3)
        error = tf.reduce_mean(tf.square(tf.matmul(rows, self.kernel) - tf.reduce_sum(rows, axis=1, keepdims=True)))
        self.number = tf.identity(number)
        self.loss = self.kept * error
        self.global_step = tf1.train.get_or_create_global_step()
        self.train_op = tf1.train.AdamOptimizer(0.05).minimize(self.loss, self.global_step)
        self.init = tf.group(tf1.global_variables_initializer(), iterator.initializer)

    def values(self, session):
        return {variable.name: session.run(variable) for variable in tf1.global_variables()}


def as_written():
    """Settings with which TensorFlow runs graphs as they are, and calls functions instead of putting them in place."""
    config = tf1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


def trained(steps_per_run, runs, feeds=None, config=None, **arguments):
    """The variables after some runs in a new graph, the numbers of the batches fetched, and the session's loops."""
    with tf.Graph().as_default():
        model = Model(**arguments)
        feed_dict = {model.kept: feeds} if feeds else None
        with tf1.Session(config=config) as session:
            session.run(model.init)
            step = util.set_iteration_per_loop(session, model.train_op, steps_per_run)
            fetched = [session.run([step, model.number, model.loss], feed_dict)[1:] for _ in range(runs)]
            loops = getattr(session, "_npu_bridge_loops", None)
            way = type(*loops._earlier.values()).__name__ if loops is not None else ""
            return model.values(session), fetched, way


@pytest.mark.parametrize(
    "way, arguments",
    [
        ("_Copied", {"use_resource": False}),
        ("_Copied", {"use_resource": True}),
        ("_Copied", {"feeds": 0.5}),
        ("_Copied", {"noise": 0.3}),
        ("_Copied", {"noise": 0.3, "feeds": 0.5}),
        ("_Prepared", {"noise": 0.3, "config": as_written()}),
        ("_Fed", {"noise": 0.3, "feeds": 0.5, "config": as_written()}),
    ],
)
def test_five_steps_in_a_run_are_five_runs(way, arguments):
    single, fetched_singly, _ = trained(1, 20, **arguments)
    looped, fetched, taken = trained(5, 4, **arguments)
    assert taken == way
    assert_same_bits(looped, single)
    assert looped["global_step:0"] == 20
    assert fetched == fetched_singly[4::5]
    assert [number for number, _ in fetched] == [4, 9, 14, 19]


def test_long_steps_are_called_for_in_parts(monkeypatch):
    """So that signals are heard; of a part of its own each, when a step takes longer than a call may."""
    monkeypatch.setattr(iterations, "_LONGEST_CALL_SECS", 0.0)
    single, _, _ = trained(1, 22)
    looped, _, _ = trained(11, 2)  # parts of 8, 1 and 1
    assert_same_bits(looped, single)


@pytest.mark.parametrize("config", [pytest.param(None, id="in the graph"), pytest.param(as_written(), id="one by one")])
def test_data_that_ends_in_a_loop_keeps_its_steps(config):
    single, _, _ = trained(1, BATCHES, noise=0.3, config=config)
    with tf.Graph().as_default():
        model = Model(noise=0.3)
        with tf1.Session(config=config) as session:
            session.run(model.init)
            step = util.set_iteration_per_loop(session, model.train_op, 7)
            for _ in range(BATCHES // 7):
                session.run(step)
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(step)
            assert_same_bits(model.values(session), single)


def test_seeded_numbers_go_on_between_loops_and_other_runs():
    """Loops, single steps and runs that do not train draw from one stream, in every session from its start."""
    values = []
    for size in (1, 5):
        with tf.Graph().as_default():
            model = Model(noise=0.3)
            for _ in range(2):
                with tf1.Session() as session:
                    session.run(model.init)
                    step = iterations.name_step(model.train_op)
                    iterations.train_in_loops(session, size)
                    for _ in range(5 // size):
                        session.run(step)
                    losses = [session.run(model.loss) for _ in range(2)]
                    session.run(model.train_op)
                    for _ in range(10 // size):
                        session.run(step)
                    assert size == 1 or type(*session._npu_bridge_loops._earlier.values()).__name__ == "_Copied"
                    values.append({**model.values(session), "losses": np.array(losses)})
    for other in values[1:]:
        assert_same_bits(other, values[0])


def test_runs_without_the_step_are_what_they_were(graph):
    model = Model()
    with tf1.Session() as session:
        session.run(model.init)
        step = util.set_iteration_per_loop(session, model.train_op, 5)
        session.run(step)
        assert session.run(model.global_step) == 5
        assert session.run(model.number) == 5
        session.run(model.train_op)  # the step itself, not its loop
        assert session.run(model.global_step) == 6
        session.run(tf.group(step, name="something_that_needs_it"))
        assert session.run(model.global_step) == 11


def test_two_steps_of_a_graph_repeat_on_their_own(graph):
    counts = [tf1.get_variable(name, initializer=0) for name in ("generator", "critic")]
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        steps = [util.set_iteration_per_loop(session, count.assign_add(1).op, 3) for count in counts]
        session.run(steps[0])
        session.run(steps[0])
        session.run(steps[1])
        assert session.run(counts) == [6, 3]
        session.run(steps)
        assert session.run(counts) == [9, 6]


def test_the_size_of_loops_may_change(graph):
    model = Model()
    with tf1.Session() as session:
        session.run(model.init)
        loop = util.IterationPerLoop()
        step = loop.create_iteration_per_loop_var(model.train_op)
        for size, reached in ((4, 4), (1, 5), (2, 7)):
            loop.load_iteration_per_loop_var(session, size)
            session.run(step)
            assert session.run(model.global_step) == reached
            assert iterations.steps_per_run(session) == size


class Numbers(tf.estimator.SessionRunHook):
    """What a hook sees: the number of the batch, and how far training has come."""

    def __init__(self, model):
        self.model, self.seen = model, []

    def before_run(self, run_context):
        return tf.estimator.SessionRunArgs(self.model.number)

    def after_run(self, run_context, run_values):
        self.seen.append((run_values.results, run_context.session.run(self.model.global_step)))


def test_a_monitored_session_trains_in_loops_until_data_ends(graph):
    model = Model()
    with tf1.control_dependencies([model.train_op]):
        step = tf.no_op(name="IterationOp")  # named by the script
    hook = Numbers(model)
    scaffold = tf1.train.Scaffold(init_op=model.init)
    hooks = [SetIterationsVarHook(5), hook, tf.estimator.StopAtStepHook(last_step=13)]
    with tf1.train.MonitoredSession(tf1.train.ChiefSessionCreator(scaffold), hooks=hooks) as session:
        while not session.should_stop():
            session.run(step)
    assert hook.seen == [(4, 5), (9, 10), (14, 15)]  # whole loops: 13 is in the third


def test_a_recovered_session_trains_in_loops_again(graph):
    model, runs = Model(), []

    class LoseOnce(tf.estimator.SessionRunHook):
        def after_run(self, run_context, run_values):
            runs.append(int(run_context.session.run(model.global_step)))
            if len(runs) == 2:
                raise tf.errors.AbortedError(None, None, "lost")

    step = iterations.name_step(model.train_op)
    scaffold = tf1.train.Scaffold(init_op=model.init)
    hooks = [SetIterationsVarHook(5), LoseOnce()]
    with tf1.train.MonitoredSession(tf1.train.ChiefSessionCreator(scaffold), hooks=hooks) as session:
        while len(runs) < 4:
            session.run(step)
    assert runs == [5, 10, 5, 10]  # no checkpoint: the new session begins anew


@pytest.mark.parametrize(
    "pool, caller, settled",
    [(0.14, 0.09, CALLER), (0.09, 0.14, POOL), (1.5, 0.5, POOL)],
)
def test_threads_are_tried_in_turns_and_the_faster_stay(pool, caller, settled):
    threads, tried = LoopThreads(), []
    millis = {POOL: pool, CALLER: caller}
    threads.took(threads.choose(), 99, 60.0)  # the graph is prepared: no trial
    for _ in range(10):
        tried.append(threads.choose())
        threads.took(tried[-1], 99, 99 * millis[tried[-1]] / 1000)
    expected = [POOL] if pool > 1.0 else [POOL, CALLER] * 3
    assert tried == expected + [settled] * (10 - len(expected))


def test_a_one_shot_iterator_is_fine_and_told(graph, caplog):
    number = tf1.data.make_one_shot_iterator(tf.data.Dataset.range(1, 10)).get_next()
    total = tf1.get_variable("total", initializer=np.int64(0))
    caplog.set_level("INFO", "npu_bridge")
    with tf1.Session() as session:
        session.run(total.initializer)
        session.run(util.set_iteration_per_loop(session, total.assign_add(number).op, 4))
        assert session.run(total) == 1 + 2 + 3 + 4
    assert "one-shot iterator" in caplog.text
