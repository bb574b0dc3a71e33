from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu import npu_scope, util
from npu_bridge.estimator.npu.npu_config import NpuExecutePlacement
from tests.refusing import refuses

SCOPES = {
    "_keep_dtype": (npu_scope.keep_dtype_scope, (), 1),
    "_without_npu_compile": (npu_scope.without_npu_compile_scope, (), True),
    "_variable_placement": (npu_scope.npu_variable_scope, (NpuExecutePlacement.HOST,), b"host"),
    "_stage_level": (npu_scope.npu_stage_scope, (2,), 2),
    "_output_memory_type": (npu_scope.npu_mem_type_scope, (), 1),
    "_buffer_pool_size": (npu_scope.npu_weight_prefetch_scope, (), 536870912),
    "_specified_engine_name": (npu_scope.op_specified_engine_scope, ("engine", "library"), b"engine"),
    "_qos_service_label": (npu_scope.npu_qos_label_scope, (3,), 3),
    "_subgraph_multi_dims_index": (npu_scope.subgraph_multi_dims_scope, (1,), 1),
    "_optimizer": (npu_scope.npu_optimizer_scope, (), True),
    "_disable_autofuse_scope": (npu_scope.disable_autofuse, (), True),
    "_op_vectorcore_num": (npu_scope.limit_core_num_scope, ("0", "8"), b"8"),
}


@pytest.mark.parametrize("mark", SCOPES)
def test_operators_inside_are_marked(mark, graph):
    scope, arguments, value = SCOPES[mark]
    before = tf.constant(1.0)
    with scope(*arguments):
        inside = tf.constant(1.0) + before
    after = tf.constant(1.0)
    assert inside.op.get_attr(mark) == value
    for tensor in (before, after):
        with pytest.raises(ValueError):
            tensor.op.get_attr(mark)
    with tf.compat.v1.Session() as session:
        assert session.run(inside) == 2.0


def test_scopes_do_nothing_eagerly():
    for scope, arguments, _ in SCOPES.values():
        with scope(*arguments):
            assert float(tf.constant(1.0) + 1.0) == 2.0


@pytest.mark.parametrize(
    "scope, name",
    [
        (npu_scope.npu_recompute_scope(), "NpuRecompute/"),
        (npu_scope.npu_graph_slice_scope(4), "SliceNum-4-NpuGraphSlicing4/"),
    ],
)
def test_scopes_that_are_names(scope, name, graph):
    with scope:
        variable = tf.compat.v1.get_variable("weight", [1])
        assert tf.constant(1.0).name.startswith(name)
    assert variable.name == "weight:0"


@refuses(
    (lambda: npu_scope.npu_variable_scope("host"), ValueError),
    (lambda: npu_scope.npu_stage_scope("1"), TypeError),
    (lambda: npu_scope.npu_graph_slice_scope("4"), TypeError),
    (lambda: npu_scope.npu_graph_slice_scope(0), ValueError),
    (lambda: npu_scope.limit_core_num_scope(), ValueError),
    (lambda: npu_scope.limit_core_num_scope("0", 8), ValueError),
    says=["Expected ", "got "],
)
def test_illegal_arguments(make, graph):
    with make():
        pass


def test_keep_tensors_dtypes(graph):
    tensor = tf.constant(1.0, name="kept")
    util.keep_tensors_dtypes(graph, ("kept:0",))
    assert tensor.op.get_attr("_keep_dtype") == 1
    with pytest.raises(ValueError, match="graph"):
        util.keep_tensors_dtypes(None, ["kept:0"])
    with pytest.raises(ValueError, match="list"):
        util.keep_tensors_dtypes(graph, "kept:0")
    with pytest.raises(KeyError):
        util.keep_tensors_dtypes(graph, ["other:0"])
