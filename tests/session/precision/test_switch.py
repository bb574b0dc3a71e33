"""The live switch: same session, other executor, nothing else changes."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.options import AccelerateTrainMode
from npu_bridge.session.precision import Policy, attach_precision, list_builds
from npu_bridge.session.precision.switch import Switch
from tests.goldens.two_layers import assert_same_bits
from tests.session.precision.small_models import (
    Dense,
    dtypes_of,
    load,
    precision_of,
    run_with_graph,
    session_of,
    started,
    tell_steps,
    tf1,
    values_of,
)


def accelerated(plan="fast|step|0.5", **keys):
    return precision_of(experimental_accelerate_train_mode=plan, **keys)


@pytest.mark.parametrize(
    "plan, keys, low_dtype",
    [("fast|step|0.5", {"precision_mode": "allow_fp32_to_fp16"}, "float16"), ("fast1|step|0.5", {}, "bfloat16")],
)
def test_dtypes_before_and_after(plan, keys, low_dtype, bfloat16):
    model, seen = Dense(), []
    with started(model, accelerated(plan, **keys)) as session:
        for step in range(6):
            tell_steps(step, 6)
            seen.append(dtypes_of(run_with_graph(session, [model.train_op, model.loss], model.batch(step))[1]))
        trained = [build.policy for build in list_builds(session) if build.is_training]
    assert seen == [{low_dtype: 5}] * 3 + [{"float32": 5}] * 3
    is_imitated = low_dtype == "bfloat16" and bfloat16 == "imitated"
    assert trained == [Policy("mixed", low_dtype, is_imitated), Policy("nothing", None)]  # exactly one more executor
    assert str(trained[0]) == f"mixed {low_dtype}{', imitated' if is_imitated else ''}"


@pytest.mark.parametrize("low_dtype", ["float16", "bfloat16"])
def test_after_the_switch_a_step_is_that_of_a_float32_session(low_dtype, bfloat16):
    model, other = Dense(), Dense()
    plan = "fast|step|0.5" if low_dtype == "float16" else "fast1|step|0.5"
    with started(model, accelerated(plan)) as session, started(other) as stock:
        for step in range(8):
            tell_steps(step, 10)
            before = values_of(session, model.variables)
            results, nodes = run_with_graph(session, [model.train_op, model.loss], model.batch(step))
            load(stock, other.variables, before)
            stock_results, stock_nodes = run_with_graph(stock, [other.train_op, other.loss], other.batch(step))
            after, expected = values_of(session, model.variables), values_of(stock, other.variables)
            if step >= 5:
                assert_same_bits(after, expected)
                assert results[1] == stock_results[1]
                ours = [node for node in nodes if "npu_bridge" not in node.name]
                assert sorted(node.op for node in ours) == sorted(node.op for node in stock_nodes)
                if bfloat16 == "kernels":  # constants that TensorFlow folds have names of where they are read
                    assert sorted(node.name for node in ours) == sorted(node.name for node in stock_nodes)
            else:
                assert any(after[name].tobytes() != expected[name].tobytes() for name in expected)


def test_iterator_random_operators_and_step_go_on():
    def build():
        with tf.Graph().as_default() as graph:
            tf1.set_random_seed(3)
            kernel = tf1.get_variable("kernel", [4, 4], initializer=tf1.ones_initializer())
            number = tf1.data.make_one_shot_iterator(tf.data.Dataset.range(100)).get_next()
            noise = tf.random.uniform([], seed=5)
            stateless_free = tf.random.shuffle(tf.range(10), seed=6)
            loss = tf.reduce_mean(tf.matmul(kernel, kernel)) * (tf.cast(number, tf.float32) + noise)
            step = tf1.train.get_or_create_global_step()
            train_op = tf1.train.GradientDescentOptimizer(1e-4).minimize(loss, global_step=step)
            return graph, [train_op, number, noise, stateless_free], step, tf1.global_variables_initializer()

    def run(precision):
        graph, fetches, step, init = build()
        seen = []
        with session_of(graph, precision) as session:
            session.run(init)
            for now in range(8):
                tell_steps(now, 8)
                seen.append([np.asarray(value) for value in session.run(fetches)[1:]])
            assert session.run(step) == 8
        return seen

    for expected, got in zip(run(None), run(accelerated("fast|step|0.5"))):
        for left, right in zip(expected, got):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("steps_per_run, switch", [(1, 5), (2, 6), (4, 8)])
def test_several_steps_in_a_run(steps_per_run, switch, caplog):
    model, seen = Dense(), {}
    precision = accelerated("fast|step|0.5", iterations_per_loop=steps_per_run)
    with started(model, precision) as session, caplog.at_level(logging.INFO, "npu_bridge"):
        for step in range(0, 12, steps_per_run):
            tell_steps(step, 11)
            (seen[step],) = dtypes_of(run_with_graph(session, model.train_op, model.batch(0))[1])
    assert min(step for step, dtype in seen.items() if dtype == "float32") == switch
    warned = [line for line in caplog.messages if line.startswith("accelerate_train_mode")]
    assert len(warned) == (0 if switch == 5 else 1)
    assert f"steps 0-{switch - 1} in float16, {switch}-10 in float32" in caplog.text
    assert f"float32 from here on (step {switch})" in caplog.text


def test_only_runs_that_train_are_accelerated():
    model = Dense()
    tell_steps(0, 10)
    with started(model, accelerated()) as session:
        for fetches in (model.train_op, [model.train_op, model.logits], model.logits, model.loss):
            run_with_graph(session, fetches, model.batch(0))
        evaluation = run_with_graph(session, model.loss, model.batch(0))[1]
        with started(model) as stock:
            stock_nodes = run_with_graph(stock, model.loss, model.batch(0))[1]
    assert dtypes_of(evaluation) == {"float32": 2}
    assert sorted((node.op, node.name) for node in evaluation) == sorted((node.op, node.name) for node in stock_nodes)


def test_hooks_that_fetch_more_now_and_then_follow():
    model, seen = Dense(), []
    with started(model, accelerated()) as session:
        for step in range(8):
            tell_steps(step, 8)
            fetches = [model.train_op, model.loss] if step % 2 else [model.train_op]
            seen.append(dtypes_of(run_with_graph(session, fetches, model.batch(0))[1]))
    assert seen == [{"float16": 5}] * 4 + [{"float32": 5}] * 4


@pytest.mark.parametrize(
    "plan, variables, blamed",
    [
        ("fast|step", {"TOTAL_STEP": "10"}, "STEP_NOW"),
        ("fast|loss", {"LOSS_NOW": "1"}, "TARGET_LOSS"),
    ],
)
def test_missing_progress_is_an_error_at_the_first_training_run(plan, variables, blamed):
    model = Dense()
    for name, value in variables.items():
        environment.write_variable(name, value)
    with started(model, accelerated(plan)) as session:
        session.run(model.loss, model.batch(0))
        for _ in range(2):
            with pytest.raises(ValueError, match=blamed):
                session.run(model.train_op, model.batch(0))


def test_progress_that_becomes_unusable_is_a_warning(caplog):
    model, seen = Dense(), []
    with started(model, accelerated()) as session:
        for step in ("0", "5.0", "", "5", "0", ""):
            tell_steps(step, 10)
            seen.append(dtypes_of(run_with_graph(session, model.train_op, model.batch(0))[1]))
    assert seen == [{"float16": 5}] * 3 + [{"float32": 5}] * 3
    assert caplog.text.count("continues in float16") == 1


def test_each_training_begins_in_low_precision_until_one_has_switched():
    switch, seen = Switch(AccelerateTrainMode("float16", "step", 0.5)), []
    for training, step in (("a", 0), ("b", 9), ("a", 9), ("b", 0), ("c", "")):
        tell_steps(step, 10)
        seen.append(switch.must_use_original_precision(frozenset(training)))
    assert seen == [False, False, True, True, True]


def test_attaching_again_changes_nothing():
    model, precision = Dense(), accelerated()
    with session_of(model.graph, precision) as session:
        kind = type(session)
        attach_precision(session, precision)
        assert type(session) is kind
        assert isinstance(session, tf1.Session)


def test_checkpoints_hold_no_trace_and_load_on_either_side(tmp_path):
    """A checkpoint of the low part starts a float32 training, and a float32 checkpoint the low part."""
    model = Dense()
    with model.graph.as_default():
        saver = tf1.train.Saver()
    with started(model, accelerated()) as session:
        for step in range(4):
            tell_steps(step, 4)
            if step in (1, 3):
                saver.save(session, str(tmp_path / f"at_{step}"), write_meta_graph=False)
            session.run(model.train_op, model.batch(step))
    for step in (1, 3):
        for precision in (accelerated(), None):
            with session_of(model.graph, precision) as session:
                saver.restore(session, str(tmp_path / f"at_{step}"))
                assert session.run(model.global_step) == step
                tell_steps(step, 4)
                nodes = run_with_graph(session, model.train_op, model.batch(step))[1]
                assert dtypes_of(nodes) == {"float16" if precision else "float32": 5}
                if precision:
                    tell_steps(3, 4)
                    nodes = run_with_graph(session, model.train_op, model.batch(step))[1]
                    assert dtypes_of(nodes) == {"float32": 5}
