"""Wraps private parts of graphs, operators, functions and variables. Seen in TensorFlow 2.15.1."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    import tensorflow as tf


@contextlib.contextmanager
def allow_graph_changes(graph: tf.Graph) -> Iterator[None]:
    """Allows changes to a graph, even a finalized one, inside the block (`Graph._unsafe_unfinalize`, TF 2.15).

    Other threads wait with an export of the graph (`Graph._lock`): it fails if operators are added meanwhile. A
    `tf.train.Supervisor` exports the graph in a thread of its own while the training begins.
    """
    with graph._lock:
        was_finalized = graph.finalized
        graph._unsafe_unfinalize()
        try:
            yield
        finally:
            if was_finalized:
                graph.finalize()


def update_input(op: tf.Operation, position: int, tensor: tf.Tensor) -> None:
    """Replaces an input tensor of an operator (`Operation._update_input`, TF 2.15).

    A session that has already run any part of the graph ignores the change or fails.
    """
    op._update_input(position, tensor)


def add_control_inputs(op: tf.Operation, control_ops: Iterable[tf.Operation]) -> None:
    """Makes an operator wait for other operators (`Operation._add_control_inputs`, TF 2.15)."""
    op._add_control_inputs(list(control_ops))


def remove_control_inputs(op: tf.Operation) -> None:
    """Removes all control inputs of an operator (`Operation._remove_all_control_inputs`, TF 2.15)."""
    op._remove_all_control_inputs()


def control_outputs(op: tf.Operation) -> list:
    """Returns the operators that have `op` as a control input (`Operation._control_outputs`, TF 2.15)."""
    return list(op._control_outputs)


def set_attribute(op: tf.Operation, name: str, value: Any) -> None:
    """Sets an attribute, an AttrValue, of an existing operator (`Operation._set_attr`, TF 2.15)."""
    op._set_attr(name, value)


def set_attributes_of_new_operators(graph: tf.Graph, attributes: Mapping[str, Any]) -> Any:
    """Returns a context manager that gives new operators these AttrValues by name (`Graph._attr_scope`, TF 2.15)."""
    return graph._attr_scope(dict(attributes))


def is_reference(dtype: tf.DType) -> bool:
    """Returns whether TF 1 reference variables have this dtype (`DType._is_ref_dtype`, TF 2.15)."""
    return dtype._is_ref_dtype


def control_flow_context(op: tf.Operation) -> Any:
    """Returns the innermost TF 1 condition or loop of an operator, or None (`_get_control_flow_context`, TF 2.15)."""
    return op._get_control_flow_context()


def contexts_around(context: Any) -> Iterator[Any]:
    """Yields a TF 1 condition or loop, then the enclosing ones (`ControlFlowContext.outer_context`, TF 2.15)."""
    while context is not None:
        yield context
        context = context.outer_context


def disable_parallel_iterations(op: tf.Operation) -> None:
    """Makes the TF 1 loops around an operator end each iteration before the next one begins.

    Works only before a session has run the loop (`WhileContext._parallel_iterations`, also of its operators, TF 2.15).
    """
    from tensorflow.core.framework import attr_value_pb2

    one = attr_value_pb2.AttrValue(i=1)
    for loop in contexts_around(op._get_control_flow_context()):
        if not loop.IsWhileContext() or loop.parallel_iterations == 1:
            continue
        loop._parallel_iterations = 1
        for other in op.graph.get_operations():
            if other.type in ("Enter", "RefEnter") and other.get_attr("frame_name").decode() == loop.name:
                other._set_attr("parallel_iterations", one)


def enclosing_branches(op: tf.Operation) -> Iterator[tuple[tf.Tensor | None, bool]]:
    """Yields (predicate, branch) for each TF 1 condition or loop around an operator, innermost first.

    A loop has the predicate None. Checked in TF 2.15: `CondContext.pred` and `branch`.
    """
    for context in contexts_around(op._get_control_flow_context()):
        yield getattr(context, "pred", None), bool(getattr(context, "branch", 0))


def allow_fetching(op: tf.Operation) -> None:
    """Allows fetching an operator inside a TF 1 condition, undoing `Graph.prevent_fetching` (TF 2.15)."""
    op.graph._unfetchable_ops.discard(op)


def current_control_flow_context(graph: tf.Graph) -> Any:
    """Returns the TF 1 condition or loop being built, or None (`Graph._get_control_flow_context`, TF 2.15)."""
    return graph._get_control_flow_context()


@contextlib.contextmanager
def enter_control_flow_context(graph: tf.Graph, context: Any) -> Iterator[None]:
    """Puts new operators of the block into a TF 1 condition or loop (`Graph._set_control_flow_context`, TF 2.15)."""
    outside = graph._get_control_flow_context()
    graph._set_control_flow_context(context)
    try:
        yield
    finally:
        graph._set_control_flow_context(outside)


def bring_into_context(context: Any, tensor: tf.Tensor) -> tf.Tensor:
    """Brings an outside tensor into a TF 1 condition or loop (`ControlFlowContext.AddValue`, TF 2.15)."""
    return context.AddValue(tensor)


def is_branch_or_body(graph: tf.Graph) -> bool:
    """Returns whether a graph belongs to a `tf.cond` or a `tf.while_loop` (`ControlFlowFuncGraph`, TF 2.15)."""
    from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

    return isinstance(graph, ControlFlowFuncGraph)


def call_when_function_is_built(graph: tf.Graph, call: Callable[[], Any]) -> bool:
    """Calls `call` when the outermost function that is being built is complete.

    Checked in TF 2.15: `FuncGraph.outer_graph` and `_add_scope_exit_callback`.

    Returns:
      False, without calling `call`, if the outermost function is built for a TF 1 graph.
    """
    while graph.outer_graph.building_function:
        graph = graph.outer_graph
    if graph.outer_graph.get_operations():  # else it is the empty graph of eager execution
        return False
    graph._add_scope_exit_callback(call)
    return True


def run_in_any_order(op: tf.Operation) -> None:
    """Makes the function that is being built run a stateful operator, without an order among its stateful operators.

    Without effect in other graphs (`FuncGraph.experimental_acd_manager`, TF 2.15).
    """
    if op.graph.experimental_acd_manager is not None:
        op.graph.experimental_acd_manager.run_independently(op)


def is_compiled_by_xla(graph: tf.Graph) -> bool:
    """Returns whether XLA compiles the code being built (`control_flow_util.GraphOrParentsInXlaContext`, TF 2.15)."""
    from tensorflow.python.ops import control_flow_util

    return control_flow_util.GraphOrParentsInXlaContext(graph)


def function_definition(graph: tf.Graph, name: str) -> Any:
    """Returns the FunctionDef of a function in a graph, or None (`_get_function`, TF 2.15)."""
    function = graph._get_function(name)
    return None if function is None else function.cached_definition


def function_definitions(graph: tf.Graph) -> list:
    """Returns the FunctionDefs of all functions of a graph (`Graph._copy_functions_to_graph_def`, TF 2.15).

    `Graph.as_graph_def` would copy every constant of the graph, too.
    """
    import tensorflow as tf

    holder = tf.compat.v1.GraphDef()
    graph._copy_functions_to_graph_def(holder, 0)
    return list(holder.library.function)


def operator_definition(type_name: str) -> Any:
    """Returns the OpDef of a type of operator, or None (`op_def_registry.get`, TF 2.15)."""
    from tensorflow.python.framework import op_def_registry

    return op_def_registry.get(type_name)


def has_kernel(type_name: str, dtype: tf.DType, device: str) -> bool:
    """Returns whether TensorFlow has a kernel of an operator type for a dtype (`framework.kernels`, TF 2.15).

    Args:
      type_name: an operator type whose attribute `T` is the dtype. A kernel that restricts no dtype counts, too.
      dtype: dtype of the operator's values.
      device: "CPU" or "GPU".
    """
    from tensorflow.python.framework import kernels

    for kernel in kernels.get_registered_kernels_for_op(type_name).kernel:
        said = [each.allowed_values.list.type for each in kernel.constraint if each.name == "T"]
        if kernel.device_type == device and all(dtype.as_datatype_enum in dtypes for dtypes in said):
            return True
    return False


def read_tensor(variable: Any) -> Any:
    """Returns the tensor that fetches and savers read for a graph variable (`_graph_element`, TF 2.15)."""
    return getattr(variable, "_graph_element", variable)


def set_read_tensor(variable: tf.Variable, value: tf.Tensor) -> None:
    """Makes fetches and savers read `value` in place of a resource variable's own value (TF 2.15).

    Savers read slots of partitioned variables by `read_value_no_copy`.
    """
    variable._graph_element = value
    variable.read_value_no_copy = lambda: value


def unique_id(variable: tf.Variable) -> str:
    """Returns a text that is unique to the variable in the process (`ResourceVariable._unique_id`, TF 2.15)."""
    return variable._unique_id


def shared_name(variable: tf.Variable) -> str:
    """Returns a variable's name without its output number (`ResourceVariable._shared_name`, TF 2.15)."""
    return variable._shared_name


