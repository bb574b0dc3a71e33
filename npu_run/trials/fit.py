"""Records and replays `model.fit` of TensorFlow 2: weights, batches, and the losses that Keras shows."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from npu_bridge.base.files import write_atomically
from npu_bridge.base.reading import open_file, read_json
from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.graph.functions import nodes_in_functions
from npu_run.trials.hooks import is_type_lowerable
from npu_run.trials.record import RankRecordWriter, find_source_kind, folder_of_rank
from npu_run.trials.replay import write_verdict
from npu_run.trials.trial import Trial


class TrainStepCallback(tf.keras.callbacks.Callback):
    """A callback that wraps a model's `train_step`; subclasses record or replay weights and batches.

    Random numbers are drawn inside the training function, so they cannot be recorded; the same seeds reproduce them.

    Ranks: local.
    """

    def __init__(self, model: tf.keras.Model, rank: int):
        super().__init__()
        self._losses: list[float] = []
        self._batches = 0
        self._rank = rank
        self._has_begun = False
        self._train_step = model.train_step
        model.train_step = self._run_step
        model.train_function = None  # makes Keras build the function again, with this step

    def _run_step(self, data):
        with tf.init_scope():  # a model without an input shape has no weights yet
            if not self.model.built:
                self.model(tf.nest.map_structure(_zero_row_like, data[0] if isinstance(data, tuple) else data))
            self._handle_initial_weights_once()
        parts = tf.nest.flatten(data, expand_composites=True)  # those of sparse and ragged tensors, too
        given = [part for part in parts if part is not None]  # without optional inputs of Keras 3 that are left out
        values = tf.numpy_function(self.handle_batch, given, [part.dtype for part in given])
        for value, part in zip(values, given):
            value.set_shape(part.shape)
        remaining = iter(values)
        parts = [part if part is None else next(remaining) for part in parts]
        outcome = self._train_step(tf.nest.pack_sequence_as(data, parts, expand_composites=True))
        graph = tf.compat.v1.get_default_graph()
        ops = [] if tf.executing_eagerly() else [op.node_def for op in graph.get_operations()]
        self.handle_step_nodes([*ops, *nodes_in_functions(graph, ops)])
        return outcome

    def on_train_begin(self, logs=None):
        """Calls `handle_initial_weights` if the model already has weights."""
        if self.model.built:
            self._handle_initial_weights_once()

    def _handle_initial_weights_once(self):
        if not self._has_begun:
            self._has_begun = True
            self.handle_initial_weights()

    def handle_initial_weights(self) -> None:
        """Reads or changes the initial weights, before the first step."""

    def handle_batch(self, *values):
        """Returns the batch to train on, which replaces the script's batch."""
        self._batches += 1
        return list(values)

    def handle_step_nodes(self, nodes: Sequence[Any]) -> None:
        """Notes the operators of the step, as `NodeDef`s."""

    def on_train_batch_end(self, batch, logs=None):
        """Notes the loss of the step."""
        self._losses.append(float((logs or {})["loss"]))


def _zero_row_like(part: Any) -> Any:
    """Returns one row of zeros like a batch, with which a model can make its weights; unknown dimensions become 1."""
    if part is None:
        return None
    convert = {tf.RaggedTensor: tf.RaggedTensor.from_tensor, tf.SparseTensor: tf.sparse.from_dense}
    zeros = tf.zeros([1, *(length or 1 for length in part.shape[1:])], part.dtype)
    return convert.get(type(part), tf.identity)(zeros)


