"""What copies of steps do without, and what must stay as it is."""

from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge.gradients.graph_mode import classic_control_flow
from npu_bridge.rewrite import put_in_loop
from npu_bridge.rewrite.loop_nodes import ops_inside
from npu_bridge.rewrite.loop_savings import LoopSavings
from tests.rewrite.looping import dense, loss_scaled, train_op_of, values_one_by_one_and_in
from tests.training import OPTIMIZERS, assert_same_bits

tf1 = tf.compat.v1
pytestmark = pytest.mark.filterwarnings("ignore:`tf.layers")


def variable(name, value=0.0, use_resource=True):
    return tf1.get_variable(name, initializer=value, use_resource=use_resource)


def savings_of(step):
    return LoopSavings(ops_inside([step], frozenset()), frozenset())


def copies_that_run(loop):
    """Operators that the end of a loop waits for."""
    return ops_inside([loop.op], frozenset())


def assert_same_bits_in_a_loop(step, steps=7):
    one_by_one, looped = values_one_by_one_and_in(put_in_loop(step.graph, [step]), step, steps)
    assert_same_bits(looped, one_by_one)
    return looped


def test_an_update_under_a_condition_has_one_switch_for_all_it_reads(graph):
    tf1.get_variable_scope().set_use_resource(True)
    train_op = train_op_of(dense, loss_scaled(OPTIMIZERS["adam"]()))
    loop = put_in_loop(graph, [train_op])
    switches = [op for op in ops_inside([train_op], frozenset()) if op.type == "Switch"]
    copied = [op for op in copies_that_run(loop) if op.type == "Switch"]
    assert len(switches) > 10
    # The end of the loop, the side that is taken, and the two powers of the rates that all updates read.
    assert len(copied) == 4


def test_both_sides_of_a_condition_do_what_they_did(graph):
    count, odd, even = variable("count"), variable("odd"), variable("even")
    number = count.assign_add(1.0)
    with classic_control_flow():
        chosen = tf.cond(
            number % 2 > 0,
            lambda: odd.assign_add(2.0 * even.assign_add(number) + number),
            lambda: even.assign_sub(odd.assign_add(1.0)),
        )
    step = tf.group(chosen)
    assert savings_of(step).inputs
    assert assert_same_bits_in_a_loop(step)["count:0"] == 7


def test_conditions_within_conditions(graph):
    count, total = variable("count"), variable("total")
    number = count.assign_add(1.0)
    with classic_control_flow():

        def inner():
            return tf.cond(number > 4, lambda: total.assign_add(count * 8), lambda: total.assign_sub(number))

        step = tf.group(tf.cond(number % 2 > 0, inner, lambda: total.assign_add(number + count)))
    assert_same_bits_in_a_loop(step)


def test_a_reference_variable_is_switched_with_its_value_of_the_moment(graph):
    number, seen = variable("number", use_resource=False), variable("seen")
    switched = tf.raw_ops.Switch(data=number._ref(), pred=tf.convert_to_tensor(seen) >= 0)
    with tf.control_dependencies([tf.identity(switched.output_true)]):
        changed = number.assign_add(1.0)
    with tf.control_dependencies([changed]):
        step = seen.assign_add(switched.output_true)
    assert not savings_of(step.op).inputs


def test_a_variable_is_read_once_before_it_changes(graph):
    rate, total = variable("rate", 2.0), variable("total")
    sums = [total.assign_add(tf.convert_to_tensor(rate)) for _ in range(2)]
    with tf.control_dependencies(sums):
        changed = rate.assign(tf.convert_to_tensor(rate) * 1.5)
    with tf.control_dependencies([changed]):
        step = tf.group(total.assign_add(tf.convert_to_tensor(rate)))
    assert len(savings_of(step).same_values) == 1, (
        "the one before the change waits for the sums, the last one for the change"
    )
    assert_same_bits_in_a_loop(step)


def test_what_is_added_up_keeps_its_names(graph):
    """TensorFlow adds up all of a sum at once, in the order of names."""
    total, scaled = variable("total", [0.0, 0.0]), variable("scaled", [0.0, 0.0])
    weights = [variable(name, value) for name, value in (("small", [1.0, 2.0]), ("large", [3e7, -4e7]))]
    first, second = (weight.read_value() for weight in weights)
    changed = scaled.assign_add(second)
    addends = [weights[1].read_value(), first, first * 3.1, -second, second * 0.7]
    with classic_control_flow():
        chosen = tf.cond(first[0] > 0, lambda: total.assign(sum(addends[1:], addends[0])), lambda: total.assign(first))
    step = tf.group(changed, chosen)
    assert not savings_of(step).same_values
    assert_same_bits_in_a_loop(step)


def test_readings_that_a_change_does_not_wait_for_stay(graph):
    rate, total = variable("rate", 2.0), variable("total")
    early = [total.assign_add(tf.convert_to_tensor(rate)) for _ in range(2)]
    step = tf.group(*early, rate.assign(3.0))  # in no order
    assert not savings_of(step).same_values


def test_readings_of_the_same_variable_under_two_handles(graph):
    """Two handles of one shared name are one variable."""
    handles = [
        tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="one", name=name) for name in ("first", "second")
    ]
    read = [tf.raw_ops.ReadVariableOp(resource=handles[0], dtype=tf.float32) for _ in range(2)]
    step = tf.group(tf.raw_ops.AssignAddVariableOp(resource=handles[1], value=1.0), *read)
    assert not savings_of(step).same_values


def test_a_value_that_is_given_is_not_replaced(graph):
    rate, total = variable("rate", 2.0), variable("total")
    read = [rate.read_value() for _ in range(2)]
    step = total.assign_add(read[0] + 10 * read[1])
    fed = read[1].op.inputs[0].name
    loop = put_in_loop(graph, [step.op], [fed])
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        session.run(loop.op, {loop.count: 3, fed: 7.0})
        assert session.run(total) == 3 * (2 + 70)


def test_a_choice_without_broadcasting_takes_the_older_operator(graph):
    number = variable("number")
    wide = tf.where(number > 1, tf.zeros([2]), [1.0, 2.0])
    step = tf.group(number.assign_add(tf.where(number > 2, -1.0, 1.0) + tf.reduce_sum(wide)))
    assert sorted(savings_of(step).types.values()) == ["Select"]
    assert_same_bits_in_a_loop(step)
