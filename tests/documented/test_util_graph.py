"""The effects of `util` on graphs and sessions, its store and checks; loops are in test_iterations_per_loop.py."""

from __future__ import annotations

import logging

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu import util
from npu_bridge.estimator.npu.npu_config import ExperimentalConfig
from tests.documented.signatures import signature_of
from tests.refusing import refuses

tf1 = tf.compat.v1
SIGNATURES = {
    "IterationPerLoop": "()",
    "check_aoe_mode": "(aoe_mode)",
    "check_bool_type": "(value, name)",
    "check_nonnegative_integer": "(value, name)",
    "check_not_none": "(value, name)",
    "check_path": "(path)",
    "check_positive_integer": "(value, name)",
    "check_profiling_options": "(profiling_options=())",
    "convert_bool_to_int": "(value)",
    "create_or_get_var": "(var_name)",
    "format_string": "(value, name)",
    "get_ranksize": "()",
    "get_value": "(key, def_value=None)",
    "global_dict_init": "()",
    "keep_tensors_dtypes": "(graph, input_tensors)",
    "npu_compile": "(sess, *fetches)",
    "set_graph_exec_config": (
        "(fetch, dynamic_input=False, dynamic_graph_execute_mode='dynamic_execute', dynamic_inputs_shape_range=None, "
        "is_train_graph=False, experimental_config=None)"
    ),
    "set_iteration_per_loop": "(sess, train_op, iterations_per_loop=1)",
    "set_op_input_tensor_multi_dims": "(tensor, input_shape, input_dims)",
    "set_op_tensor_max_range": "(tensor, max_shape)",
    "set_op_tensor_max_size": "(tensor, max_size)",
    "set_value": "(key, value)",
    "variable_initializer_in_host": "(var_list)",
}


def test_names_and_signatures():
    assert {name: signature_of(getattr(util, name)) for name in util.__all__} == SIGNATURES


@pytest.fixture
def marks(graph, caplog):
    """The log in which calls say once in a process that they have no effect."""
    caplog.set_level(logging.INFO, "npu_bridge")
    return caplog


def test_variables_are_initialised_by_a_named_op(graph):
    ones = [tf1.get_variable(name, initializer=1.0) for name in ("first", "second")]
    tf1.get_variable("third", initializer=1.0)
    op = util.variable_initializer_in_host(ones)
    assert (op.name, type(op)) == ("var_in_host", tf.Operation)
    with tf1.Session() as session:
        session.run(op)
        assert session.run(ones) == [1.0, 1.0]
        assert session.run(tf1.report_uninitialized_variables()).tolist() == [b"third"]


def test_compiling_is_running_once(graph):
    count = tf1.get_variable("count", initializer=0)
    step = count.assign_add(1)
    with tf1.Session() as session:
        util.npu_compile(session, count.initializer)
        util.npu_compile(session, step.op, "count:0")
        assert session.run(count) == 1


def test_what_is_to_be_fetched_is_given_back(marks):
    tensor = tf.constant(1.0, name="tensor")
    before = tf1.get_default_graph().as_graph_def()
    for fetch in (tensor, tensor.op, [tensor, (tensor.op, [tensor])], ()):
        given = util.set_graph_exec_config(
            fetch, True, "lazy_recompile", "getnext:[1,2]", True, ExperimentalConfig(logical_device_id="0")
        )
        assert given is fetch
    assert util.set_graph_exec_config("tensor:0") is tensor
    assert tf1.get_default_graph().as_graph_def() == before
    assert marks.messages == ["set_graph_exec_config has no effect on stock TensorFlow."], "once"


@pytest.mark.parametrize("fetch", ["tensor", "other:0", None, 3, [None], {"a": 1}])
def test_what_cannot_be_fetched(marks, fetch):
    tf.constant(1.0, name="tensor")
    with pytest.raises(ValueError, match=r"set_graph_exec_config: fetch .*Expected .* got "):
        util.set_graph_exec_config(fetch)
    assert marks.messages == []


