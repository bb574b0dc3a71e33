"""Scopes that mark the operators made inside them.

`keep_dtype_scope` has an effect: its operators keep their dtype under every precision mode. The marks of the other
scopes speak to a device this library does not drive; their arguments are checked and the marks recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import tensorflow as tf

from npu_bridge.estimator.npu.npu_config import NpuExecutePlacement
from npu_bridge.options.table import shown
from npu_bridge.precision import KEEP_DTYPE
from npu_bridge.tf_internals.graphs import attributes_of_new_operators

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


@contextlib.contextmanager
def keep_dtype_scope() -> Iterator[None]:
    """Inside, new operators keep their dtype whatever the precision mode is.

    The operators of their gradients are made later, by the optimizer, and follow the mode. Inside loops and conditions
    that TensorFlow keeps as functions, the mark has no effect.

    Graph: operators get the attribute `_keep_dtype`. Executed eagerly, nothing happens.
    """
    with _marked({KEEP_DTYPE: 1}):
        yield


@contextlib.contextmanager
def without_npu_compile_scope() -> Iterator[None]:
    """Marks operators that the framework, not the device, is to run: here all of them."""
    with _marked({"_without_npu_compile": True}):
        yield


@contextlib.contextmanager
def npu_variable_scope(placement: NpuExecutePlacement = NpuExecutePlacement.ALL) -> Iterator[None]:
    """Marks variables with a placement.

    Raises:
      ValueError: `placement` is not an NpuExecutePlacement.
    """
    if not isinstance(placement, NpuExecutePlacement):
        raise ValueError(
            f"npu_variable_scope: placement is unknown. Expected a member of NpuExecutePlacement; got "
            f"{shown(placement)}. Use one of its {', '.join(NpuExecutePlacement.__members__)}."
        )
    with _marked({"_variable_placement": placement.value}):
        yield


@contextlib.contextmanager
def npu_stage_scope(stage: int) -> Iterator[None]:
    """Marks operators with a pipeline stage; TypeError unless an int."""
    with _marked({"_stage_level": _whole("npu_stage_scope", "stage", stage)}):
        yield


@contextlib.contextmanager
def npu_mem_type_scope() -> Iterator[None]:
    """Marks operators whose outputs live in another kind of memory."""
    with _marked({"_output_memory_type": 1}):
        yield


@contextlib.contextmanager
def npu_weight_prefetch_scope(buffer_pool_id: int = 0, buffer_pool_size: int = 536870912) -> Iterator[None]:
    """Marks operators whose weights are fetched ahead; TypeError unless both are ints."""
    marks = {
        "_buffer_pool_id": _whole("npu_weight_prefetch_scope", "buffer_pool_id", buffer_pool_id),
        "_buffer_pool_size": _whole("npu_weight_prefetch_scope", "buffer_pool_size", buffer_pool_size),
    }
    with _marked(marks):
        yield


@contextlib.contextmanager
def op_specified_engine_scope(engine_name: str, kernel_lib_name: str) -> Iterator[None]:
    """Marks operators with an engine and a kernel library."""
    marks = {"_specified_engine_name": str(engine_name), "_specified_kernel_lib_name": str(kernel_lib_name)}
    with _marked(marks):
        yield


@contextlib.contextmanager
def npu_qos_label_scope(label: int) -> Iterator[None]:
    """Marks operators with a service label; TypeError unless an int."""
    with _marked({"_qos_service_label": _whole("npu_qos_label_scope", "label", label)}):
        yield


@contextlib.contextmanager
def subgraph_multi_dims_scope(index: int) -> Iterator[None]:
    """Marks operators with the number of a subgraph; TypeError unless an int."""
    with _marked({"_subgraph_multi_dims_index": _whole("subgraph_multi_dims_scope", "index", index)}):
        yield


@contextlib.contextmanager
def npu_optimizer_scope() -> Iterator[None]:
    """Marks operators of an optimizer."""
    with _marked({"_optimizer": True}):
        yield


@contextlib.contextmanager
def npu_recompute_scope() -> Iterator[None]:
    """Puts operators under the name scope `NpuRecompute`; names of variables do not change."""
    with tf.name_scope("NpuRecompute"):
        yield


@contextlib.contextmanager
def npu_graph_slice_scope(slice_num: int | None = None) -> Iterator[None]:
    """Puts operators under a name scope that holds the number of slices.

    Raises:
      TypeError: `slice_num` is neither an int nor None.
      ValueError: it is below 1.
    """
    if slice_num is not None and _whole("npu_graph_slice_scope", "slice_num", slice_num) < 1:
        raise ValueError(
            f"npu_graph_slice_scope: slice_num is too small. Expected at least 1, or None; got {slice_num}. Leave "
            f"it out."
        )
    with tf.name_scope(f"SliceNum-{slice_num}-NpuGraphSlicing{slice_num}"):
        yield


@contextlib.contextmanager
def disable_autofuse() -> Iterator[None]:
    """Marks operators that are not to be fused."""
    with _marked({"_disable_autofuse_scope": True}):
        yield


@contextlib.contextmanager
def limit_core_num_scope(op_aicore_num: str = "0", op_vectorore_num: str = "0") -> Iterator[None]:
    """Marks operators with a number of vector cores.

    Args:
      op_aicore_num: not used.
      op_vectorore_num: text of a positive whole number; the default is none, as documented.
    Raises:
      ValueError: it is not.
    """
    del op_aicore_num
    if not isinstance(op_vectorore_num, str) or not op_vectorore_num.isdecimal() or int(op_vectorore_num) < 1:
        raise ValueError(
            f"limit_core_num_scope: op_vectorore_num is not a number of cores. Expected the text of a positive whole "
            f'number; got {shown(op_vectorore_num)}. Pass op_vectorore_num="8", for example.'
        )
    with _marked({"_op_vectorcore_num": op_vectorore_num}):
        yield


@contextlib.contextmanager
def _marked(marks: Mapping[str, bool | int | str]) -> Iterator[None]:
    """Inside, operators of the default graph get these attributes."""
    if tf.executing_eagerly():
        yield
        return
    attributes = {name: _attribute(value) for name, value in marks.items()}
    with attributes_of_new_operators(tf.compat.v1.get_default_graph(), attributes):
        yield


def _attribute(value):
    if isinstance(value, bool):
        return tf.compat.v1.AttrValue(b=value)
    if isinstance(value, int):
        return tf.compat.v1.AttrValue(i=value)
    return tf.compat.v1.AttrValue(s=value.encode())


def _whole(scope, name, value):
    if not isinstance(value, int):
        raise TypeError(
            f"{scope}: {name} has the wrong type. Expected an int; got {shown(value)}. Pass a whole number."
        )
    return value
