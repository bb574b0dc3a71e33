"""A rank that the others wait for is named, wherever it loses its time; equal ranks and short disturbances are not."""

from __future__ import annotations

import contextlib
import io
import os
import time

import numpy as np
import pytest
import tensorflow as tf

from hccl.split.api import set_split_strategy_by_idx
from npu_bridge import collective
from npu_bridge.base.tf_internals.names import HAS_ESTIMATORS
from npu_bridge.collective import groups
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.graph.operators import computed_ops
from npu_bridge.graph.run import run_of, sends_gradients
from npu_bridge.npu_init import FixedLossScaleManager, npu_callbacks_append, npu_keras_optimizer
from npu_bridge.reporting import (
    History,
    HistoryHook,
    ProgressHook,
    ReportCallback,
    StragglerCallback,
    StragglerHook,
)
from npu_bridge.reporting.straggler_hook import latest_comparison
from npu_bridge.session import run_with_hooks
from npu_bridge.stages import Accumulate
from npu_bridge.tailing.reduction_moments import mark_reductions
from tests.goldens.sets import SETS, Training
from tests.goldens.two_layers import in_graph
from tests.rank_pool import on_each_rank
from tests.ranks.test_tailing_bits import train_op_of
from tests.ranks.ways import WAYS, control_flow, open_session
from tests.transfers import is_transfer

tf1 = tf.compat.v1
_RANKS, _SLOW = 3, 1
# A step that counts; what a rank that is slow needs more; both far above what a machine in use adds.
_PAUSE_SECS, _MORE_SECS = 0.01, 0.03
_STALL_SECS, _STALLS = 3.0, (20, 70)  # of another rank, as of a disk: longer than all other steps of a comparison
_STEPS = 53  # 3 to start up, 50 to compare


# The steps in which a rank is slow.
_ALWAYS, _NEVER, _FOR_30, _AT_FIRST = range(1000), range(0), range(10, 40), range(_STEPS)


def _batches(slow, stalls=(), more_secs=_MORE_SECS, pause_secs=_PAUSE_SECS):
    """Makes a dataset in which one rank is slow in some steps, and another one stalls in some."""
    mine, stalling = (collective.current().rank == rank for rank in (_SLOW, 2))

    def batches():
        for step in range(1000):
            time.sleep(_STALL_SECS if stalling and step in stalls else 0.0)
            time.sleep(pause_secs + (more_secs if mine and step in slow else 0.0))
            yield np.full([4, 8], (step % 7 + 1) / 8, np.float32)

    dataset = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec([4, 8], tf.float32))
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # else equal ranks wait for the one that is 1 % slower
    return dataset.with_options(options)


def _step(features, optimizer=None):
    weights = [tf1.get_variable(f"weight_{n}", [8, 8], initializer=tf1.ones_initializer()) for n in range(3)]
    for weight in weights:
        features = tf.tanh(tf.matmul(features, weight))
    optimizer = optimizer or NPUDistributedOptimizer(tf1.train.MomentumOptimizer(0.1, 0.9))
    return optimizer.minimize(tf.reduce_mean(features), tf1.train.get_or_create_global_step())


def _train(train_op, runs, hooks=()):
    """Returns the log of the ranks."""
    said = io.StringIO()
    with tf1.train.MonitoredTrainingSession(hooks=[StragglerHook(said), *hooks]) as session:
        for _ in range(runs):
            session.run(train_op)
    return said.getvalue().splitlines()


@in_graph
def _sleeping(slow, runs, folder, stalls=()):
    features = tf1.data.make_one_shot_iterator(_batches(slow, stalls)).get_next()
    shown = io.StringIO()
    hooks = [ProgressHook(stream=shown, every_n_steps=1000), HistoryHook(f"{folder}/history.jsonl")]
    return _train(_step(features), runs, hooks), shown.getvalue().splitlines()


