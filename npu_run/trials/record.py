"""Records, in the ranks of `npu-run record`, initial weights and the first steps' batches and random numbers.

A record is a folder with a sub-folder `rank_<n>` for each rank. The sub-folder holds

- `weights.npz` and `weights_after.npz`: the values of all variables before the first step and after the last step;
- `step_00000.npz` and so on: the values of a step's recorded tensors;
- `tensors_00000.npz` and so on, if requested: the results of a step's operators, in execution order;
- `record.json`, with the keys
  - `steps`, the number of steps; `losses` of the steps (null for a step without a known loss); `loss_names`, the names
    of the loss tensors, because a script can train several losses in turn;
  - `kinds`, the kind of each recorded tensor: "batch", "fed", "random" or "raced"; `not_recorded`, the reason for each
    tensor that could not be recorded; `types`, the operator type of each tensor in `tensors_00000.npz`;
  - `trained`, the variables that steps train; `updates`, the operators that update these variables; `races`, variables
    that a step reads and writes in no order, with the operators;
  - `is_float32`, whether every operator kept its dtype.

`.npz` files are numpy archives, in which values are stored by name. Values of bfloat16 are saved as float32.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from npu_bridge.base.environment import options_set_by_launcher
from npu_bridge.base.files import new_file, write_atomically
from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.base.tf_internals.graphs import allow_fetching, enclosing_branches, operator_definition
from npu_bridge.base.tf_internals.sessions import is_closed
from npu_bridge.graph.functions import nodes_in_functions
from npu_bridge.graph.operators import list_elements
from npu_bridge.graph.races import find_races
from npu_bridge.graph.run import SessionRun
from npu_bridge.graph.variables import changes_variable, variable_behind
from npu_bridge.session import steps_per_run
from npu_bridge.session.dump_files import convert_to_savable_dtype
from npu_bridge.session.hooked_session import TrainingHook
from npu_run.trials.replay_tf1 import name_in_record

_BATCHES = ("IteratorGetNext", "QueueDequeue", "PyFunc", "EagerPyFunc", "ReaderRead", "Unstage")
_HANDLE_DTYPES = (tf.resource, tf.variant)
_RANDOM = ("StatelessRandom", "StatelessTruncated", "StatelessParameterized", "StatelessMultinomial", "StatefulUniform")
_RANDOM += ("StatefulStandardNormal", "StatefulTruncatedNormal", "StatefulRandomBinomial")


class RankRecordWriter:
    """A writer of one rank's part of a record.

    Attributes:
      facts: the future content of `record.json`.
    """

    def __init__(self, folder: str, rank: int):
        self._folder = folder_of_rank(folder, rank)
        self.facts: dict[str, Any] = {"steps": 0, "losses": [], "kinds": {}, "not_recorded": {}, "races": {}}
        mode = options_set_by_launcher().get("precision_mode")
        self.facts.update(updates=[], trained=[], loss_names=[], is_float32=mode == "must_keep_origin_dtype")
        self._secondary = NonFatalOutput(f"the record in {self._folder}")
        self._is_whole = True

    def save(self, name: str, values: Mapping[str, Any]) -> None:
        """Writes arrays to a numpy archive in the rank's folder."""
        self._is_whole = self._is_whole and self._secondary.attempt(self._write_arrays, name, values)

    def finish(self) -> None:
        """Writes `record.json`, unless an archive could not be written: an incomplete record cannot be replayed."""
        if self._is_whole:
            self._secondary.attempt(self._write_facts, is_last_chance=True)

    def _write_facts(self) -> None:
        write_atomically(os.path.join(self._folder, "record.json"), json.dumps(self.facts, indent=1))

    def _write_arrays(self, name: str, values: Mapping[str, Any]) -> None:
        os.makedirs(self._folder, exist_ok=True)
        archive = io.BytesIO()  # on a full disk, a numpy archive in a file raises again when it is garbage-collected
        np.savez(archive, **{key: convert_to_savable_dtype(value) for key, value in values.items()})
        with new_file(os.path.join(self._folder, name), "wb") as file:
            file.write(archive.getbuffer())


