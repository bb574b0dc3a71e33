"""Checks gradients, and skips a step on all ranks if they overflow on one; keeps Inf out of 16-bit variables."""

from __future__ import annotations

import functools
from typing import Any

from npu_bridge import collective
from npu_bridge.base.flat_tensors import replace_pieces_by_flat_tensors
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients import collections
from npu_bridge.gradients.arithmetic import gradient_values, has_finite_norm, is_16_bit, unscale_gradient
from npu_bridge.gradients.graph_mode import group_with_update, is_building_graph, run_if, value_before_update
from npu_bridge.gradients.stage import REDUCED_GRADIENTS, DecidingStage, ReducingStage, Stage, changes_gradients
from npu_bridge.gradients.step import RankCheck
from npu_bridge.graph.operators import sources_among

# The documentation of the NPU stack and scripts use this name for the decision.
_FETCHED_NAME = "overflow_status_reduce_all"


class OverflowCheck(DecidingStage):
    """Applies an update only if the gradients are usable on every rank; otherwise skips the step.

    Gradients are usable if half the sum of their squares, after unscaling, is finite: in float32, or in float64 for
    float64 gradients. Then no gradient is NaN or Inf, and the optimizer can square every value without overflow.

    With `checks_local_gradients`, every rank checks the tensors that it sends; a mean of usable gradients is usable.
    Otherwise, the stage checks the reduced gradients. Gradients that the caller changes before the update are checked
    again, together with the gradients from which they were made, because clipping can hide an Inf.

    Args:
      name: prefix of the names of collectives; the same on every rank.
      is_joint: skip a step on all ranks if gradients are unusable on one.
      checks_local_gradients: check the tensors that this rank sends, before communication; needs a stage that reduces
        gradients.
      decides_early: decide from the local checks of all ranks before the last fragment is reduced, so that only the
        updates of this fragment wait for it. Gradients that the caller changes, for example clips, are checked again.
      combined: a `CombinedGradients`, to check many gradients at once; None to check them separately.
    Graph: publishes `STEP_SKIPPED` and `STEP_IS_DUE` of `collections`. A boolean tensor `overflow_status_reduce_all:0`
      in the caller's name scope, which scripts fetch, is True if the step is applied.
    """

    def __init__(
        self,
        name: str,
        is_joint: bool,
        checks_local_gradients: bool = False,
        decides_early: bool = False,
        combined: Any = None,
    ):
        self.needs = (REDUCED_GRADIENTS,) if checks_local_gradients else ()
        self.is_joint = is_joint
        self._name = name
        self._checks_local_gradients = checks_local_gradients
        self._decides_early = decides_early
        self._combined = combined

    @property
    def transfer_name(self):
        return self._name if self.is_joint else ""

    def agreed_settings(self, grads_and_vars):
        return {"is_tailing_optimization": self._decides_early} if self.is_joint else {}

    def each_batch(self, step):
        verdicts = step.losses.verdicts  # decide how each of several loss scales changes
        if verdicts and self.is_joint and collective.current().size > 1:
            with tf.name_scope(f"{self._name}_OverflowCheck"):
                step.losses.verdicts = tf.unstack(self._agree_on_verdict(tf.stack(verdicts), "each"))

    def before_reduce(self, step):
        if self.checks_scaled_gradients:
            unscaled = [unscale_gradient(grad, step.divisor) for grad in step.gradients]
            with tf.name_scope(f"{self._name}_OverflowCheck"):
                usable = tf.logical_and(has_finite_norm(step.gradients), _are_gradients_finite(unscaled, step))
            step.check = RankCheck(usable)
            return
        if not self._checks_local_gradients or collective.current().size == 1:
            return
        with tf.name_scope(f"{self._name}_Allreduce"):
            # Only values: adding up rows here again would check other tensors than the tensors that are sent.
            # Cast back first: the update gets the gradient's own dtype, not that of the wire, and unscales it there.
            sent = [
                tf.cast(gradient_values(sent), grad.dtype)
                for sent, (grad, _) in zip(step.on_wire, step.grads_and_vars)
                if grad is not None
            ]
            sent = sent if self._combined is None else self._combined.join_tensors(sent)
            usable = _are_gradients_finite([unscale_gradient(values, step.divisor) for values in sent], step)
            is_early = self._decides_early and bool(step.gradients)
            step.check = RankCheck(usable, self._agree_on_verdict(usable, "early") if is_early else None)

    def after_reduce(self, step):
        # Later stages can turn unusable gradients into usable ones.
        if step.check is None and any(changes_gradients(stage, ["after_reduce"]) for stage in self.stages):
            step.check = RankCheck(_are_gradients_finite(step.gradients, step))

    def gate(self, step, update):
        with tf.name_scope(f"{self._name}_OverflowCheck"):
            (step.should_apply,) = step.tensors_if_due(
                lambda: [self._decide_on_update(step)], lambda: [tf.constant(False)]
            )
            if is_building_graph():
                collections.publish_in_graph(collections.STEP_SKIPPED, step.overflow())
                collections.publish_in_graph(collections.STEP_IS_DUE, True if step.is_due is None else step.is_due)
        if is_building_graph():
            tf.identity(step.should_apply, name=_FETCHED_NAME)
        return run_if(step.should_apply, update)

    def _decide_on_update(self, step):
        """Returns the decision about the update, from the checks that its gradients need.

        - As the pipeline returned them: the check of this rank's gradients.
        - Changed by a stage or by the caller: this check, and a check of the gradients of the update.
        - If no gradient is of this batch, or none was checked earlier: a check of the gradients of the update.

        A check of gradients of this batch reads all of them, so that updates of all parts decide alike.
        """
        changed, replaced = _changed_and_replaced_gradients(step)
        stages_can_harm = any(map(_can_make_gradients_unusable, self.stages))
        to_check = step.gradients if stages_can_harm else changed
        if step.check is not None and not to_check:
            return self._decide_from_check(step)
        # Gradients that the caller summed in variables can be applied without a batch of their own to check.
        is_of_this_batch = (
            stages_can_harm or len(changed) < len(step.gradients) or bool(sources_among(replaced, changed))
        )
        earlier = step.check.verdicts if step.check is not None and is_of_this_batch else []
        to_check = step.gradients + (replaced if is_of_this_batch else [])
        verdict = functools.reduce(tf.logical_and, earlier, _are_gradients_finite(to_check, step))
        return self._agree_on_verdict(verdict, "final")

    def _decide_from_check(self, step):
        if step.check.early_decision is not None:
            return step.check.early_decision
        # Only once all gradients are reduced: the exchange of the verdict must not delay theirs.
        with tf.control_dependencies(
            [gradient_values(grad) for grad in replace_pieces_by_flat_tensors(step.gradients)]
        ):
            return self._agree_on_verdict(tf.identity(step.check.is_usable), "final")

    def _agree_on_verdict(self, verdict, decision):
        return collective.current().all_true(verdict, f"{self._name}_{decision}_decision") if self.is_joint else verdict


