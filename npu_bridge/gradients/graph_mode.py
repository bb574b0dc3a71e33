"""Hides the differences of TF 1 graphs, functions and eager execution: conditions and state variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Callable

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.training import initialise_in_keras_session
from npu_bridge.graph.control_flow import classic_control_flow


def building_graph() -> bool:
    """Returns True while a TF 1 graph is being built; False eagerly and inside a `tf.function`."""
    return not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function


def run_if(condition: tf.Tensor, run: Callable[[], Any]) -> Any:
    """Runs `run` when the condition is True, else nothing.

    Returns:
      The op; when executed eagerly, the result of `run`, or None if it did not run.
    """
    if tf.executing_eagerly():
        return run() if bool(condition) else None
    if not building_graph():

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
        return tf.cond(condition, _in_this_scope(run), tf.no_op)


def _in_this_scope(run):
    """Wraps `run` so that slots made inside a branch are named as without a gate, also in checkpoints."""
    name_scope = tf.compat.v1.get_default_graph().get_name_scope()

    def applied():
        with tf.name_scope(name_scope + "/" if name_scope else ""):
            return tf.group(run())

    return applied


def tensors_if(condition: tf.Tensor, make: Callable[[], list], otherwise: Callable[[], list]) -> list:
    """Returns the tensors of `make` when the condition is True, else those of `otherwise`.

    In a TF 1 graph each tensor is available as soon as it is computed, before the rest of the branch is done. `make` is
    called first; `otherwise` returns as many tensors, of the same dtypes.
    """
    if tf.executing_eagerly():
        return make() if bool(condition) else otherwise()
    with classic_control_flow() if building_graph() else contextlib.nullcontext():
        tensors = tf.cond(condition, lambda: tuple(make()), lambda: tuple(otherwise()))
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]  # classic tf.cond unpacks a single one


def choose_tensors(number: tf.Tensor, makers: Sequence[Callable[[], list]]) -> list:
    """Runs only the function at a position (int32 scalar) and returns its tensors.

    Each function returns as many tensors, of the same dtypes. They are called in this order; eagerly only the chosen.
    """
    if tf.executing_eagerly():
        return makers[int(number)]()
    if not building_graph():
        return list(tf.switch_case(number, [lambda make=make: tuple(make()) for make in makers]))
    first, *others = makers
    # Nested, because each condition captures what the later functions read.
    return tensors_if(tf.equal(number, 0), first, lambda: choose_tensors(number - 1, others)) if others else first()


def run_one(number: tf.Tensor, runs: Sequence[Callable[[], Any]]) -> Any:
    """Runs the function at a position (int32 scalar); returns the op, or eagerly the function's result."""
    if tf.executing_eagerly():
        return runs[int(number)]()
    if not building_graph():
        return tf.switch_case(number, [lambda run=run: [run(), True][1] for run in runs])
    first, *others = runs
    if not others:
        return first()
    with classic_control_flow():
        rest = _in_this_scope(lambda: run_one(number - 1, others))
        return tf.cond(tf.equal(number, 0), _in_this_scope(first), rest)


def in_written_order(run: Callable[[], Any], grads_and_vars: Sequence[tuple]) -> tf.Operation:
    """Builds the changes that `run` makes as operators of a TF 1 graph, ordered as in a `tf.function`; returns the op.

    The operators belong to the graph itself, not to a function, so their tensors can be seen from outside.

    Args:
      run: updates variables by gradients.
      grads_and_vars: the gradients and variables. No variable is read or changed there before its gradient is known;
        otherwise a loss could be computed with weights that a weight decay has already changed.
    """
    made = tf.function(lambda: [run(), None][1], autograph=False).get_concrete_function().graph
    outer = {inside.name: outside for outside, inside in made.captures}
    changes = [op.name for op in made.control_outputs]
    inside_of = {id(outside): inside.op.name for outside, inside in made.captures}
    gradient_of = {}
    for gradient, variable in grads_and_vars:
        known = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        handle, inside = inside_of.get(id(variable.handle)), inside_of.get(id(known))
        if handle and inside:
            gradient_of[handle] = inside
            outer[f"^{inside}"] = known
    definition = made.as_graph_def()
    for node in definition.node:
        # Operators that Keras 2.15 computes beside a captured gradient, as for its `global_clipnorm`, name an operator
        # of the outer graph as their neighbour; the importer would look for it among these nodes.
        node.attr.pop("_class", None)
        node.input.extend([f"^{gradient_of[name]}" for name in node.input if name in gradient_of])
    return tf.group(*tf.compat.v1.import_graph_def(definition, outer, changes, name="update"))


def initialise_with_keras(variables: Iterable[Any]) -> None:
    """Makes a Keras session initialise variables of the TF 1 graph being built; does nothing elsewhere.

    Such a session initialises only the variables that it knows.
    """
    if building_graph():
        for variable in variables:
            initialise_in_keras_session(variable)


def state_variable(initial_value: Callable[[], tf.Tensor], name: str, shape: Any = None) -> tf.Variable:
    """Creates a variable that is saved with the model, outside the caller's control flow and control dependencies.

    `shape` is the static shape where the shape of the value changes; by default that of the initial value.
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
    """Copies a variable's value; an update of the variable must wait for the copy."""
    value = tf.convert_to_tensor(variable)
    return tf.raw_ops.DeepCopy(x=value) if building_graph() else tf.identity(value)


def variable_like(variable: Any, owner: str, folder: str, dtype: tf.DType) -> tf.Variable:
    """Creates zeros in the shape of a trained variable, named and saved as `folder/name of that variable`.

    Raises:
      ValueError: the shape is unknown; the message names `owner`, the stage.
    """
    if not variable.shape.is_fully_defined():
        problem = "the state of a variable needs a known shape"
        got = f"{variable.shape} for {variable.name}"
        raise ValueError(message(owner, problem, "a variable of known shape", got, "Give it a shape."))
    shape, name = variable.shape, variable.name.partition(":")[0]
    return state_variable(lambda: tf.zeros(shape, dtype), f"{folder}/{name}")