class RecordStepsHook(TrainingHook):
    """A hook that records the first steps of a process's first training session.

    If `with_tensors`, the hook also records the results of a step's operators.

    Ranks: local; each rank writes to a separate folder.
    """

    def __init__(self, folder: str, steps: int, rank: int, with_tensors: bool = False):
        self._steps, self._with_tensors = steps, with_tensors
        self._session: Any = None
        self._record = RankRecordWriter(folder, rank)
        self._facts = self._record.facts
        self._raced: dict[SessionRun, list[tf.Operation]] = {}  # by kind of run
        self._made_fetchable: list[tf.Operation] = []  # fetchable only in this run

    def after_create_session(self, session, coord):
        """Writes the initial weights."""
        if self._session is None:
            self._session = session
            self._record.save("weights.npz", read_weights(session))

    def before_run(self, run_context):
        """Requests the inputs of the step."""
        if run_context.session is not self._session:
            return None
        sources = self._find_sources(_fed_values(run_context))
        self._made_fetchable = [each.op for each in sources.values() if not each.graph.is_fetchable(each)]
        for op in self._made_fetchable:
            allow_fetching(op)
        for tensor in (each for op in self._find_raced_operators(self.training) for each in op.outputs):
            if tensor.shape.rank == 0 and tensor.name in self.training.values:
                sources[tensor.name], self._facts["kinds"][tensor.name] = tensor, "raced"
        if steps_per_run(self._session) > 1:
            self._facts["not_recorded"]["iterations_per_loop"] = "a run trains several steps, and the last is seen"
        fetches: dict[str, Any] = {"values": sources}
        if self.training.loss is not None:
            fetches["loss"] = self.training.loss
        if self._with_tensors:
            # Unread values are left out: a frozen batch normalisation, for example, leaves its statistics unset.
            names = {each.name for op in self.training.ops for each in op.inputs}.intersection(self.training.values)
            aliases = ("Const", "Identity")  # they share a variable's buffer, which already holds the step's update
            ops = (op for op in self.training.ops if op.type not in aliases)
            tensors = [each for op in ops for each in op.outputs if each.name in names]
            fetches["tensors"] = {each.name: each for each in tensors if _is_number(each.dtype)}
            self._facts.setdefault("types", {}).update((each.name, each.op.type) for each in tensors)
        return tf.estimator.SessionRunArgs(fetches)

    def _find_sources(self, fed_values: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        """Returns the tensors, by name, through which the step reads batches and random numbers that are not fed.

        Notes the kind of each in the record, and why others cannot be recorded. The fed values decide the branches of
        conditions that the step runs.
        """
        found, kinds, missing = {}, self._facts["kinds"], self._facts["not_recorded"]
        for op in self.training.ops:
            kind = find_source_kind(op.type)
            if kind is None:
                if op.outputs and all(tensor.dtype in _HANDLE_DTYPES for tensor in op.outputs):
                    continue  # an iterator: its elements are recorded where they are read
                inside = {node.op for node in nodes_in_functions(op.graph, [op.node_def])}
                hidden = sorted(name for name in inside if find_source_kind(name) is not None)
                if hidden:
                    missing[op.name] = f"{', '.join(hidden)} inside a function"
                continue
            for tensor in op.outputs:
                if tensor.name in self.training.fed_names:
                    continue
                if not _is_number(tensor.dtype):
                    missing[tensor.name] = f"its values are {tensor.dtype.name}"
                elif (is_run := _will_run_in_step(op, fed_values)) is None:
                    missing[tensor.name] = "it is inside a loop or a condition"
                elif is_run:
                    found[tensor.name], kinds[tensor.name] = tensor, kind
        return found

    def _find_raced_operators(self, run):
        """Returns operators that read a variable while the step may write it; notes races and updates in the record."""
        if run not in self._raced:
            races, graph = find_races(run), self._session.graph
            self._facts["races"].update(races)
            self._raced[run] = [graph.get_operation_by_name(name) for race in races.values() for name in race.others]
            for key, names in (("updates", _find_updates(run)), ("trained", run.trained_variable_names)):
                self._facts[key] = sorted({*self._facts[key], *names})
        return self._raced[run]

    def after_run(self, run_context, run_values):
        """Writes the values of the step."""
        if run_context.session is not self._session or self._facts["steps"] >= self._steps:
            return
        graph = self._session.graph
        for op in self._made_fetchable:
            graph.prevent_fetching(op)
        for key, given in (run_context.original_args.feed_dict or {}).items():
            tensors = list_elements(graph, key)  # the key of a sparse tensor stands for several tensors
            for tensor, value in zip(tensors, [given] if len(tensors) == 1 else given):
                if _is_number(tensor.dtype):
                    # TensorFlow also converts a text such as "1.5" to a number.
                    run_values.results["values"][tensor.name] = np.asarray(value, tensor.dtype.as_numpy_dtype)
                    self._facts["kinds"][tensor.name] = "fed"
                else:
                    self._facts["not_recorded"][tensor.name] = f"its values are {tensor.dtype.name}"
        self._record.save(f"step_{self._facts['steps']:05d}.npz", run_values.results["values"])
        if self._with_tensors:
            self._record.save(f"tensors_{self._facts['steps']:05d}.npz", run_values.results["tensors"])
        loss = run_values.results.get("loss")
        self._facts["losses"].append(None if loss is None else float(loss))
        self._facts["loss_names"].append(None if loss is None else self.training.loss.name)
        self._facts["steps"] += 1
        if self._facts["steps"] == self._steps:
            self.end(self._session)

    def before_close(self, session):
        """Completes the record if the session closes before the last step to record."""
        if session is self._session:
            self.end(session)

    def end(self, session):
        """Completes the record, also when the training ended before the last step to record."""
        if self._session is None or "weights_after" in self._facts:
            return
        is_open = not is_closed(self._session)
        if is_open:
            self._record.save("weights_after.npz", read_weights(self._session))
        self._facts["weights_after"] = is_open
        self._record.finish()


def _find_updates(run: SessionRun) -> set[str]:
    """Returns the names of operators that update trained variables; empty for an evaluation."""
    changing = [
        op
        for op in run.ops
        if changes_variable(op.type) and variable_behind(op.inputs[0]) in run.trained_variable_names
    ]
    return {op.name for op in changing} or set(run.purpose)


def folder_of_rank(folder: str, rank: int) -> str:
    """Returns the sub-folder of a record that holds a rank's part."""
    return os.path.join(folder, f"rank_{rank}")


def read_weights(session: Any) -> dict[str, np.ndarray]:
    """Returns the values of all numeric variables of a session's graph, by name as in a record."""
    variables = session.graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
    return session.run({name_in_record(variable): variable for variable in variables if _is_number(variable.dtype)})


def _fed_values(run_context):
    """Returns the values fed to a run, by tensor name."""
    fed = {}
    for key, value in (run_context.original_args.feed_dict or {}).items():
        tensors = list_elements(run_context.session.graph, key)
        if len(tensors) == 1:
            fed[tensors[0].name] = value
    return fed


def _will_run_in_step(op, known_values):
    """Returns whether a step runs an operator that is inside conditions; None if this is unknown before the step."""
    for predicate, branch in enclosing_branches(op):
        while predicate is not None and predicate.op.type == "Identity" and predicate.name not in known_values:
            predicate = predicate.op.inputs[0]
        decided = None if predicate is None else known_values.get(predicate.name, tf.get_static_value(predicate))
        if decided is None:
            return None
        if bool(decided) != branch:
            return False
    return True


def find_source_kind(op_type: str) -> str | None:
    if op_type.startswith(_BATCHES):
        return "batch"
    definition = operator_definition(op_type)
    names = {attribute.name for attribute in definition.attr} if definition is not None else set()
    if op_type.startswith(_RANDOM) or ({"seed", "seed2"} <= names and "Dataset" not in op_type):
        return "random"
    return None


def _is_number(dtype: tf.DType) -> bool:
    dtype = dtype.base_dtype
    return dtype.is_floating or dtype.is_integer or dtype.is_bool
