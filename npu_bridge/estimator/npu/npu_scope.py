"""Provides scopes that mark the operators made inside them.

`keep_dtype_scope` has an effect: its operators keep their dtype under every precision mode. The marks of the other
scopes are for a device that this library does not drive; their arguments are checked and the marks recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import tensorflow as tf

from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import message, shown
from npu_bridge.base.tf_internals.graphs import set_attributes_of_new_operators
from npu_bridge.estimator.npu.npu_config import NpuExecutePlacement
from npu_bridge.session.precision import KEEP_DTYPE

__all__ = [
    "disable_autofuse",
    "keep_dtype_scope",
    "limit_core_num_scope",
    "npu_graph_slice_scope",
    "npu_mem_type_scope",
    "npu_optimizer_scope",
    "npu_qos_label_scope",
    "npu_recompute_scope",
    "npu_stage_scope",
    "npu_variable_scope",
    "npu_weight_prefetch_scope",
    "op_specified_engine_scope",
    "subgraph_multi_dims_scope",
    "without_npu_compile_scope",
]


def keep_dtype_scope() -> AbstractContextManager[None]:
    """Makes new operators inside the context keep their dtype under every precision mode.

    Operators of gradients are not included: the optimizer makes them later, and they follow the precision mode. Inside
    loops and conditions that TensorFlow stores as functions, this scope has no effect.

    Graph: operators get the attribute `_keep_dtype`. In eager execution the context does nothing.
    """
    return _mark_new_operators({KEEP_DTYPE: 1})


def without_npu_compile_scope() -> AbstractContextManager[None]:
    """Marks operators that TensorFlow runs instead of the device; here TensorFlow runs all operators anyway."""
    return _mark_new_operators({"_without_npu_compile": True})


def npu_variable_scope(placement: NpuExecutePlacement = NpuExecutePlacement.ALL) -> AbstractContextManager[None]:
    """Writes `placement` as an attribute on the variables that are created in the scope.

    Raises:
      ValueError: `placement` is not an NpuExecutePlacement.
    """
    if not isinstance(placement, NpuExecutePlacement):
        problem, fix = "placement is unknown", f"Use a member: {', '.join(NpuExecutePlacement.__members__)}."
        expected = "a member of NpuExecutePlacement"
        raise ValueError(message("npu_variable_scope", problem, expected, shown(placement), fix))
    return _mark_new_operators({"_variable_placement": placement.value})


def npu_stage_scope(stage: int) -> AbstractContextManager[None]:
    """Marks operators with a pipeline stage; raises TypeError unless `stage` is an int."""
    return _mark_new_operators({"_stage_level": _check_int("npu_stage_scope", "stage", stage)})


def npu_mem_type_scope() -> AbstractContextManager[None]:
    """Marks operators whose outputs are in memory of type 1 of the device."""
    return _mark_new_operators({"_output_memory_type": 1})


def npu_weight_prefetch_scope(
    buffer_pool_id: int = 0, buffer_pool_size: int = 536870912
) -> AbstractContextManager[None]:
    """Marks operators whose weights are prefetched; raises TypeError unless both arguments are ints."""
    marks = {
        "_buffer_pool_id": _check_int("npu_weight_prefetch_scope", "buffer_pool_id", buffer_pool_id),
        "_buffer_pool_size": _check_int("npu_weight_prefetch_scope", "buffer_pool_size", buffer_pool_size),
    }
    return _mark_new_operators(marks)


def op_specified_engine_scope(engine_name: str, kernel_lib_name: str) -> AbstractContextManager[None]:
    """Marks operators with the names of an engine and a kernel library."""
    marks = {"_specified_engine_name": str(engine_name), "_specified_kernel_lib_name": str(kernel_lib_name)}
    return _mark_new_operators(marks)


def npu_qos_label_scope(label: int) -> AbstractContextManager[None]:
    """Marks operators with a quality-of-service label; raises TypeError unless `label` is an int."""
    return _mark_new_operators({"_qos_service_label": _check_int("npu_qos_label_scope", "label", label)})


def subgraph_multi_dims_scope(index: int) -> AbstractContextManager[None]:
    """Marks operators with the index of a subgraph; raises TypeError unless `index` is an int."""
    return _mark_new_operators({"_subgraph_multi_dims_index": _check_int("subgraph_multi_dims_scope", "index", index)})


def npu_optimizer_scope() -> AbstractContextManager[None]:
    """Marks operators of an optimizer."""
    return _mark_new_operators({"_optimizer": True})


@contextmanager
def npu_recompute_scope() -> Iterator[None]:
    """Puts new operators under the name scope `NpuRecompute`; names of variables do not change."""
    with tf.name_scope("NpuRecompute"):
        yield


@contextmanager
def npu_graph_slice_scope(slice_num: int | None = None) -> Iterator[None]:
    """Puts new operators under a name scope that contains the number of slices.

    Raises:
      TypeError: `slice_num` is neither an int nor None.
      ValueError: `slice_num` is below 1.
    """
    if slice_num is not None:
        check_count("npu_graph_slice_scope", "slice_num", slice_num, "Leave it out.")
    with tf.name_scope(f"SliceNum-{slice_num}-NpuGraphSlicing{slice_num}"):
        yield


def disable_autofuse() -> AbstractContextManager[None]:
    """Marks operators that must not be fused."""
    return _mark_new_operators({"_disable_autofuse_scope": True})


def limit_core_num_scope(op_aicore_num: str = "0", op_vectorore_num: str = "0") -> AbstractContextManager[None]:
    """Marks operators with a number of vector cores.

    Args:
      op_aicore_num: not used.
      op_vectorore_num: a positive whole number as a string; required, because the default "0" is not allowed.
    Raises:
      ValueError: `op_vectorore_num` is not such a string.
    """
    del op_aicore_num
    if not isinstance(op_vectorore_num, str) or not op_vectorore_num.isdecimal() or int(op_vectorore_num) < 1:
        problem, expected = "op_vectorore_num is not a number of cores", "a positive whole number as a string"
        fix = 'Pass op_vectorore_num="8", for example.'
        raise ValueError(message("limit_core_num_scope", problem, expected, shown(op_vectorore_num), fix))
    return _mark_new_operators({"_op_vectorcore_num": op_vectorore_num})


@contextmanager
def _mark_new_operators(marks: Mapping[str, bool | int | str]) -> Iterator[None]:
    """Sets the attributes `marks` on all operators made in the default graph inside the context."""
    if tf.executing_eagerly():
        yield
        return
    attributes = {name: _make_attr_value(value) for name, value in marks.items()}
    with set_attributes_of_new_operators(tf.compat.v1.get_default_graph(), attributes):
        yield


def _make_attr_value(value):
    if isinstance(value, bool):
        return tf.compat.v1.AttrValue(b=value)
    if isinstance(value, int):
        return tf.compat.v1.AttrValue(i=value)
    return tf.compat.v1.AttrValue(s=value.encode())


def _check_int(scope, name, value):
    return check_count(scope, name, value, at_least=None)
