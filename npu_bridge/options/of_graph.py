"""Keeps the options of a run with the graph it trains, for code that has only the graph.

The builder of a graph (such as an optimizer) need not know the run's configuration, and the code with the configuration
need not know the builder: one publishes the options, the other asks for them. Options can also arrive after the graph
was built, with the session; they are then compared with the values that the graph was built with.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from npu_bridge.base.errors import message, say_once
from npu_bridge.options.training_options import TrainingOptions

_KEY = ("npu_bridge", "options")  # TensorFlow exports collections with text keys only


@dataclass
class _Record:
    options: TrainingOptions | None = None
    built_with: dict[str, Any] = field(default_factory=dict)


def publish(options: TrainingOptions, graph: Any = None) -> None:
    """Publishes the options under which a graph runs; works for a finalized graph too.

    Args:
      options: the options.
      graph: the graph; the default one when None. Warns if it was built with other values.
    """
    record = _record(graph)
    record.options = options
    for name, value in record.built_with.items():
        _COMPARISONS[name](getattr(options, name), value, is_built=True)


def options_of_graph() -> TrainingOptions | None:
    """Returns the options of the graph being built; None if none were published, or when executing eagerly."""
    record = _record_being_built()
    return record.options if record is not None else None


def options_of(graph: Any) -> TrainingOptions | None:
    """Returns the options published for a graph, or None."""
    return _record(graph).options


def built_with(name: str, value: Any) -> None:
    """Notes the value with which a part of the current graph was built.

    Args:
      name: an option, `is_tailing_optimization` or `hcom_parallel`.
      value: the built value. Warns if the options of the run, published before or later, differ.
    """
    record = _record_being_built()
    if record is None:
        return
    record.built_with[name] = value
    if record.options is not None:
        _COMPARISONS[name](getattr(record.options, name), value, is_built=False)


def value_built(name: str, graph: Any) -> Any:
    """Returns the value a graph was built with, or None."""
    return _record(graph).built_with.get(name)


def _compare_tailing(configured: bool, built: bool, is_built: bool) -> None:
    """Warns if the switches of NPURunConfig (default False) and NPUOptimizer, documented to agree, differ."""
    del is_built
    if configured != built:
        problem = "NPURunConfig (or the session) and NPUOptimizer differ"
        got = f"{configured} in NPURunConfig and {built} in NPUOptimizer"
        fix = f"NPUOptimizer's value is used; pass is_tailing_optimization={built or configured} in both."
        say_once(logging.WARNING, message("is_tailing_optimization", problem, "the same value in both", got, fix))


def _compare_hcom_parallel(configured: bool, built: bool, is_built: bool) -> None:
    """Warns that gradients which are reduced as they become ready cannot be held back once the graph is built."""
    if is_built and not configured and built:
        problem = "the option came when the gradients were built already"
        expected = "hcom_parallel=False to be known before compute_gradients"
        fix = "Use NPUEstimator, or make the session before the optimizer; results are the same."
        say_once(logging.WARNING, message("hcom_parallel", problem, expected, "a session made afterwards", fix))


_COMPARISONS = {"is_tailing_optimization": _compare_tailing, "hcom_parallel": _compare_hcom_parallel}


def _record(graph: Any = None) -> _Record:
    if graph is None:
        import tensorflow as tf

        graph = tf.compat.v1.get_default_graph()
    kept = graph.get_collection_ref(_KEY)
    if not kept:
        kept.append(_Record())
    return kept[0]


def _record_being_built() -> _Record | None:
    import tensorflow as tf

    with tf.init_scope():  # a function belongs to the graph it is built in
        return None if tf.executing_eagerly() else _record()
