"""Operator types moved by calls: which kernels really run, and what is refused."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf

from npu_bridge.session.precision import (
    OpLists,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from npu_bridge.session.precision.mixlist import read_mixlist
from npu_bridge.session.precision.op_lists import registered_lists
from npu_bridge.session.precision.operator_dtypes import read_operator_dtypes
from npu_bridge.session.precision.rewriter import IMITATION
from tests.session.precision.small_models import (
    Dense,
    dtypes_of,
    kernels_of,
    nodes_of_step,
    precision_of,
    run_with_graph,
    session_of,
    started,
    tell_steps,
)


def executed(change_graph=lambda: None, model=None, **keys):
    """The nodes of one training step of a graph with changed lists."""
    model = model or Dense()
    with model.graph.as_default():
        change_graph()
    return nodes_of_step(precision_of(**keys), model)


def test_half_and_float_move_kernels(monkeypatch):
    def change():
        register_half_function("Square")
        register_float_function("Relu")

    for mode, relu in (("mixed_float16", {"float32": 2}), ("fp16", {"float32": 1, "float16": 1})):
        nodes = executed(change, precision_mode_v2=mode)
        assert dtypes_of(nodes, "Square") == {"float16": 1}, mode
        assert kernels_of(nodes, "Relu") == relu, mode  # its gradient is a type of its own
        assert dtypes_of(nodes) == {"float16": 5}, mode
    with monkeypatch.context() as patch:
        patch.delenv(IMITATION)
        cube = executed(change, precision_mode_v2="cube_fp16in_fp32out")
    assert dtypes_of(cube, "Square") == {"float16": 1}
    assert dtypes_of(executed(precision_mode_v2="mixed_float16"), "Square") == {"float32": 1}


def test_promote_follows_its_inputs():
    """Exp is lowered between products, and not behind one that stays."""

    def chain(change):
        with tf.Graph().as_default() as graph:
            change()
            x = tf.compat.v1.get_variable("x", [8, 8], initializer=tf.compat.v1.ones_initializer())
            activation = tf.exp(tf.matmul(x, x))
            total = tf.reduce_sum(tf.matmul(activation, x))
            init = tf.compat.v1.global_variables_initializer()
        with session_of(graph, precision_of(precision_mode_v2="mixed_float16")) as session:
            session.run(init)
            return dtypes_of(run_with_graph(session, total)[1], "Exp")

    assert chain(lambda: None) == {"float32": 1}  # TensorFlow denies it
    assert chain(lambda: register_promote_function("Exp")) == {"float16": 1}

    def behind_a_kept_product():
        register_promote_function("Exp")
        register_float_function("MatMul")

    assert chain(behind_a_kept_product) == {"float32": 1}


def test_lists_of_one_graph_leave_others_alone():
    changed, other = Dense(), Dense()
    register_float_function("MatMul", changed.graph)
    assert dtypes_of(executed(model=changed, precision_mode_v2="mixed_float16")) == {"float32": 5}
    assert dtypes_of(executed(model=other, precision_mode_v2="mixed_float16")) == {"float16": 5}


def test_nothing_is_lowered_without_a_mode_or_after_the_switch():
    assert dtypes_of(executed(lambda: register_half_function("Square")), "Square") == {"float32": 1}
    model, seen = Dense(), []
    register_half_function("Square", model.graph)
    with started(model, precision_of(experimental_accelerate_train_mode="fast|step|0.5")) as session:
        for step in range(4):
            tell_steps(step, 4)
            seen.append(dtypes_of(run_with_graph(session, model.train_op, model.batch(0))[1], "Square"))
    assert seen == [{"float16": 1}] * 2 + [{"float32": 1}] * 2


def test_lists_of_the_graph_win_over_the_file(tmp_path):
    path = tmp_path / "mixlist.json"
    path.write_text(json.dumps({"black-list": {"to-add": ["MatMul"]}}))
    keys = {"precision_mode_v2": "mixed_float16", "modify_mixlist": str(path)}
    assert dtypes_of(executed(**keys)) == {"float32": 5}
    assert dtypes_of(executed(lambda: register_half_function("MatMul"), **keys)) == {"float16": 5}


def test_the_last_word_counts(graph):
    register_half_function("Softmax")
    register_promote_function("Softmax")
    register_float_function("Softmax")
    register_float_function("Softmax")
    assert registered_lists(graph) == OpLists(floats=frozenset({"Softmax"}))
    OpLists().with_half("Softmax", "Exp").register()
    assert registered_lists(graph) == OpLists(half=frozenset({"Softmax", "Exp"}))


def test_files_say_the_same(tmp_path):
    lists = OpLists().with_half("Softmax").with_float("MatMul", "Exp").with_promote("AddV2")
    lists.write_mixlist(str(tmp_path / "mixlist"))
    assert read_mixlist(str(tmp_path / "mixlist")) == lists.as_mixlist()
    lists.write_operator_dtypes(str(tmp_path / "dtypes"), "float16")
    dtypes = read_operator_dtypes(str(tmp_path / "dtypes"))
    assert dtypes.by_type == {"Exp": "float32", "MatMul": "float32", "Softmax": "float16"}


@pytest.mark.parametrize("register", [register_half_function, register_float_function, register_promote_function])
@pytest.mark.parametrize(
    "op_type, kind, blamed",
    [
        ("Softmaxx", ValueError, "Did you mean 'Softmax'"),
        ("tf.nn.softmax", ValueError, "no such operator type"),
        ("VarHandleOp", ValueError, "no floating dtype"),
        ("StringJoin", ValueError, "no floating dtype"),
        (tf.nn.softmax, TypeError, "not a text"),
    ],
)
def test_what_is_no_type_to_lower(register, op_type, kind, blamed, graph):
    with pytest.raises(kind, match=blamed) as caught:
        register(op_type)
    assert register.__name__ in str(caught.value)
    assert registered_lists(graph) == OpLists()
