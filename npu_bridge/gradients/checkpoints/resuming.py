"""Restores checkpoints of TF 1 graphs into trainings with other stages, another optimizer or another number of ranks.

A saver of TensorFlow needs every variable of the graph in the checkpoint, and restores nothing if one is missing. So
`Saver.restore` is replaced when the process builds a pipeline. The replacement compares the keys of the checkpoint with
the keys of the saver, and decides for each key by the rules of `kept_state`. Sessions, `MonitoredTrainingSession` and
Estimators all call `Saver.restore`. TensorFlow alone restores graphs without a pipeline, and checkpoints that have
every variable.
"""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import numpy as np

from npu_bridge import collective
from npu_bridge.base.errors import listed
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.savers import (
    key_and_slice_of,
    keys_in_object_checkpoint,
    variables_by_key,
    wrap_restore,
)
from npu_bridge.base.tf_internals.training import hyperparameter_variables
from npu_bridge.collective.apart import run_in_separate_graph
from npu_bridge.gradients.checkpoints import kept_state, rank_values
from npu_bridge.gradients.collections import LOSS_SCALE_STATE, pipelines_in
from npu_bridge.gradients.stage import variables_restarting_at_zero


class _TensorRead(NamedTuple):
    """One tensor that a saver reads: its key and slice in the checkpoint, and the graph tensor with its value."""

    key: str
    part: str
    output: tf.Tensor


class _RestorePlan(NamedTuple):
    """A plan that says how each variable of a saver is restored from a checkpoint.

    For state that differs between ranks, a checkpoint has a matrix with a row for each rank.

    Attributes:
      reads: all tensors that the saver reads.
      begun: variables that start from initial values, by key and slice.
      merged: for keys whose variable gets the mean of rows, the number of rows.
      rows_of: for keys whose variable is now equal on all ranks, the key of the rows whose mean it gets.
      dropped: keys of the checkpoint with state of stages or optimizers that this graph does not use.
      slots: keys of the saver with state of the optimizer.
      restarting: keys and slices that start from initial values even if the checkpoint has them.
    """

    reads: list[_TensorRead]
    begun: dict
    merged: dict[str, int]
    rows_of: dict[str, str]
    dropped: list[str]
    slots: set[str]
    restarting: set


@functools.cache
def watch_savers() -> None:
    """Makes all savers of TF 1 graphs restore stage state by the table in `kept_state.py` from now on."""
    wrap_restore(_restore_with_stage_state)


def remove_missing_state(settings: Any) -> Any:
    """Removes from warm-start settings the state of stages and optimizers that the checkpoint lacks.

    Args:
      settings: `tf.estimator.WarmStartSettings` for the default graph, whose patterns select variables by name.
    Returns:
      Settings with a list of variables in place of the patterns; `settings` if there is nothing to remove.
    """
    patterns = settings.vars_to_warm_start
    graph = tf.compat.v1.get_default_graph()
    pipelines = pipelines_in(graph)
    if not pipelines or not isinstance(patterns, (list, tuple)) or not all(isinstance(each, str) for each in patterns):
        return settings
    reader = tf.train.load_checkpoint(settings.ckpt_to_initialize_from)
    state, slots = _optional_variables(None, graph, pipelines)
    found = [each for pattern in patterns for each in graph.get_collection("variables", scope=pattern)]
    begun = [
        key_and_slice_of(each)[0]
        for each in found
        if key_and_slice_of(each) in state and not reader.has_tensor(key_and_slice_of(each)[0])
    ]
    if not begun:
        return settings
    told = [name for name in begun if kept_state.OF_RANKS not in name]
    kept_state.warn_about_missing_state(os.path.basename(settings.ckpt_to_initialize_from), told, slots)
    return settings._replace(vars_to_warm_start=[each for each in found if key_and_slice_of(each)[0] not in begun])


def _restore_with_stage_state(restore, saver, session, path):
    graph = None if tf.executing_eagerly() else getattr(session, "graph", None)
    pipelines = pipelines_in(graph) if graph is not None else []
    plan = _plan_restore(saver, graph, pipelines, os.fspath(path)) if pipelines and path else None
    if plan is None or not (plan.begun or plan.rows_of):
        restore(saver, session, path)
    else:
        _restore_by_plan(plan, saver, session, os.fspath(path))
    rank_values.reread_restored_rows(graph, session)
    if plan is not None:
        _log_plan(plan, os.path.basename(path))


def _plan_restore(saver, graph, pipelines, path):
    """Returns the plan of a restore; None if TensorFlow alone must restore the file, or report its damage."""
    try:
        reader = tf.train.load_checkpoint(path)
        shapes = reader.get_variable_to_shape_map()
    except (tf.errors.OpError, ValueError):
        return None
    if keys_in_object_checkpoint(reader):
        return None
    state, slots = _optional_variables(saver, graph, pipelines)
    reads = _find_reads(saver, graph)
    at_zero = {id(variable) for pipeline in pipelines for variable in variables_restarting_at_zero(pipeline.stages)}
    restarting = {place for place, variable in state.items() if id(variable) in at_zero}
    lacking = {(read.key, read.part) for read in reads if read.key not in shapes or (read.key, read.part) in restarting}
    begun = {place: state.get(place) for place in sorted(lacking, key=[*state, *lacking].index)}
    _check_none_missing([key for (key, _), variable in begun.items() if variable is None], path, shapes)
    wanted = {read.key for read in reads}
    rows = {key: key.rpartition(kept_state.OF_RANKS)[2] for key in shapes if kept_state.OF_RANKS in key}
    counts = {key: shapes[key][0] for key in rows if shapes[key] and shapes[key][0] > 1}
    rows_of = {rows[key]: key for key in counts if key not in wanted and rows[key] in wanted}
    size = collective.current().size
    merged = {
        rows[key]: count for key, count in counts.items() if rows[key] in rows_of or key in wanted and count != size
    }
    dropped = [key for key in shapes if key not in wanted and key not in rows]
    names = [
        key_and_slice_of(variable)[0] for variable in graph.get_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES)
    ]
    dropped = [key for key in dropped if kept_state.belongs_to_optimizer_state(key, names)]
    return _RestorePlan(reads, begun, merged, rows_of, dropped, slots, restarting)


