"""Stores the options of a run with the graph that it trains, for code that has only the graph.

The builder of a graph (an optimizer, say) does not know the run's configuration, and the code with the configuration
does not know the builder. So the code with the configuration publishes the options, and the builder reads them. Options
can also arrive with the session, after the graph was built. They are then compared with the values with which the graph
was built.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from npu_bridge.base import kept_in_graph
from npu_bridge.base.errors import message, say_once
from npu_bridge.options.training_options import TrainingOptions

_KEY = ("npu_bridge", "options")  # TensorFlow exports collections with text keys only


@dataclass
class _GraphOptions:
    options: TrainingOptions | None = None
    built_with: dict[str, Any] = field(default_factory=dict)


def record_options(options: TrainingOptions, graph: Any = None) -> None:
    """Records the options with which a graph will run, for `options_of`; works for a finalized graph, too.

    Args:
      options: the options. Warns if the graph was built with other values.
      graph: the graph; None for the default graph.
    """
    record = _find_or_make_record(graph)
    record.options = options
    for name, value in record.built_with.items():
        _COMPARISONS[name](getattr(options, name), value, is_built=True)


def options_of_current_graph() -> TrainingOptions | None:
    """Returns the options of the graph that is being built; None without published options, or in eager execution."""
    record = _find_current_record()
    return record.options if record is not None else None


def options_of(graph: Any) -> TrainingOptions | None:
    """Returns the options published for a graph, or None."""
    return _find_or_make_record(graph).options


def record_built_value(name: str, value: Any) -> None:
    """Records the value with which a part of the current graph was built.

    Args:
      name: an option, `is_tailing_optimization` or `hcom_parallel`.
      value: the value. Warns if the options of the run, published before or later, have another value.
    """
    record = _find_current_record()
    if record is None:
        return
    record.built_with[name] = value
    if record.options is not None:
        _COMPARISONS[name](getattr(record.options, name), value, is_built=False)


def option_value_at_build(name: str, graph: Any) -> Any:
    """Returns the value of option `name` with which a graph was built; None if no value was recorded."""
    return _find_or_make_record(graph).built_with.get(name)


def _compare_tailing(configured: bool, built: bool, is_built: bool) -> None:
    """Warns if `is_tailing_optimization` differs between NPURunConfig (default False) and NPUOptimizer."""
    del is_built
    if configured != built:
        problem = "NPURunConfig (or the session) and NPUOptimizer differ"
        got = f"{configured} in NPURunConfig and {built} in NPUOptimizer"
        fix = f"Pass is_tailing_optimization={built or configured} in both; the value of NPUOptimizer is used."
        say_once(logging.WARNING, message("is_tailing_optimization", problem, "the same value in both", got, fix))


def _compare_hcom_parallel(configured_value: bool, value_at_build: bool, is_built: bool) -> None:
    """Warns if `hcom_parallel=False` comes too late, for a graph that reduces gradients as soon as they are ready."""
    if is_built and not configured_value and value_at_build:
        problem = "the option came after the gradients were built"
        expected = "a session with hcom_parallel=False before compute_gradients"
        fix = "Use NPUEstimator, or make the session before the optimizer; results are the same."
        say_once(logging.WARNING, message("hcom_parallel", problem, expected, "a later session", fix))


_COMPARISONS = {"is_tailing_optimization": _compare_tailing, "hcom_parallel": _compare_hcom_parallel}


def _find_or_make_record(graph: Any = None) -> _GraphOptions:
    if graph is None:
        import tensorflow as tf

        graph = tf.compat.v1.get_default_graph()
    return kept_in_graph.find_or_make(graph, _KEY, _GraphOptions)


def _find_current_record() -> _GraphOptions | None:
    import tensorflow as tf

    with tf.init_scope():  # for a function: the graph that contains it
        return None if tf.executing_eagerly() else _find_or_make_record()
