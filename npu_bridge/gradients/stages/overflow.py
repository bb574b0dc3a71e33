"""Skips a step on every rank when its gradients overflow, and counts skipped steps."""

from __future__ import annotations

import functools
import logging
from typing import Any

from npu_bridge import collective
from npu_bridge.base.errors import say_once
from npu_bridge.base.flat_tensors import pieces_to_flats
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import is_compiled_by_xla
from npu_bridge.collective.this_process import place_in_job
from npu_bridge.gradients import collections
from npu_bridge.gradients.arithmetic import has_finite_norm, in_true_units, values_of
from npu_bridge.gradients.graph_mode import building_graph, run_if, value_before_update
from npu_bridge.gradients.stage import Stage, changes_after_verdict
from npu_bridge.gradients.stand_ins import is_narrow
from npu_bridge.gradients.step_report import KeptReport, overflow_of
from npu_bridge.graph.loop import allow_copies
from npu_bridge.graph.operators import sources_among

# The NPU stack's documentation and scripts know the decision by this name.
_FETCHED_NAME = "overflow_status_reduce_all"


class OverflowCheck(Stage):
    """Lets an update happen only when the gradients are usable on every rank.

    Usable means that the global norm of the gradients, in true units, is a finite float32. So there is no NaN and no
    Inf among them, and the optimizer can square every one of them without overflowing its slots.

    Checks the gradients given to the update, and those that this pipeline delivered if the given ones were made
    from them (clipping by value turns an Inf into a finite number). Where this pipeline reduces, every rank judges the
    very tensors it sends, in true units, and that alone decides unless the caller changes a gradient: the mean of
    usable gradients is usable. So the decision is the same before and after the reduction.

    Args:
      name: prefix of the names of collectives; the same on every rank.
      is_joint: decide together with the other ranks.
      judges_local: judge what this rank sends, before communication; needs a stage before this one that reduces.
      decides_early: take the joint decision from the local verdicts, before the last fragment is reduced, so that only
        that fragment's own updates wait for it. A changed gradient (clipped, say) is checked again.
      combined: a `CombinedGradients` to judge many gradients at once; None to judge each by itself.
    Attributes:
      is_joint: as above.
    Graph: publishes `collections.STEP_SKIPPED`; a boolean tensor `overflow_status_reduce_all:0` in the caller's name
      scope is True when the step happens. Scripts fetch it by this name.
    """

    place = "verdict"
    gives = ("a verdict",)

    def __init__(
        self,
        name: str,
        is_joint: bool,
        judges_local: bool = False,
        decides_early: bool = False,
        combined: Any = None,
    ):
        self.needs = ("reduced gradients",) if judges_local else ()
        self.is_joint = is_joint
        self._name = name
        self._judges_local = judges_local
        self._decides_early = decides_early
        self._combined = combined

    @property
    def transfer_name(self):
        return self._name if self.is_joint else ""

    def agreed_settings(self, grads_and_vars):
        return {"is_tailing_optimization": self._decides_early} if self.is_joint else {}

    def accumulate(self, step):
        usable = step.losses.usable  # moves each of several loss scales
        if usable and self.is_joint and collective.current().size > 1:
            with tf.name_scope(f"{self._name}_OverflowCheck"):
                agreed = tf.unstack(self._agree(tf.stack(list(usable.values())), "each"))
            step.losses.usable = dict(zip(usable, agreed))

    def before_reduce(self, step):
        if not self._judges_local or collective.current().size == 1:
            return
        with tf.name_scope(f"{self._name}_Allreduce"):
            # Only values: adding up rows here again would judge other tensors than those that are sent.
            sent = [values_of(grad) for grad in step.on_wire if grad is not None]
            sent = sent if self._combined is None else self._combined.joined(sent)
            step.is_usable_here = _are_usable([in_true_units(values, step.divisor) for values in sent], step)
            if self._decides_early and step.gradients:
                step.should_apply = self._agree(step.is_usable_here, "early")

    def after_reduce(self, step):
        # Other stages can make usable gradients from unusable ones.
        if step.is_usable_here is None and any(map(changes_after_verdict, self.pipeline)):
            step.is_usable_here = _are_usable(step.gradients, step)

    def gate(self, step, update):
        with tf.name_scope(f"{self._name}_OverflowCheck"):
            (step.should_apply,) = step.when_due(lambda: [self._decide(step)], lambda: [tf.constant(False)])
            if building_graph():
                collections.publish(collections.STEP_SKIPPED, overflow_of(step))
        if building_graph():
            tf.identity(step.should_apply, name=_FETCHED_NAME)
        return run_if(step.should_apply, update)

    def _decide(self, step):
        changed, sources = _changed_and_their_sources(step)
        is_every_one_checked = any(map(_may_spoil, self.pipeline))
        if is_every_one_checked:
            changed = step.gradients
        if step.should_apply is not None and not changed:
            return step.should_apply
        if step.is_usable_here is not None and not changed:
            # The inputs of an early decision, once all gradients are reduced.
            with tf.control_dependencies([values_of(grad) for grad in pieces_to_flats(step.gradients)]):
                return self._agree(tf.identity(step.is_usable_here), "final")
        verdict = _are_usable(step.gradients + sources, step)
        # Gradients that were added up in variables can be applied when there is no batch left to judge.
        is_of_this_batch = sources or is_every_one_checked or len(changed) < len(step.gradients)
        for earlier in (step.is_usable_here, step.should_apply) if is_of_this_batch else ():
            if earlier is not None:
                verdict = tf.logical_and(verdict, earlier)
        return self._agree(verdict, "final")

    def _agree(self, verdict, moment):
        return collective.current().all_true(verdict, f"{self._name}_{moment}_decision") if self.is_joint else verdict


