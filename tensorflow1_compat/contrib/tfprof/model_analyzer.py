"""`tf.contrib.tfprof.model_analyzer`: counts the parameters and operations of a graph."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

_Options = tf.profiler.ProfileOptionBuilder
TRAINABLE_VARS_PARAMS_STAT_OPTIONS = _Options.trainable_variables_parameter()
FLOAT_OPS_OPTIONS = _Options.float_operation()
PRINT_ALL_TIMING_MEMORY = _Options.time_and_memory()
ALL_ADVICE = {
    "ExpensiveOperationChecker": {},
    "AcceleratorUtilizationChecker": {},
    "JobChecker": {},
    "OperationChecker": {},
}
Profiler, profile, advise = tf.profiler.Profiler, tf.profiler.profile, tf.profiler.advise


def print_model_analysis(
    graph, run_meta=None, op_log=None, tfprof_cmd="scope", tfprof_options=TRAINABLE_VARS_PARAMS_STAT_OPTIONS
):
    """Prints and returns the quantities that the options select: `total_parameters`, `total_float_ops` and more.

    Args:
      graph: the graph.
      run_meta: RunMetadata; only needed for times and memory.
      op_log: not used.
      tfprof_cmd: "scope", "graph", "code" or "op".
      tfprof_options: one of the option constants of this module, or a dictionary.
    """
    return tf.profiler.profile(graph, run_meta=run_meta, op_log=op_log, cmd=tfprof_cmd, options=tfprof_options)