@pytest.mark.slow("many steps with pauses; one that computes more is fast")
def test_a_rank_that_sleeps_in_its_input_is_named(on_ranks, tmp_path):
    (said, shown), *others = on_ranks(_RANKS, _sleeping, _ALWAYS, _STEPS + 50, str(tmp_path), _STALLS)
    assert others == [([], [])] * 2
    (line,) = said
    assert line.startswith(f"npu_bridge: rank {_SLOW} is slow: its own work takes ")
    assert line.endswith(" of the time for it") and "that of the others" in line
    assert f" | rank {_SLOW} slow, others wait " in shown[-1]
    first, last = History(str(tmp_path / "history.jsonl")).comparisons
    for found in (first, last):
        assert found.slow == [_SLOW]
        assert found.own_ms[_SLOW] > 1.2 * max(found.own_ms[0], found.own_ms[2])
        assert found.waiting[_SLOW] < min(found.waiting[0], found.waiting[2])
    assert (first.step, last.step) == (_STEPS, _STEPS + 50)


@pytest.mark.slow("hundreds of steps with pauses")
def test_equal_ranks_name_nobody_nor_does_a_slow_spell_of_30_steps(on_ranks, tmp_path):
    for slow in (_NEVER, _FOR_30):
        (said, shown), *_ = on_ranks(_RANKS, _sleeping, slow, _STEPS, str(tmp_path / str(slow)))
        assert said == [] and "slow" not in "".join(shown)
        (found,) = History(str(tmp_path / str(slow) / "history.jsonl")).comparisons
        assert found.slow == [] and len(found.own_ms) == _RANKS
    # The mean alone would have named it.
    assert found.own_ms[_SLOW] > 1.2 * max(found.own_ms[0], found.own_ms[2])


@pytest.mark.slow("hundreds of steps with pauses")
def test_a_rank_that_has_recovered_is_told(on_ranks, tmp_path):
    """Within some comparisons: on a machine in use, a rank may lose a tenth of such short steps for a while."""
    (said, _), *_ = on_ranks(_RANKS, _sleeping, _AT_FIRST, _STEPS + 500, str(tmp_path))
    named, *later = said
    assert named.startswith(f"npu_bridge: rank {_SLOW} is slow: ")
    assert any(line.startswith(f"npu_bridge: rank {_SLOW} is no longer slow: its own work takes ") for line in later)
    first, *others = [_SLOW in found.slow for found in History(str(tmp_path / "history.jsonl")).comparisons]
    assert first and not all(others)


@in_graph
def _computing(fragments):
    """A rank with more to compute, in front of gradients that are sent in several fragments."""
    rows = 4000 if collective.current().rank == _SLOW else 4
    wide = tf.fill([rows, 512], tf.random.uniform([]))
    features = tf.reshape(tf.reduce_mean(tf.matmul(wide, tf.ones([512, 512]))), [1, 1]) / 512 + tf.zeros([4, 8])
    set_split_strategy_by_idx(fragments)
    try:
        return _train(_step(features), _STEPS)
    finally:
        groups.groups_of_process().strategies.reset(groups.WORLD)  # the ranks stay up for other tests


def test_a_rank_that_computes_more_is_named(on_ranks):
    first, *others = on_ranks(_RANKS, _computing, [0, 1, 2])
    assert len(first) == 1 and first[0].startswith(f"npu_bridge: rank {_SLOW} is slow: ") and others == [[], []]


@in_graph
def _accumulating():
    """Updates of four batches each; a rank is slow in those batches after which nothing is exchanged."""
    features = tf1.data.make_one_shot_iterator(_batches({step for step in _ALWAYS if step % 4 != 3})).get_next()
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.1), is_distributed=True, stages=[Accumulate(4)])
    train_op, watch = _step(features, optimizer), _Watch()
    said = _train(train_op, 4 * 50, [watch])
    begun = watch.found
    said_later = _train(train_op, 4 * 51, [watch])
    return said, said_later, begun, watch.found


class _Watch(tf.estimator.SessionRunHook):
    """The latest comparison."""

    found = None

    def after_run(self, run_context, run_values):
        self.found = latest_comparison(run_context.session.graph)