def _optional_variables(saver, graph, pipelines):
    """Returns a dict of the variables that a checkpoint can lack, by key and slice, and the keys of optimizer state."""
    with graph.as_default():  # sessions can be restored outside the block of their graph
        of_rules = [variable for pipeline in pipelines for variable in pipeline.saved.optimizer_variables()]
        of_stages = [variable for pipeline in pipelines for variable in pipeline.variables]
    of_rules += [
        variable
        for pipeline in pipelines
        for variable in hyperparameter_variables(pipeline.inner and pipeline.inner.saved_as)
    ]
    by_key = (variables_by_key(saver) if saver is not None else None) or {}
    called = {id(variable): (key, "") for key, variable in by_key.items()}
    trained = {id(variable) for variable in graph.get_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES)}
    optional = [*of_rules, *of_stages, *graph.get_collection(LOSS_SCALE_STATE)]
    state = {
        called.get(id(variable), key_and_slice_of(variable)): variable
        for variable in optional
        if id(variable) not in trained and variable.graph is graph
    }
    rules = {id(variable) for variable in of_rules}
    return state, {key for (key, _), variable in state.items() if id(variable) in rules}


def _find_reads(saver, graph):
    restoring = graph.get_operation_by_name(saver.saver_def.restore_op_name)

    def needs(op):
        return [] if op.type == "RestoreV2" else [*op.control_inputs, *(tensor.op for tensor in op.inputs)]

    found = []
    for op in search([restoring], needs):
        if op.type == "RestoreV2":
            keys, parts = (tf.get_static_value(tensor) for tensor in op.inputs[1:3])
            found += [_TensorRead(key.decode(), part.decode(), out) for key, part, out in zip(keys, parts, op.outputs)]
    return found


def _check_none_missing(keys, path, shapes):
    if keys:
        text = (
            f"checkpoint: {path} lacks {len(keys)} variables of this graph that are not state of stages or optimizers. "
            f"Expected {listed(sorted(keys))}; got {len(shapes)} other variables. Restore "
            f"the checkpoint into the model from which it was saved, or use a Saver of only the variables in it."
        )
        raise tf.errors.NotFoundError(None, None, text)


def _restore_by_plan(plan, saver, session, path):
    """Feeds available values to the saver; a separate graph reads them, as the session's graph can be finalized."""
    there = [read for read in plan.reads if (read.key, read.part) not in plan.begun and read.key not in plan.rows_of]
    merged = [read for read in plan.reads if read.key in plan.rows_of]
    keys = [*(read.key for read in there), *(plan.rows_of[read.key] for read in merged)]
    parts = [*(read.part for read in there), *("" for _ in merged)]
    values = _read_values(path, keys, parts, [read.output.dtype for read in [*there, *merged]])
    fed = {read.output: value for read, value in zip([*there, *merged], values)}
    fed.update({read.output: _mean_of_rows(fed[read.output]) for read in merged})
    for read in plan.reads:
        if (read.key, read.part) in plan.begun:
            fed[read.output] = _zeros_like_variable(plan.begun[read.key, read.part])
    session.run(saver.saver_def.restore_op_name, fed)
    # Last, for slots that start as a copy of a variable.
    session.run([variable.initializer for variable in plan.begun.values()])


def _read_values(path, keys, parts, dtypes):
    if not keys:
        return []
    return run_in_separate_graph(
        lambda: tf.raw_ops.RestoreV2(prefix=path, tensor_names=keys, shape_and_slices=parts, dtypes=dtypes)
    )


def _mean_of_rows(rows):
    if rows.dtype == np.bool_:
        return rows.any(axis=0)
    return rows.mean(axis=0, dtype=np.float64).astype(rows.dtype) if rows.dtype.kind in "fV" else rows[0]


def _zeros_like_variable(variable):
    """Returns zeros in the shape of a variable, for the saver to assign before the variable is initialised."""
    shape = variable.shape if variable.shape.is_fully_defined() else variable.initial_value.shape
    sizes = [size or 0 for size in shape.as_list()] if shape.rank is not None else [0]
    return np.zeros(sizes, variable.dtype.base_dtype.as_numpy_dtype)


def _log_plan(plan, checkpoint):
    begun = [key for key, part in plan.begun if kept_state.OF_RANKS not in key and (key, part) not in plan.restarting]
    kept_state.warn_about_missing_state(checkpoint, begun, plan.slots)
    kept_state.warn_about_averaged_state(checkpoint, list(plan.merged), plan.merged.values())
    kept_state.warn_about_dropped_state(checkpoint, plan.dropped)
