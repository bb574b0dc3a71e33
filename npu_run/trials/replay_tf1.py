"""Trains from a fixed start: initial weights, batches and random numbers in a folder written by `npu-run record`.

This file needs TensorFlow (1.15 or newer) and numpy, nothing else: copy it beside a script on any machine.

With an Estimator or a MonitoredTrainingSession:

    from replay_tf1 import Replay
    estimator.train(input_fn, hooks=[Replay("recorded")])

With a session of your own:

    replay = Replay("recorded")
    replay.load_weights(session)                 # in place of, or after, the initializer
    for step in range(replay.steps):
        session.run(train_op, feed_dict=replay.feeds(session.graph, step))

Every value is found by its name in the graph. Names that this graph lacks are printed once; the script must supply the
values of these tensors and variables.
"""

import json
import os

import numpy as np
import tensorflow.compat.v1 as tf


class Replay(tf.train.SessionRunHook):
    """A hook that loads recorded weights and feeds the inputs of recorded steps.

    Args:
      folder: the output of `npu-run record`.
      rank: the rank whose weights and batches to use.
    Attributes:
      steps: number of recorded steps; a further step raises `OutOfRangeError`, which ends the training.
      losses: losses of the recorded steps; None for a step without a known loss.
    Raises:
      IOError: the folder has no record for this rank.
    """

    def __init__(self, folder, rank=0):
        self._folder = os.path.join(folder, f"rank_{rank}")
        with open(os.path.join(self._folder, "record.json")) as file:
            facts = json.load(file)
        self.steps, self.losses = facts["steps"], facts["losses"]
        self._updates, self._trained = facts.get("updates", ()), facts.get("trained", ())
        self._step = 0
        self._is_step = False
        self._known = {}
        self._printed = set()

    def load_weights(self, session):
        """Assigns every recorded variable its recorded initial value."""
        saved = np.load(os.path.join(self._folder, "weights.npz"))
        with session.graph.as_default():
            variables = {name_in_record(variable): variable for variable in tf.global_variables()}
        self._print_missing_names("variables", set(saved.files) - set(variables))
        # Many variables per run: a session prepares its whole graph anew for every new set of fetches.
        left = [(variable, saved[name]) for name, variable in variables.items() if name in saved.files]
        while left:
            targets, feeds, later = [], {}, []
            for variable, value in left:
                if not variable.shape.is_compatible_with(value.shape):
                    raise ValueError(
                        f"replay: variable {name_in_record(variable)} has another shape. Expected {value.shape} as "
                        f"recorded; got {variable.shape}. Build the model that was recorded."
                    )
                # This is a tensor if a variable of TensorFlow 1 starts from a checkpoint.
                initializer = getattr(variable.initializer, "op", variable.initializer)
                if initializer.inputs[1].name in feeds:  # two variables start from the same tensor
                    later.append((variable, value))
                else:
                    targets.append(initializer)
                    feeds[initializer.inputs[1].name] = value
            session.run(targets, feeds)
            left = later

    def feeds(self, graph, step):
        """Returns the inputs of a step: values by tensor name, for `feed_dict`."""
        saved = np.load(os.path.join(self._folder, f"step_{step:05d}.npz"))
        found, missing = {}, set()
        for name in saved.files:
            try:
                graph.get_tensor_by_name(name)
            except (KeyError, ValueError):
                missing.add(name)
            else:
                found[name] = saved[name]
        self._print_missing_names("tensors", missing)
        return found

    def is_step(self, graph, fetches):
        """Returns whether a run of these fetches updates the recorded weights, unlike an evaluation."""
        key = (graph.version, tuple(_fetched_operators(graph, fetches)))
        if key not in self._known:
            ops = graph.get_operations()
            updates = self._updates_in(ops)
            # A graph without the trained variables, such as one that reads images, trains nothing.
            is_of_training = not self._trained or any(op.name in self._trained for op in ops)
            self._known[key] = bool(updates & self.list_needed_operators(graph, fetches)) if updates else is_of_training
        return self._known[key]

    def list_needed_operators(self, graph, fetches):
        """Returns all operators that a run of these fetches executes."""
        waiting = _fetched_operators(graph, fetches)
        found = set(waiting)
        while waiting:
            op = waiting.pop()
            new = {tensor.op for tensor in op.inputs}.union(op.control_inputs) - found
            found |= new
            waiting.extend(new)
        return found

    def _updates_in(self, ops):
        """Returns the recorded weight updates among operators.

        If the names differ, as with another kind of variable, returns the operators that update trained weights.
        """
        named = {op for op in ops if op.name in self._updates}
        return named or {op for op in ops if "Apply" in op.type and op.inputs[0].op.name in self._trained}

    def after_create_session(self, session, coord):
        """Loads the recorded weights."""
        self.load_weights(session)

    def before_run(self, run_context):
        """Feeds the inputs of a recorded step; ends the training after the last recorded step."""
        graph = run_context.session.graph
        self._is_step = self.is_step(graph, run_context.original_args.fetches)
        if not self._is_step:
            return None
        if self._step >= self.steps:
            # Some loops never ask whether to stop; every loop handles the end of its data.
            raise tf.errors.OutOfRangeError(None, None, f"replay: all {self.steps} recorded steps are done")
        return tf.train.SessionRunArgs(None, self.feeds(graph, self._step))

    def after_run(self, run_context, run_values):
        """Counts the recorded steps."""
        self._step += self._is_step

    def _print_missing_names(self, kind, names):
        if names - self._printed:
            print(f"replay: this graph has no {kind} named {', '.join(sorted(names - self._printed))}")
            self._printed |= names


def name_in_record(variable):
    """Returns the name of a variable in a record: `variable.name` without ":0", not the name of its operator."""
    return variable.name.partition(":")[0]


def _fetched_operators(graph, fetches):
    """Returns the operators behind the fetches of a `session.run`, in whatever structure they are given."""
    if isinstance(fetches, dict):
        fetches = list(fetches.values())
    if isinstance(fetches, (list, tuple)):
        return [op for part in fetches for op in _fetched_operators(graph, part)]
    fetches = getattr(fetches, "op", fetches)  # also for objects made of several tensors
    found = None if fetches is None else graph.as_graph_element(fetches)
    return [] if found is None else [getattr(found, "op", found)]