@pytest.mark.slow("hundreds of steps with pauses")
def test_gradients_that_are_added_up_are_compared_by_whole_updates(on_ranks):
    (said, said_later, before, found), *_ = on_ranks(_RANKS, _accumulating)
    assert said == [] and before is None, "fifty updates are not complete yet"
    assert len(said_later) == 1 and said_later[0].startswith(f"npu_bridge: rank {_SLOW} is slow: ")
    assert found.slow == [_SLOW] and min(found.own_ms) > 2 * 1000 * _PAUSE_SECS


@pytest.mark.slow("trains every kind of optimizer twice")
@on_each_rank(2)
def test_no_bit_differs_and_the_marks_wait_for_what_they_should():
    """Trains each set of stages with the hook and without."""
    for kind in SETS:
        made, steps = Training(kind), 60 if kind == "plain" else 15  # the former with a comparison
        with made.session() as session:
            made.train(session, 0, steps)
            plain = made.state(session)
        hook = StragglerHook(io.StringIO())
        with made.session() as session:
            run_with_hooks(session, [hook])
            made.train(session, 0, steps)
            watched = made.state(session)
        assert [name for name, value in plain.items() if watched[name].tobytes() != value.tobytes()] == [], kind
        assert _faults(made.graph, made.train_op) == [], kind


def _faults(graph, train_op):
    moments = mark_reductions(graph, run_of(graph, train_op))
    transfers = {op for op in run_of(graph, train_op).ops if sends_gradients(op.name, op.type)}
    before = [op for op in computed_ops([moments.ready]) if is_transfer(op.type)]
    missing = transfers - set(computed_ops([moments.done]))
    local = {op for op in run_of(graph, train_op).ops if op.type in ("Placeholder", "Tanh")}
    own = local - set(computed_ops([moments.ready]))
    return [op.name for group in (before, missing, own) for op in group]


def _estimator(folder, loop):
    """Returns the output of a training on this rank."""

    def model_fn(features, mode):
        return NPUEstimatorSpec(mode, loss=tf.reduce_mean(features), train_op=_step(features))

    config = NPURunConfig(model_dir=folder, save_checkpoints_steps=50, iterations_per_loop=loop)
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        NPUEstimator(model_fn, config=config).train(lambda: _batches(_ALWAYS), max_steps=20 * loop + 55)
    return printed.getvalue().splitlines()


@pytest.mark.slow("many steps with pauses")
@pytest.mark.parametrize("loop", [1, 5])
def test_an_estimator_names_it_and_so_does_its_page(on_ranks, tmp_path, loop):
    lines, other = on_ranks(2, _estimator, str(tmp_path), loop)
    named = f"rank {_SLOW} is slow: its own work takes "
    assert [line[: len(named) + 12] for line in lines if line.startswith("npu_bridge")] == [f"npu_bridge: {named}"]
    assert not [line for line in other if "slow" in line]
    (ending,) = [line for line in lines if line.startswith("from step ")]
    assert f" on, {named}" in ending
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Own work and waiting</h2>" in page and f"<td>{_SLOW}</td>" in page and "the others wait for it" in page
    points = {
        value.tag: value.simple_value
        for path in tmp_path.glob("events*")
        for event in tf1.train.summary_iterator(str(path))
        for value in event.summary.value
    }
    assert points["training/slowest_rank"] == _SLOW and 0.2 < points["training/waiting_for_slowest_rank"] < 1
    assert points["training/slowest_rank_own_ms"] > 1.2 * points["training/other_ranks_own_ms"]


_WAYS = [f"{way}_adam_none".replace(" ", "_") for way in WAYS]