def _are_gradients_finite(gradients, step):
    """Returns whether gradients are finite, and, if they are sums over losses, the gradients of each loss as well."""
    return functools.reduce(
        tf.logical_and, step.losses.usable.values(), has_finite_norm(replace_pieces_by_flat_tensors(gradients))
    )


def _can_make_gradients_unusable(stage):
    """Returns whether a stage can make gradients unusable after they were checked."""
    is_changing = isinstance(stage, ReducingStage) or changes_gradients(stage, ["after_reduce"])
    return is_changing and not stage.keeps_usable


def _changed_and_replaced_gradients(step):
    """Returns the gradients that are not the pipeline's, and the pipeline's gradients that are not in this update."""
    delivered = [grad for grad in step.delivered if grad is not None]
    delivered_ids = {id(grad) for grad in delivered}
    given_ids = {id(grad) for grad in step.gradients}
    changed = [grad for grad in step.gradients if id(grad) not in delivered_ids]
    return changed, [grad for grad in delivered if id(grad) not in given_ids]


class NarrowVariableGuard(Stage):
    """Restores the old value of every element of a 16-bit variable or slot whose new value is not finite.

    Optimizers compute in float32, but values above 65504 are infinite in float16, so even a usable gradient can cause
    an Inf. Variables of 32 and 64 bits are not touched, and cost nothing.
    """

    place = "guard"

    def gate(self, step, update):
        if not any(is_16_bit(variable) for variable in update.variables):
            return update()
        narrow = [variable for variable in [*update.variables, *update.slots()] if is_16_bit(variable)]
        old_values = [value_before_update(variable) for variable in narrow]
        with tf.control_dependencies(old_values):
            updated = update()
        kept = []
        with tf.control_dependencies([] if updated is None else [updated]):
            for variable, old in zip(narrow, old_values):
                new = variable.read_value()
                kept.append(variable.assign(tf.where(tf.math.is_finite(tf.cast(new, tf.float32)), new, old)))
        return group_with_update(updated, *kept)