def _are_usable(gradients, step):
    """Returns whether these gradients, and those of the losses they sum, are usable."""
    return functools.reduce(tf.logical_and, step.losses.usable.values(), has_finite_norm(pieces_to_flats(gradients)))


def _may_spoil(stage):
    """Returns True for a stage that can make judged gradients unusable."""
    return (stage.place == "reduce" or changes_after_verdict(stage)) and not stage.keeps_usable


def _changed_and_their_sources(step):
    """Returns the given gradients that the pipeline did not deliver, and the delivered ones they were made from."""
    delivered = [grad for grad in step.delivered if grad is not None]
    delivered_ids = {id(grad) for grad in delivered}
    given_ids = {id(grad) for grad in step.gradients}
    changed = [grad for grad in step.gradients if id(grad) not in delivered_ids]
    replaced = [grad for grad in delivered if id(grad) not in given_ids]
    return changed, sources_among(replaced, changed)


class NarrowVariableGuard(Stage):
    """Keeps the old value of every element of a 16-bit variable or slot whose new value is not finite.

    An optimizer computes in float32, but in float16 values above 65504 are infinite, so a usable gradient can still
    make an Inf. Variables of 32 and 64 bits are left alone, and cost nothing.
    """

    place = "guard"

    def gate(self, step, update):
        if not any(is_narrow(variable) for variable in update.variables):
            return update()
        narrow = [variable for variable in [*update.variables, *update.slots()] if is_narrow(variable)]
        old_values = [value_before_update(variable) for variable in narrow]
        with tf.control_dependencies(old_values):
            updated = update()
        kept = []
        with tf.control_dependencies([] if updated is None else [updated]):
            for variable, old in zip(narrow, old_values):
                new = variable.read_value()
                kept.append(variable.assign(tf.where(tf.math.is_finite(tf.cast(new, tf.float32)), new, old)))
        return updated if updated is None or tf.executing_eagerly() else tf.group(updated, *kept)


class SkipRecord(Stage):
    """Counts skipped steps and remembers whether the last one was skipped; changes no gradient.

    Args:
      optimizer: a Keras optimizer whose `iterations` also counts skipped steps; None to count updates only.
    Attributes:
      skipped_steps: int64 scalar variable.
      last_step_skipped: boolean scalar variable.
      report: the last step's loss, overflow and loss scale.
    """

    place = "record"

    def __init__(self, optimizer: Any = None):
        self._optimizer = optimizer
        self.report = KeptReport()
        with tf.init_scope():
            self.skipped_steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="skipped_steps")
            self.last_step_skipped = tf.Variable(False, trainable=False, name="last_step_skipped")

    def state(self):
        return {"skipped_steps": self.skipped_steps, "last_step_skipped": self.last_step_skipped}

    def after_update(self, step):
        self.report.note(step)
        if step.should_apply is None:
            return None
        return step.run_when_due(lambda: self._note(step.is_skipped()))

    def _note(self, is_skipped):
        counted = self.skipped_steps.assign_add(tf.cast(is_skipped, tf.int64))
        noted = self.last_step_skipped.assign(is_skipped)
        changed = [counted, noted]
        if self._optimizer is not None:
            iterations = self._optimizer.iterations
            changed.append(iterations.assign_add(tf.cast(is_skipped, iterations.dtype)))
        return None if tf.executing_eagerly() else tf.group(*changed)


class DropNotice(Stage):
    """Warns on rank 0 when the first step is dropped that no loss scale can fix; changes no gradient.

    With a loss scale, skipped steps are part of its search, and other code warns when the search fails. Without one,
    the next step is computed from the same variables, and most likely dropped as well.

    Args:
      words: the warning.
    Graph: an operator of Python on every rank, run in dropped steps only; left out where XLA compiles.
    """

    place = "record"

    def __init__(self, words: str):
        self._words = words

    def after_update(self, step):
        if step.should_apply is None:
            return None
        if tf.executing_eagerly():
            return self._say() if bool(step.is_skipped()) else None
        if is_compiled_by_xla(tf.compat.v1.get_default_graph()):
            return None
        return run_if(step.is_skipped(), lambda: allow_copies(tf.numpy_function(self._say, [], [])))

    def _say(self):
        if place_in_job()[0] == 0:
            say_once(logging.WARNING, self._words)