class RecordCallback(TrainStepCallback):
    """A callback that records the weights, batches and losses of the first steps of `fit`."""

    def __init__(self, model: tf.keras.Model, trial: Trial, rank: int):
        super().__init__(model, rank)
        self._record, self._steps = RankRecordWriter(trial.record, rank), trial.steps

    def handle_initial_weights(self):
        """Writes the initial weights."""
        self._record.save("weights.npz", numbered_weights(self.model))

    def handle_batch(self, *values):
        """Writes the batch."""
        numbers = {f"batch/{part}": value for part, value in enumerate(values) if value.dtype.kind in "biuf"}
        self._record.save(f"step_{self._batches:05d}.npz", numbers)
        self._record.facts["kinds"].update(dict.fromkeys(numbers, "batch"))
        return super().handle_batch(*values)

    def handle_step_nodes(self, nodes):
        """Lists the step's random operators as not recorded."""
        types = sorted({node.op for node in nodes if find_source_kind(node.op) == "random"})
        self._record.facts["not_recorded"].update(dict.fromkeys(types, "it is inside the function that trains"))

    def on_train_batch_end(self, batch, logs=None):
        """Notes the loss of the step; completes the record after the last recorded step."""
        super().on_train_batch_end(batch, logs)
        if len(self._losses) == self._steps:
            self.on_train_end()

    def on_train_end(self, logs=None):
        """Completes the record, also when `fit` ended before the last step to record; a later `fit` adds its steps."""
        if self._record.facts["steps"] < min(len(self._losses), self._steps):
            self._record.facts.update(steps=len(self._losses), losses=self._losses, weights_after=True)
            self._record.save("weights_after.npz", numbered_weights(self.model))
            self._record.finish()


class OperatorTypesCallback(TrainStepCallback):
    """A callback that writes a JSON list of those operator types in a step that a precision mode can lower.

    `name` and `type` of each entry are the operator type: single operators are unknown before functions are built.
    """

    def __init__(self, model: tf.keras.Model, trial: Trial, rank: int):
        super().__init__(model, rank)
        self._path = trial.operators

    def handle_step_nodes(self, nodes):
        """Writes the list of operator types."""
        float32 = {node.op for node in nodes if node.attr["T"].type == tf.float32.as_datatype_enum}
        listed = [{"name": kind, "type": kind} for kind in sorted(float32) if is_type_lowerable(kind)]
        NonFatalOutput(f"the list of operators {self._path}").attempt(
            write_atomically, self._path, json.dumps(listed, indent=1)
        )


class ReplayCallback(TrainStepCallback):
    """A callback that replays a record, and then ends the script."""

    def __init__(self, model: tf.keras.Model, trial: Trial, rank: int):
        super().__init__(model, rank)
        self._folder = folder_of_rank(trial.replay, rank)
        self._verdict = os.path.join(trial.folder, f"replay_rank_{rank}.json")
        self._facts = read_json(os.path.join(self._folder, "record.json"), within_folder=self._folder)

    def handle_initial_weights(self):
        """Loads the recorded weights."""
        saved = self._load_recorded_arrays("weights.npz")
        for name, variable in numbered_variables(self.model).items():
            if name in saved:
                variable.assign(saved[name])

    def handle_batch(self, *values):
        """Returns the recorded batch."""
        saved = self._load_recorded_arrays(f"step_{self._batches:05d}.npz")
        return super().handle_batch(*(saved.get(f"batch/{part}", value) for part, value in enumerate(values)))

    def on_train_batch_end(self, batch, logs=None):
        """Compares losses and weights after the last step, and then raises SystemExit."""
        super().on_train_batch_end(batch, logs)
        if len(self._losses) == self._facts["steps"]:
            losses = self._facts["losses"], self._losses
            write_verdict(self._verdict, self._folder, losses, numbered_weights(self.model))
            raise SystemExit(0)

    def _load_recorded_arrays(self, name: str) -> dict[str, np.ndarray]:
        with open_file(os.path.join(self._folder, name), "rb", within_folder=self._folder) as file:
            return dict(np.load(file))


def numbered_variables(model: tf.keras.Model) -> dict[str, tf.Variable]:
    """Returns the variables of a model and its optimizer by name, with a number before each name: names can repeat."""
    # In Keras 3, a second `build` of some optimizers makes new variables: that of its own loss scaling, for example.
    if model.built and hasattr(model.optimizer, "build") and not getattr(model.optimizer, "built", False):
        model.optimizer.build(model.trainable_variables)
    kept = model.optimizer.variables
    variables = [*model.variables, *(kept() if callable(kept) else kept)]
    return {f"{number}/{variable.name.partition(':')[0]}": variable for number, variable in enumerate(variables)}


def numbered_weights(model: tf.keras.Model) -> dict[str, Any]:
    """Returns the values of the variables of a model and its optimizer, with a number before each name."""
    return {name: variable.numpy() for name, variable in numbered_variables(model).items()}
