"""Provides conditions and state variables that work alike in TF 1 graphs, functions and eager execution."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Callable

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals import training
from npu_bridge.base.tf_internals.graphs import current_control_flow_context
from npu_bridge.graph.control_flow import classic_control_flow


def is_building_graph() -> bool:
    """Returns whether the current context is a TF 1 graph; False in eager execution and inside a `tf.function`."""
    return not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function


def current_graph():
    """Returns the current function or graph; None in eager execution."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def current_context():
    """Returns the current TF 1 condition or loop; None outside of them."""
    return None if tf.executing_eagerly() else current_control_flow_context(current_graph())


def enclosing_graphs():
    """Returns the current function or graph and the enclosing ones, innermost first."""
    place, places = current_graph(), []
    while place is not None:
        places.append(place)
        place = getattr(place, "outer_graph", None)
    return places or [None]


def run_if(condition: tf.Tensor, run: Callable[[], Any]) -> Any:
    """Runs the function `run` only if the condition is True.

    Returns:
      The op. In eager execution: the result of `run`, or None if the condition is False.
    """
    if tf.executing_eagerly():
        return run() if bool(condition) else None
    if not is_building_graph():

        def applied_in_function():
            run()
            return True

        if not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
            return tf.cond(condition, applied_in_function, lambda: False)

        def applied_by_strategy(strategy, condition):
            call = strategy.extended.call_for_each_replica
            return tf.cond(condition, lambda: call(applied_in_function), lambda: False)

        # A mirrored variable is assigned by its strategy, which a replica can call only outside of branches.
        return tf.distribute.get_replica_context().merge_call(applied_by_strategy, args=(condition,))
    with classic_control_flow():
        return tf.cond(condition, _wrap_in_current_scope(run), tf.no_op)


def _wrap_in_current_scope(run):
    """Wraps `run` so that slots made inside a branch get the names that they have outside, also in checkpoints."""
    name_scope = tf.compat.v1.get_default_graph().get_name_scope()

    def applied():
        with tf.name_scope(name_scope + "/" if name_scope else ""):
            return tf.group(run())

    return applied


def make_tensors_if(condition: tf.Tensor, make_tensors: Callable[[], list], make_otherwise: Callable[[], list]) -> list:
    """Returns the tensors of `make_tensors` if the condition is True, else the tensors of `make_otherwise`.

    In a TF 1 graph each tensor is available as soon as it is computed, before the rest of the branch is done.
    `make_tensors` is called first. Both functions must return the same number of tensors, of the same dtypes.
    """
    if tf.executing_eagerly():
        return make_tensors() if bool(condition) else make_otherwise()
    with classic_control_flow() if is_building_graph() else contextlib.nullcontext():
        tensors = tf.cond(condition, lambda: tuple(make_tensors()), lambda: tuple(make_otherwise()))
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]  # classic tf.cond unpacks a single one


def choose_tensors(position: tf.Tensor, tensor_functions: Sequence[Callable[[], list]]) -> list:
    """Returns the tensors of the function at `position` (int32 scalar) of `tensor_functions`.

    All functions must return the same number of tensors, of the same dtypes. A graph calls all functions in their order
    and runs the operators of one; eager execution calls only one function.
    """
    if tf.executing_eagerly():
        return tensor_functions[int(position)]()
    if not is_building_graph():
        return list(tf.switch_case(position, [lambda make=make: tuple(make()) for make in tensor_functions]))
    first, *others = tensor_functions
    # Nested, because each condition captures what the later functions read.
    return (
        make_tensors_if(tf.equal(position, 0), first, lambda: choose_tensors(position - 1, others))
        if others
        else first()
    )


def run_nth_function(number: tf.Tensor, functions: Sequence[Callable[[], Any]]) -> Any:
    """Runs the function at position `number` (int32 scalar); returns the op, or in eager mode the result."""
    if tf.executing_eagerly():
        return functions[int(number)]()
    if not is_building_graph():
        return tf.switch_case(number, [lambda run=run: [run(), True][1] for run in functions])
    first, *others = functions
    if not others:
        return first()
    with classic_control_flow():
        rest = _wrap_in_current_scope(lambda: run_nth_function(number - 1, others))
        return tf.cond(tf.equal(number, 0), _wrap_in_current_scope(first), rest)


def initialise_with_keras(variables: Iterable[Any]) -> None:
    """Makes a Keras session initialise variables of the current TF 1 graph; does nothing outside of TF 1 graphs.

    Without this call a Keras session does not know these variables, and so does not initialise them.
    """
    if is_building_graph():
        for variable in variables:
            training.initialise_in_keras_session(variable)


def check_made_in_this_graph(variables: Iterable[Any]) -> None:
    """Raises an error if state of stages is used in a TF 1 graph, but was made elsewhere.

    Raises:
      ValueError: one of `variables` was made eagerly or in another graph.
    """
    here = tf.compat.v1.get_default_graph() if is_building_graph() else None
    elsewhere = [each for each in variables if here is not None and getattr(each, "graph", None) is not here]
    if elsewhere:
        problem, expected = "its stages have variables outside of this graph", "an optimizer for each graph"
        fix = "Make the optimizer in the graph that it trains."
        raise ValueError(message("optimizer", problem, expected, f"a variable {elsewhere[0].name}", fix))


def state_variable(initial_value: Callable[[], tf.Tensor], name: str, shape: Any = None) -> tf.Variable:
    """Creates a variable that is saved with the model, outside the caller's control flow and control dependencies.

    `shape` is the static shape of a variable whose size changes; by default the shape of the initial value.
    """
    with tf.init_scope():
        made = tf.compat.v1.Variable(
            initial_value=initial_value,
            trainable=False,
            use_resource=True,
            name=name,
            shape=shape,
            validate_shape=shape is None,
        )
        initialise_with_keras([made])
    return made


def value_before_update(variable: Any) -> tf.Tensor:
    """Returns a copy of a variable's value; the caller must make updates of the variable wait for the copy."""
    value = tf.convert_to_tensor(variable)
    return tf.raw_ops.DeepCopy(x=value) if is_building_graph() else tf.identity(value)


def assign_constrained(variable: Any, value: tf.Tensor) -> Any:
    """Applies a variable's constraint, if any, to a value of all ranks; assigns the result to the variable."""
    constraint = getattr(variable, "constraint", None)
    return variable.assign(value if constraint is None else constraint(value))


def group_in_graph(*ops: Any) -> Any:
    """Returns one op that runs all ops which are not None; None in eager execution, where they have run."""
    return None if tf.executing_eagerly() else tf.group(*(op for op in ops if op is not None))


def group_with_update(updated: Any, *ops: Any) -> Any:
    """Returns one op that runs an update and the ops that follow it; in eager execution the result of the update."""
    return updated if updated is None or tf.executing_eagerly() else tf.group(updated, *ops)


def variable_like(variable: Any, owner: str, folder: str, dtype: tf.DType) -> tf.Variable:
    """Creates a variable of zeros in the shape of a trained variable, named and saved as `folder/variable name`.

    Raises:
      ValueError: the shape is unknown; the message names the stage `owner`.
    """
    if not variable.shape.is_fully_defined():
        problem = "the state of a variable needs a known shape"
        got = f"{variable.name} of shape {variable.shape}"
        raise ValueError(message(owner, problem, "a variable of known shape", got, "Give the variable a shape."))
    shape, name = variable.shape, variable.name.partition(":")[0]
    return state_variable(lambda: tf.zeros(shape, dtype), f"{folder}/{name}")
