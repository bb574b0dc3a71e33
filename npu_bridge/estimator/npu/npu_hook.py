"""Session hooks of the documented interface."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.util import check_positive_integer
from npu_bridge.gradients import remote_slots
from npu_bridge.options import environment
from npu_bridge.session import create_loop_variables, load_loop_variables

__all__ = [
    "NPUBroadcastGlobalVariablesHook",
    "NpuEmptyHook",
    "SetIterationsVarHook",
    "TellMeStepOrLossHook",
    "broadcast_global_variables",
]


class NPUBroadcastGlobalVariablesHook(tf.estimator.SessionRunHook):
    """Gives every rank the values that `root_rank` starts with.

    All global variables are sent: weights, slots, loss scale and its counters, batch statistics and `global_step`. So
    a resumed job goes on from the root's checkpoint on every rank, whatever the others found in theirs. It happens
    after the variables were initialised or restored, also when a session is recovered. With one rank it does nothing.

    Where an `NPUDistributedOptimizer` shards the weight update, slots go to the ranks that own them, and between steps
    the ranks take part in what rank 0 saves.

    Args:
      root_rank: the rank whose values are sent; required when there are several ranks.
      index: accepted for compatibility; the rank is known.
    Raises:
      ValueError: there are several ranks and `root_rank` is None or not one of them.
    Ranks: collective; every rank needs this hook, with the same `root_rank`.
    """

    def __init__(self, root_rank=None, index=None):
        self._root_rank = root_rank
        self._index = index
        self._broadcast = None
        self._remote_slots = None
        self._is_round_open = False
        size = collective.current().size
        if size > 1 and root_rank not in range(size):
            raise ValueError(
                f"NPUBroadcastGlobalVariablesHook: root_rank is not a rank. Expected an integer from 0 to {size - 1}; "
                f"got {root_rank!r}. Use 0."
            )

    def begin(self):
        self._broadcast = broadcast_global_variables(self._root_rank) if collective.current().size > 1 else None
        self._remote_slots = remote_slots.of_graph(tf.compat.v1.get_default_graph())

    def after_create_session(self, session, coord):
        if self._broadcast is not None:
            session.run(self._broadcast)
        if self._remote_slots is not None:
            self._remote_slots.begin_hooked(session)

    def before_run(self, run_context):
        self._end_last_round(run_context.session)

    def after_run(self, run_context, run_values):
        if self._remote_slots is not None:
            self._is_round_open = self._remote_slots.end_round(run_context.session, is_last=False)

    def end(self, session):
        self._end_last_round(session)

    def _end_last_round(self, session):
        if self._is_round_open:
            self._is_round_open = False
            self._remote_slots.end_round(session, is_last=True)


class SetIterationsVarHook(tf.estimator.SessionRunHook):
    """Lets every session of a loop train several steps in one run.

    A run that asks for the op named `IterationOp` trains that often: group the training step under this name, as
    `tf.group(train_op, name="IterationOp")`. Input must come from `tf.data`, so that every step has a batch of its own.
    Hooks run once per loop and see the last step; the global step is then as many steps further. A session made after a
    failure trains in loops, too.

    Args:
      iterations_per_loop: training steps in a run, at least 1.
    Raises:
      TypeError: it is no int; None is found out when a session is created.
      ValueError: it is below 1.
    Graph: four local variables under `npu_runconfig`.
    Ranks: local; every rank needs the same number.
    """

    def __init__(self, iterations_per_loop=None):
        if iterations_per_loop is not None:
            check_positive_integer(iterations_per_loop, "SetIterationsVarHook: iterations_per_loop")
        self._iterations_per_loop = iterations_per_loop
        self._variables = {}

    def begin(self):
        self._variables = create_loop_variables()

    def after_create_session(self, session, coord):
        check_positive_integer(self._iterations_per_loop, "SetIterationsVarHook: iterations_per_loop")
        load_loop_variables(session, self._variables, self._iterations_per_loop)


class TellMeStepOrLossHook(tf.estimator.SessionRunHook):
    """Says after every run how far training has come, for `accelerate_train_mode` to decide by.

    It writes the environment variables `STEP_NOW` and `TOTAL_STEP`, or `LOSS_NOW` and `TARGET_LOSS`, which are read
    before the next run. A variable, such as the global step, is read when the run is over; any other tensor is
    fetched along with it. Tensors are looked up in `begin`, so the hook serves one graph after the other.

    Args:
      step: the tensor or variable that counts steps, or its name, such as "global_step:0".
      total_step: the steps of the whole training, an int. A step trigger needs it.
      loss: the tensor of the loss, or its name.
      final_loss: the loss the training aims at. A loss trigger needs it.
    Raises:
      ValueError: `step` and `loss` are both None; in `begin`, when the graph has no such tensor.
    Ranks: local.
    """

    def __init__(self, step=None, total_step=None, loss=None, final_loss=None):
        if step is None and loss is None:
            raise ValueError(
                "TellMeStepOrLossHook: there is nothing to tell. Expected step or loss; got None for both. Pass "
                'step="global_step:0" and total_step=..., or loss and final_loss=....'
            )
        self._asked = {"step_now": step, "loss_now": loss}
        self._fetches = {}
        self._variables = {}
        for variable, value, start in (("STEP_NOW", step, "0"), ("LOSS_NOW", loss, "0.0")):
            if value is not None:
                environment.write_variable(variable, start)
        for variable, value in (("TOTAL_STEP", total_step), ("TARGET_LOSS", final_loss)):
            if value is not None:
                environment.write_variable(variable, value)

    def begin(self):
        graph = tf.compat.v1.get_default_graph()
        variables = {variable.op.name: variable for variable in tf.compat.v1.global_variables()}
        self._fetches, self._variables = {}, {}
        for key, asked in self._asked.items():
            if asked is None:
                continue
            name = asked if isinstance(asked, str) else asked.name
            variable = variables.get(name[:-2] if name.endswith(":0") else name)
            if variable is not None:
                # Fetched with the run, it might be its value before the update or after it.
                self._variables[key] = variable
            else:
                self._fetches[key] = _tensor_named(graph, name, key)

    def after_create_session(self, session, coord):
        # A resumed training starts further on than step 0.
        if "step_now" in self._variables:
            environment.write_variable("STEP_NOW", session.run(self._variables["step_now"]))

    def before_run(self, run_context):
        return tf.estimator.SessionRunArgs(self._fetches)

    def after_run(self, run_context, run_values):
        values = {**run_values.results, **run_context.session.run(self._variables)}
        if all(value is None for value in values.values()):
            raise ValueError(
                f"TellMeStepOrLossHook: the run gave no value. Expected a number for {' or '.join(self._asked)}; got "
                f"{values}. Name tensors, not operators."
            )
        for key, variable in (("step_now", "STEP_NOW"), ("loss_now", "LOSS_NOW")):
            if values.get(key) is not None:
                environment.write_variable(variable, values[key])


class NpuEmptyHook(tf.estimator.SessionRunHook):
    """A hook that does nothing: the other branch of a conditional hook."""


def broadcast_global_variables(root_rank):
    """Assigns every global variable of the default graph the value it has on `root_rank`.

    Args:
      root_rank: the rank whose values are sent; 0 where weight updates are sharded.
    Returns:
      The op to run once the variables have values; None when executed eagerly.
    Ranks: collective.
    """
    return remote_slots.broadcast_with_slots(tf.compat.v1.global_variables(), collective.current(), root_rank)


def _tensor_named(graph, name, key):
    try:
        return graph.as_graph_element(name if ":" in name else f"{name}:0", allow_operation=False)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"TellMeStepOrLossHook: {key.split('_')[0]} is not in this graph. Expected the name of a tensor or "
            f"variable; got {name!r}. Name the loss with tf.identity(loss, name=...)."
        ) from error