@pytest.mark.slow("other optimizers on three ranks")
@pytest.mark.parametrize(("is_classic", "is_tailing"), [(True, True), (False, False)])
@on_each_rank(2, gives=(True, []))
@in_graph
def test_stock_horovod_and_freed_tails_are_marked_too(is_classic, is_tailing):
    """Returns whether no bit differs with the hook, and what is wrong with its marks."""
    tokens, trouble = tf1.placeholder(tf.int32, [4]), tf1.placeholder(tf.int32, [])
    with control_flow(is_classic):
        train_ops = [train_op_of(case, tokens, trouble, is_tailing)[0] for case in _WAYS]
        start = tf1.global_variables_initializer()
    graph, values, states = tf1.get_default_graph(), tf1.global_variables(), []
    for hooks in ([], [StragglerHook(io.StringIO())]):
        with open_session(is_tailing) as session:
            run_with_hooks(session, hooks)
            session.run(start)
            for step in range(5 * len(_WAYS)):
                train_op = train_ops[step % len(_WAYS)]
                session.run(train_op, {tokens: [step % 6, 1, 2, 3], trouble: 1 if step > 16 else 0})
            states.append([value.tobytes() for value in session.run(values)])
    faults = [_faults(graph, train_op) for train_op in train_ops]
    return states[0] == states[1], [name for found in faults for name in found]


_PAUSE_SECS_IN_FIT = 0.25  # of the slow rank; a step of `fit` on three ranks takes up to 0.05 s on two busy cores
_PAUSE_SECS_OF_EQUALS = 0.1  # a step that is as long on a machine in use, where short ones are not
KERASES = ["tf.keras", *([] if HAS_ESTIMATORS else ["keras"])]


def _fit(name, slow, folder, stages):
    if name == "keras":
        import keras
    else:
        keras = tf.keras
    model = keras.Sequential([keras.layers.Input([8]), keras.layers.Dense(8), keras.layers.Dense(1)])
    optimizer = npu_keras_optimizer(keras.optimizers.SGD(0.01), FixedLossScaleManager(8.0), stages=stages)
    model.compile(optimizer, "mse", **({"jit_compile": False} if name == "keras" else {}))
    pause_secs = _PAUSE_SECS if slow else _PAUSE_SECS_OF_EQUALS
    data = _batches(slow, more_secs=_PAUSE_SECS_IN_FIT, pause_secs=pause_secs).map(lambda batch: (batch, batch[:, :1]))
    callbacks = npu_callbacks_append([ReportCallback(folder)])
    assert [type(each).__name__ for each in callbacks[1:3]] == ["StragglerCallback", "ReportCallback"]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        model.fit(data, steps_per_epoch=_STEPS, epochs=1, verbose=0, callbacks=callbacks)
    return [line for line in said.getvalue().splitlines() if "slow" in line]


@pytest.mark.slow("a pause of one rank is compared with times of three ranks that share two cores")
@pytest.mark.parametrize("name", KERASES)
def test_a_rank_that_sleeps_in_the_input_of_fit_is_named(on_ranks, tmp_path, name):
    said, *others = on_ranks(3, _fit, name, _ALWAYS, str(tmp_path), [Accumulate(2)])
    assert others == [[], []]
    (line,) = said
    assert line.startswith(f"npu_bridge: rank {_SLOW} is slow: its own work takes ") and "of the time for it" in line
    (found,) = History(os.path.join(tmp_path, "history.jsonl")).comparisons
    assert found.slow == [_SLOW] and found.own_ms[_SLOW] > 1.2 * max(found.own_ms[0], found.own_ms[2])
    page = (tmp_path / "report.html").read_text()
    assert "Own work and waiting" in page and "No rank was slow" not in page


@pytest.mark.slow("many steps with pauses; slow ranks are fast")
def test_equal_ranks_name_nobody_in_fit(on_ranks, tmp_path):
    # Two, as three ranks would take turns on two cores, and one of them can come late for a while.
    assert on_ranks(2, _fit, KERASES[-1], _NEVER, str(tmp_path), []) == [[]] * 2
    (found,) = History(os.path.join(tmp_path, "history.jsonl")).comparisons
    assert found.slow == [] and len(found.own_ms) == 2


def test_one_rank_is_compared_with_nobody():
    assert collective.current().size == 1
    assert not any(isinstance(each, StragglerCallback) for each in npu_callbacks_append([]))
