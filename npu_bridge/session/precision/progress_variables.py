"""A hook that writes training progress to environment variables, from which the switch of precision is decided."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge.base import environment


class ProgressVariablesHook(tf.estimator.SessionRunHook):
    """Writes `STEP_NOW` and `TOTAL_STEP`, or `LOSS_NOW` and `TARGET_LOSS`, after every run.

    Arguments and errors are those of the documented hook.
    """

    def __init__(self, step=None, total_step=None, loss=None, final_loss=None):
        self._where = type(self).__name__
        if step is None and loss is None:
            raise ValueError(
                f"{self._where}: there is nothing to tell. Expected step or loss; got None for both. Pass "
                f'step="global_step:0" and total_step=..., or loss and final_loss=....'
            )
        self._asked = {"STEP_NOW": step, "LOSS_NOW": loss}
        self._fetches = {}
        self._variables = {}
        starts = {"STEP_NOW": "0", "LOSS_NOW": "0.0"}
        goals = {"TOTAL_STEP": total_step, "TARGET_LOSS": final_loss}
        known = {name: start for name, start in starts.items() if self._asked[name] is not None}
        known.update((name, goal) for name, goal in goals.items() if goal is not None)
        for name, value in known.items():
            environment.write_variable(name, value)

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
                continue
            try:
                tensor_name = name if ":" in name else f"{name}:0"
                self._fetches[key] = graph.as_graph_element(tensor_name, allow_operation=False)
            except (KeyError, ValueError) as error:
                raise ValueError(
                    f"{self._where}: {'step' if key == 'STEP_NOW' else 'loss'} is not in this graph. Expected the name "
                    f"of a tensor or variable; got {name!r}. Name the loss with tf.identity(loss, name=...)."
                ) from error

    def after_create_session(self, session, coord):
        # A resumed training starts further on than step 0.
        if "STEP_NOW" in self._variables:
            environment.write_variable("STEP_NOW", session.run(self._variables["STEP_NOW"]))

    def before_run(self, run_context):
        return tf.estimator.SessionRunArgs(self._fetches)

    def after_run(self, run_context, run_values):
        values = {**run_values.results, **run_context.session.run(self._variables)}
        if all(value is None for value in values.values()):
            raise ValueError(
                f"{self._where}: the run gave no value. Expected a number for {' or '.join(self._asked)}; got "
                f"{values}. Name tensors, not operators."
            )
        for name, value in values.items():
            if value is not None:
                environment.write_variable(name, value)
