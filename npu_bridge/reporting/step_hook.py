"""Defines `StepHook`, the base class of reporting hooks, which fetch loss, loss scale and skipped steps."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.gradients.arithmetic import gradient_values
from npu_bridge.gradients.collections import (
    LEARNING_RATE,
    LOSS_SCALE,
    STEP_IS_DUE,
    STEP_SKIPPED,
    UNSCALED_LOSS,
    gradients_of,
)
from npu_bridge.gradients.steps.skips_in_a_row import SkipsInARow
from npu_bridge.graph.operators import producers
from npu_bridge.graph.run import SessionRun, run_of_context
from npu_bridge.graph.variables import global_step_of
from npu_bridge.reporting.run_size import samples_of_batch
from npu_bridge.session.precision import policy_of_last_step

_GraphKeys = tf.compat.v1.GraphKeys


class Observation(NamedTuple):
    """The numbers of one `session.run` of the training loop; a number that the graph does not compute is None.

    `precision` is the dtype in which the step was computed, such as "bfloat16, imitated" or "float32"; None without a
    precision option.
    """

    loss: float | None
    loss_scale: float | None
    skipped: bool
    learning_rate: float | None = None
    precision: str | None = None


class StepHook(tf.estimator.SessionRunHook):
    """A hook that fetches loss, loss scale and the skipped flag with every step, and passes them to `on_step`.

    It finds its tensors in `begin`, so one hook object can be used for several graphs in turn. It warns if step after
    step is skipped (`SkipsInARow`).

    A run that does not train is no step: nothing is fetched, and `on_step` is not called. In a graph without an
    optimizer that is recognised, every run is a step. Nothing is fetched that makes this rank exchange values or need a
    feed. In a step of any optimizer but the graph's last one, nothing is fetched that takes a batch, either.

    Args:
      loss: a scalar tensor or its name. None: the loss that the optimizer recorded, or else the first loss in the
        graph's `LOSSES` collection.
    Raises:
      ValueError: in `begin`, if the graph has no tensor of the given name.
    Graph: reads collections, adds nothing.
    Ranks: local.
    """

    def __init__(self, loss: tf.Tensor | str | None = None):
        self._loss = loss
        self._fetches: dict[str, tf.Tensor] = {}
        self._wanted: weakref.WeakKeyDictionary[SessionRun, dict[str, tf.Tensor]] = weakref.WeakKeyDictionary()
        self._gradient_ops: frozenset[tf.Operation] = frozenset()  # of the last optimizer
        self._has_decided = True  # False if the run only accumulated gradients: it neither applied nor skipped them
        self._fixed_rate: float | None = None
        self._global_step = None
        self._graph: Any = None
        self._skips = SkipsInARow()

    def begin(self):
        """Finds the tensors of the graph that is about to run."""
        graph = tf.compat.v1.get_default_graph()
        self._skips = SkipsInARow(graph=graph)
        self._wanted.clear()
        candidates = {
            "loss": self._find_loss(graph),
            "loss_scale": _latest_in_collection(graph, LOSS_SCALE),
            "skipped": _latest_in_collection(graph, STEP_SKIPPED),
            "is_due": _latest_in_collection(graph, STEP_IS_DUE),
            "learning_rate": _latest_in_collection(graph, LEARNING_RATE),
        }
        self._fetches = {name: tensor for name, tensor in candidates.items() if isinstance(tensor, tf.Tensor)}
        rate = candidates["learning_rate"]
        self._fixed_rate = rate if isinstance(rate, float) else None
        self._global_step = global_step_of(graph)
        self._graph = graph
        self._gradient_ops = frozenset(gradient_values(grad).op for grad in gradients_of(graph))

    @property
    def samples_per_step(self) -> int | None:
        """Samples of all ranks in one step; None if the session's graph does not show the number."""
        own = samples_of_batch(self._graph, self._fetches.get("loss"))
        return None if own is None else own * collective.current().size

    def before_run(self, run_context):
        """Fetches the tensors in the same run as the step."""
        step = self.step_in(run_context)
        if step is None:
            return None
        wanted = self._wanted.get(step)
        if wanted is None:
            is_own = self._is_of_last_optimizer(step)
            wanted = {name: each for name, each in self._fetches.items() if _can_fetch(step, name, each, is_own)}
            self._wanted[step] = wanted
        return tf.estimator.SessionRunArgs(wanted) if wanted else None

    def after_run(self, run_context, run_values):
        """Makes an `Observation` of the values of a step, and calls `on_step`."""
        if self.step_in(run_context) is None:
            return
        policy = policy_of_last_step(run_context.session)
        results = {"learning_rate": self._fixed_rate, **(run_values.results or {})}
        observation = Observation(
            loss=_mean_loss(results.get("loss")),
            loss_scale=float(results["loss_scale"]) if "loss_scale" in results else None,
            skipped=bool(results.get("skipped", False)),
            learning_rate=None if results["learning_rate"] is None else float(results["learning_rate"]),
            precision=None if policy is None else policy.dtype_description,
        )
        self._has_decided = bool(results.get("is_due", True))
        if "skipped" in results and self._has_decided:
            self._skips.count_steps(observation.skipped, observation.loss_scale, observation.loss)
        self.on_step(run_context.session, observation)

    def on_step(self, session, observation: Observation) -> None:
        """Called after each step; overridden by subclasses."""

    def read_step(self, session) -> int:
        """Returns the current global step; 0 in a graph without one.

        A value fetched along with the step can be from before or after the update, so reading takes another session
        run.
        """
        return int(session.run(self._global_step)) if self._global_step is not None else 0

    @staticmethod
    def step_in(run_context) -> SessionRun | None:
        """Returns the description of a run; None if the run is no step."""
        run = run_of_context(run_context)
        return run if run.is_step else None

    def _is_of_last_optimizer(self, step: SessionRun) -> bool:
        """Returns whether a run is a step of the graph's last optimizer, whose numbers this hook shows."""
        return not self._gradient_ops.isdisjoint(step.op_set)

    def _find_loss(self, graph) -> tf.Tensor | None:
        if self._loss is None:
            recorded = _latest_in_collection(graph, UNSCALED_LOSS)
            listed = graph.get_collection(_GraphKeys.LOSSES)
            return recorded if recorded is not None else (listed[0] if listed else None)
        name = self._loss if isinstance(self._loss, str) else self._loss.name
        try:
            return graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{type(self).__name__}: loss names no tensor of this graph. Expected the name of a scalar "
                f"tensor; got {name!r}. Give the loss an explicit name with tf.identity(loss, name=...), or "
                "leave loss=None to use the loss that the optimizer recorded."
            ) from error


def _can_fetch(run: SessionRun, name: str, tensor: tf.Tensor, is_own: bool) -> bool:
    # Whether another optimizer skips its step is decided by its own gradients, which this run does not compute.
    is_decided = name not in ("skipped", "is_due") or run.op_set.issuperset(producers(tensor.op.inputs))
    return is_decided and run.can_add(tensor, may_change_state=is_own)


def _mean_loss(loss: Any) -> float | None:
    """Returns the mean of a fetched loss. For a scalar, `np.mean` would take a third of a small step's Python time."""
    if loss is None:
        return None
    return float(loss) if isinstance(loss, (float, np.floating)) else float(np.mean(loss))


def _latest_in_collection(graph, collection: str) -> tf.Tensor | None:
    entries = graph.get_collection(collection)
    return entries[-1] if entries else None