def set_variable_name(variable: tf.Variable, name: str, slice_info: tf.Variable.SaveSliceInfo) -> None:
    """Gives a resource variable, also in checkpoints, a name other than its operator's.

    Checked in TF 2.15: `_handle_name` and `_set_save_slice_info`.

    Args:
      variable: the variable.
      name: the new name, with an output number, such as "v:0".
      slice_info: has the name for checkpoints, without output number.
    """
    variable._handle_name = name
    variable._set_save_slice_info(slice_info)


def make_stand_in_variable(
    original: tf.Variable, values: tf.Variable, dtype: tf.DType, shares_slots: bool
) -> tf.Variable:
    """Returns a variable that has the name of `original`, and reads and writes the resource variable `values`.

    Optimizers find slots by a key from a variable's `_distributed_container` (`optimizer._var_key`, TF and Keras 2.15).
    If `shares_slots`, the result has the key of `original`, so the two variables share slots.
    """
    from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

    made = BaseResourceVariable(
        trainable=False,
        shape=original.shape,
        dtype=dtype,
        handle=values.handle,
        constraint=original.constraint,
        distribute_strategy=getattr(original, "_distribute_strategy", None),
        unique_id=getattr(original, "_unique_id", None) or values._unique_id,
        handle_name=original.name.partition(":")[0],
        initial_value=getattr(values, "_initial_value", None),
        initializer_op=getattr(values, "_initializer_op", None),
        is_initialized_op=getattr(values, "_is_initialized_op", None),
    )
    made.stands_for = original
    if shares_slots:
        made._distributed_container = lambda: original
    return made


def original_variable_of(variable: Any) -> Any:
    """Returns the original of a variable made by `make_stand_in_variable`; any other variable unchanged."""
    return getattr(variable, "stands_for", variable)


def owner_of_slots(variable: Any) -> Any:
    """Returns the variable to which slots belong: the original of a stand-in that shares slots, else `variable`."""
    is_stand_in = hasattr(variable, "stands_for") and hasattr(variable, "_distributed_container")
    return variable.stands_for if is_stand_in else variable