@pytest.mark.parametrize(
    "arguments",
    [{"dynamic_graph_execute_mode": "other"}, {"dynamic_graph_execute_mode": None}, {"experimental_config": {}}],
)
def test_illegal_ways_to_run(graph, arguments):
    with pytest.raises(ValueError, match=r"set_graph_exec_config: .*Expected .* got "):
        util.set_graph_exec_config(tf.constant(1.0), **arguments)


@pytest.mark.parametrize(
    "mark, arguments",
    [
        (util.set_op_input_tensor_multi_dims, ("0: -1,3; 1: 4,-1", "2,4;5,7")),
        (util.set_op_tensor_max_range, ([8, 3],)),
        (util.set_op_tensor_max_size, (1024,)),
    ],
)
def test_limits_of_shapes_have_no_effect(marks, mark, arguments):
    tensor = tf.constant([1.0])
    before = tf1.get_default_graph().as_graph_def()
    for target in (tensor, tensor.op, tensor):
        assert mark(target, *arguments) is None
    assert tf1.get_default_graph().as_graph_def() == before
    assert marks.messages == [f"{mark.__name__} has no effect on stock TensorFlow."]
    with pytest.raises(ValueError, match=rf"{mark.__name__}: tensor .*Expected .* got 'x'"):
        mark("x", *arguments)


def test_shapes_are_text(graph):
    for arguments in ((1, "2"), ("1", [2])):
        with pytest.raises(TypeError, match="set_op_input_tensor_multi_dims: input_"):
            util.set_op_input_tensor_multi_dims(tf.constant(1.0), *arguments)


def test_a_store_for_the_process():
    util.global_dict_init()
    assert util.get_value("key") is None and util.get_value("key", 5) == 5
    util.set_value("key", [1])
    assert util.get_value("key", 5) == [1]
    util.global_dict_init()
    assert util.get_value("key") is None


@refuses(
    (util.check_not_none, None, ValueError),
    (util.check_positive_integer, 0, ValueError),
    (util.check_positive_integer, 1.0, TypeError),
    (util.check_positive_integer, True, TypeError),
    (util.check_nonnegative_integer, -1, ValueError),
    (util.check_nonnegative_integer, "0", TypeError),
    (util.check_bool_type, 1, TypeError),
    (util.format_string, 5, TypeError),
    says=["steps"],
)
def test_illegal_value_is_named(check, value):
    check(value, "steps")


@pytest.mark.parametrize(
    "check, value",
    [
        (util.check_not_none, 0),
        (util.check_positive_integer, 1),
        (util.check_nonnegative_integer, 0),
        (util.check_bool_type, False),
    ],
)
def test_legal_value_passes(check, value):
    assert check(value, "steps") is None


def test_conversions():
    assert [util.convert_bool_to_int(value) for value in (True, False, 1, None)] == [1, 0, -1, -1]
    assert (util.format_string(None, "x"), util.format_string("a", "x")) == ("", "a")


def test_profiling_options_are_joined():
    assert util.check_profiling_options(["task_time", "op_trace"]) == "task_time:op_trace"
    for illegal in ((), ["other"]):
        with pytest.raises(ValueError, match="training_trace"):
            util.check_profiling_options(illegal)


def test_path_must_be_a_usable_directory(tmp_path):
    assert util.check_path(str(tmp_path)) == str(tmp_path.resolve())
    file = tmp_path / "file"
    file.touch()
    for illegal in (str(file), str(tmp_path / "none")):
        with pytest.raises(ValueError, match="directory"):
            util.check_path(illegal)


def test_aoe_mode():
    for legal in ("1", "2", "4"):
        util.check_aoe_mode(legal)
    for illegal in ("3", "", None, 1):
        with pytest.raises(ValueError, match="aoe_mode"):
            util.check_aoe_mode(illegal)


def test_rank_size_is_text(monkeypatch):
    monkeypatch.delenv("CM_WORKER_SIZE", raising=False)
    monkeypatch.setenv("RANK_SIZE", "8")
    assert util.get_ranksize() == "8"
    monkeypatch.delenv("RANK_SIZE")
    assert util.get_ranksize() == "1"
