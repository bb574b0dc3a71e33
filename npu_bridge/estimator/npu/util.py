"""Sets options of one graph or session, and defines small documented helpers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.base.errors import message, say_once, shown
from npu_bridge.estimator.npu.checks import (
    check_aoe_mode,
    check_bool_type,
    check_nonnegative_integer,
    check_not_none,
    check_path,
    check_positive_integer,
    check_profiling_options,
    convert_bool_to_int,
    format_string,
)
from npu_bridge.estimator.npu.npu_config import ExperimentalConfig
from npu_bridge.session import create_loop_variables, load_loop_variables, loop_variable, name_step, precision

__all__ = [
    "IterationPerLoop",
    "check_aoe_mode",
    "check_bool_type",
    "check_nonnegative_integer",
    "check_not_none",
    "check_path",
    "check_positive_integer",
    "check_profiling_options",
    "convert_bool_to_int",
    "create_or_get_var",
    "format_string",
    "get_ranksize",
    "get_value",
    "global_dict_init",
    "keep_tensors_dtypes",
    "npu_compile",
    "set_graph_exec_config",
    "set_iteration_per_loop",
    "set_op_input_tensor_multi_dims",
    "set_op_tensor_max_range",
    "set_op_tensor_max_size",
    "set_value",
    "variable_initializer_in_host",
]

_EXECUTE_MODES = ("dynamic_execute", "lazy_recompile")
_VALUES: dict[Any, Any] = {}  # shared by the whole process, as documented; nothing here reads it


def get_ranksize() -> str:
    """Returns the declared number of ranks as text.

    Raises:
      ValueError: RANK_SIZE and CM_WORKER_SIZE are both set.
    """
    return environment.rank_size_text()


def keep_tensors_dtypes(graph: tf.Graph, input_tensors: Iterable[str]) -> None:
    """Makes the operators that output the given tensors keep their dtype under every precision mode.

    Call this function before the first session run that computes the tensors.

    Args:
      graph: the graph of the tensors.
      input_tensors: list or tuple of tensor names, such as "dense/MatMul:0".
    Raises:
      ValueError: `graph` is not a Graph, or `input_tensors` is neither list nor tuple.
      KeyError: the graph lacks a named tensor.
    """
    where = "keep_tensors_dtypes"
    if not isinstance(graph, tf.Graph):
        fix = "Pass tf.get_default_graph()."
        raise ValueError(message(where, "graph has the wrong type", "a tf.Graph", shown(graph), fix))
    if not isinstance(input_tensors, (list, tuple)):
        expected = "a list or tuple of tensor names"
        raise ValueError(message(where, "input_tensors is not a list", expected, shown(input_tensors), "Pass [name]."))
    for name in input_tensors:
        precision.exempt_operator(graph.get_tensor_by_name(name).op)


def variable_initializer_in_host(var_list: Iterable[tf.Variable]) -> tf.Operation:
    """Returns an operator named `var_in_host` that initialises variables.

    Args:
      var_list: the variables.
    Graph: a group of the initialisers.
    """
    return tf.compat.v1.variables_initializer(var_list, name="var_in_host")


def npu_compile(sess: Any, *fetches: Any) -> None:
    """Runs fetches once, so that TensorFlow has prepared the graph for later runs.

    Args:
      sess: a session.
      fetches: tensors and operators to run. A training step among them does train.
    """
    sess.run(fetches)


def set_graph_exec_config(
    fetch: Any,
    dynamic_input: bool = False,
    dynamic_graph_execute_mode: str = "dynamic_execute",
    dynamic_inputs_shape_range: str | None = None,
    is_train_graph: bool = False,
    experimental_config: ExperimentalConfig | None = None,
) -> Any:
    """Has no effect here; on the NPU stack configures how the fetches of a run are compiled.

    Args:
      fetch: operation, tensor, or a list or tuple of these, which can be nested; or the name of a tensor of the
        default graph.
      dynamic_input, dynamic_inputs_shape_range, is_train_graph: accepted for compatibility.
      dynamic_graph_execute_mode: "dynamic_execute" or "lazy_recompile".
      experimental_config: an `ExperimentalConfig`, or None.
    Returns:
      `fetch`; for a name, the tensor.
    Raises:
      ValueError: `fetch`, `dynamic_graph_execute_mode` or `experimental_config` is not a value listed here.
    """
    where = "set_graph_exec_config"
    if dynamic_graph_execute_mode not in _EXECUTE_MODES:
        problem, expected = "dynamic_graph_execute_mode is unknown", " or ".join(map(repr, _EXECUTE_MODES))
        raise ValueError(message(where, problem, expected, shown(dynamic_graph_execute_mode), "Leave it out."))
    if not isinstance(experimental_config, (ExperimentalConfig, type(None))):
        problem, expected = "experimental_config has the wrong type", "an ExperimentalConfig or None"
        raise ValueError(message(where, problem, expected, shown(experimental_config), "Leave it out."))
    if isinstance(fetch, str):
        fetch = _tensor_of_default_graph(fetch, where)
    for part in _flatten_fetches(fetch):
        _check_graph_element(part, where, "fetch")
    _log_no_effect(where)
    return fetch


def set_op_input_tensor_multi_dims(tensor: tf.Tensor | tf.Operation, input_shape: str, input_dims: str) -> None:
    """Has no effect here; on the NPU stack declares the possible input shapes of an operator.

    Args:
      tensor: the operator, or a tensor of it.
      input_shape: string that gives each input's index and shape, with -1 for a size that varies, such as
        "0: -1,3; 1: 4,-1".
      input_dims: string of the values for the sizes given as -1, such as "2,4;5,7".
    Raises:
      ValueError: `tensor` is neither tensor nor operation.
      TypeError: `input_shape` or `input_dims` is neither a string nor None.
    """
    where = "set_op_input_tensor_multi_dims"
    _check_graph_element(tensor, where, "tensor")
    format_string(input_shape, f"{where}: input_shape")
    format_string(input_dims, f"{where}: input_dims")
    _log_no_effect(where)


def set_op_tensor_max_range(tensor: tf.Tensor | tf.Operation, max_shape: Any) -> None:
    """Has no effect here; on the NPU stack limits the shape of an operator's output.

    Args:
      tensor: the operator, or a tensor of it.
      max_shape: accepted for compatibility.
    Raises:
      ValueError: `tensor` is neither tensor nor operation.
    """
    del max_shape
    _check_graph_element(tensor, "set_op_tensor_max_range", "tensor")
    _log_no_effect("set_op_tensor_max_range")


def set_op_tensor_max_size(tensor: tf.Tensor | tf.Operation, max_size: Any) -> None:
    """Has no effect here; on the NPU stack it limits the size in bytes of an operator's output.

    Args:
      tensor: the operator, or a tensor of it.
      max_size: accepted for compatibility.
    Raises:
      ValueError: `tensor` is neither tensor nor operation.
    """
    del max_size
    _check_graph_element(tensor, "set_op_tensor_max_size", "tensor")
    _log_no_effect("set_op_tensor_max_size")


def set_iteration_per_loop(sess: Any, train_op: tf.Operation, iterations_per_loop: int = 1) -> tf.Operation:
    """Returns an op that trains several steps in each session run.

    Every step takes a new batch from `tf.data`, but all steps of a run get the same fed values. Other fetches of a run
    come from the last step.

    Args:
      sess: the open session that will train. Its graph must not be finalized; `IterationPerLoop` serves finalized
        graphs.
      train_op: one training step.
      iterations_per_loop: steps in a run; 1 changes nothing.
    Returns:
      The op to run: `IterationOp`, or `train_op` for a single step.
    Raises:
      ValueError: `train_op` is not an operation, or `iterations_per_loop` below 1.
      TypeError: `iterations_per_loop` is not an int.
      RuntimeError: the graph is finalized.
    Graph: four local variables under `npu_runconfig`.
    Ranks: local; every rank needs the same number.
    """
    _check_train_op(train_op, "set_iteration_per_loop")
    check_positive_integer(iterations_per_loop, "set_iteration_per_loop: iterations_per_loop")
    if iterations_per_loop == 1:
        return train_op
    if train_op.graph.finalized:
        expected, got = "a graph that is not finalized", "the graph of a Supervisor or a MonitoredSession"
        fix = "Use IterationPerLoop."
        raise RuntimeError(message("set_iteration_per_loop", "the graph is finalized", expected, got, fix))
    loop = IterationPerLoop()
    with train_op.graph.as_default():
        iteration_op = loop.create_iteration_per_loop_var(train_op)
    loop.load_iteration_per_loop_var(sess, iterations_per_loop)
    return iteration_op


class IterationPerLoop:
    """Trains several steps in each session run, also in graphs that are finalized when the session exists.

    Call `create_iteration_per_loop_var` before the session of a Supervisor or a MonitoredSession is made, and
    `load_iteration_per_loop_var` afterwards. Load again when a MonitoredSession recovers from a failure;
    `SetIterationsVarHook` does this automatically. Without a finalized graph, `set_iteration_per_loop` is simpler.
    """

    def __init__(self):
        self._variables = None

    def create_iteration_per_loop_var(self, train_op: tf.Operation) -> tf.Operation:
        """Returns the op that trains in a loop.

        Args:
          train_op: one training step.
        Returns:
          `IterationOp`.
        Raises:
          ValueError: `train_op` is not an operation.
        Graph: four local variables under `npu_runconfig`.
        """
        _check_train_op(train_op, "create_iteration_per_loop_var")
        self._variables = create_loop_variables()
        return name_step(train_op)

    def load_iteration_per_loop_var(self, sess: Any, iterations_per_loop: int = 1) -> None:
        """Sets the number of steps in each run of an open session.

        Args:
          sess: the session.
          iterations_per_loop: steps in a run.
        Raises:
          AttributeError: `create_iteration_per_loop_var` was not called before.
          TypeError, ValueError: `iterations_per_loop` is not a positive int.
        """
        where = "load_iteration_per_loop_var"
        if self._variables is None:
            expected, fix = "a call of create_iteration_per_loop_var", "Call it before the session is made."
            raise AttributeError(message(where, "the loop variables do not exist", expected, "no such call", fix))
        check_positive_integer(iterations_per_loop, f"{where}: iterations_per_loop")
        load_loop_variables(sess, self._variables, iterations_per_loop)


def create_or_get_var(var_name: str) -> tf.Variable:
    """Returns the loop variable `iterations_per_loop`, `loop_cond`, `zero` or `one` of the default graph.

    Raises:
      RuntimeError: the graph has several variables of this name.
    """
    return loop_variable(var_name)


def global_dict_init() -> None:
    """Deletes all values that `set_value` stored."""
    _VALUES.clear()


def set_value(key: Any, value: Any) -> None:
    """Stores a value under a key, for the whole process."""
    _VALUES[key] = value


def get_value(key: Any, def_value: Any = None) -> Any:
    """Returns the value that `set_value` stored under a key, or `def_value` if there is no value."""
    return _VALUES.get(key, def_value)


def _check_train_op(train_op: Any, where: str) -> None:
    if not isinstance(train_op, tf.Operation):
        problem, fix = "train_op is not an operation", "Pass tf.group(train_op)."
        raise ValueError(message(where, problem, "a tf.Operation", shown(train_op), fix))


def _tensor_of_default_graph(name, where):
    try:
        return tf.compat.v1.get_default_graph().get_tensor_by_name(name)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{where}: fetch is not in the default graph. Expected the name of a tensor, such as 'loss:0'; got "
            f"{name!r}. Pass the tensor itself."
        ) from error


def _flatten_fetches(fetch):
    if not isinstance(fetch, (list, tuple)):
        return [fetch]
    return [element for part in fetch for element in _flatten_fetches(part)]


def _check_graph_element(value, where, name):
    if not isinstance(value, (tf.Tensor, tf.Operation)):
        problem, fix = f"{name} is not part of a graph", "Pass a tensor or an operation."
        raise ValueError(message(where, problem, "a tensor or an operation", shown(value), fix))


def _log_no_effect(name):
    say_once(logging.INFO, f"{name} has no effect on stock TensorFlow.")
