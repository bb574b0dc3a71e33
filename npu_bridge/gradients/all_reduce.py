"""Averaging gradients over the ranks, fragment by fragment."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.collective import fragments, wire
from npu_bridge.collective.agreement import Gradient
from npu_bridge.gradients.dense_or_sparse import map_values, sum_repeated_rows, values_of
from npu_bridge.gradients.overlap import may_overlap, ready_to_travel
from npu_bridge.gradients.readiness import fragments_of, static_bytes
from npu_bridge.gradients.stage import Stage


class AllReduce(Stage):
    """Replaces every gradient by its mean over the ranks; does nothing when one process trains alone.

    Dense gradients travel in aggregation fragments, in the order they become ready, cut as `hccl.split.api` was told or
    96.54 % / 3.46 % by bytes. A large fragment goes in several transfers, and only a few transfers are under way at
    once. A sparse gradient travels by gathering its rows and stays sparse; rows with the same index are added up before
    and after, so that its norm is that of the dense one.

    What travels is made in one place, before anything else looks at it: `Step.on_wire`. The local verdict of an
    `OverflowCheck` and the transfers read those same tensors, so nothing can be sent that was not judged.

    Scaled gradients, and all that were judged, are multiplied by a power of two not above 1 / ranks on their way into
    the sum, which loses no bits and keeps a sum of finite values finite; the rest of the mean is left to the division
    by the loss scale. In a
    16-bit wire format they are rounded, nothing else: the mean is taken in float32 on the way. When the decision about
    the step is known early, only the last fragment waits for it, if it is not large. When the options of the run say
    `hcom_parallel=False`, no transfer starts before every gradient of this rank exists.

    Args:
      name: prefix of the transfers' names; the same on every rank.
      wire_dtype: the 16-bit dtype gradients are rounded to before they travel, or None for as they are. Gradients that
        have 16 bits already keep their dtype.
    Graph: name scope `<name>_Allreduce`; the transfers themselves are in the scope `transfers` at the root.
    """

    place = "reduce"
    gives = ("reduced gradients",)
    communicates = True

    def __init__(self, name: str, wire_dtype: tf.DType | None = None):
        self._name = name
        self._wire_dtype = wire_dtype

    def describe(self, step, plan):
        if collective.current().size == 1:
            return
        plan.owner = self._name
        plan.gradients = [_description(grad, variable) for grad, variable in step.grads_and_vars]
        plan.fragments = fragments_of(
            [grad for grad, _ in step.grads_and_vars], [gradient.name for gradient in plan.gradients]
        )
        plan.settings["wire"] = "none" if self._wire_dtype is None else self._wire_dtype.name
        plan.settings["hcom_parallel"] = may_overlap()
        plan.settings["FUSION_TENSOR_SIZE"] = fragments.flight_bytes(collective.current().size)
        plan.settings["NPU_TRANSFERS_IN_FLIGHT"] = fragments.most_in_flight()

    def local(self, step):
        if collective.current().size > 1:
            with tf.name_scope(f"{self._name}_Sent"):
                step.on_wire = [grad if grad is None else self._as_sent(grad) for grad, _ in step.grads_and_vars]

    def reduce(self, step):
        communicator = collective.current()
        if communicator.size == 1:
            return
        is_judged = step.is_usable_here is not None
        route = self._route(communicator, keeps_finite=is_judged or step.divisor is not None)
        with tf.name_scope(f"{self._name}_Allreduce"):
            gradients = [grad for grad, _ in step.grads_and_vars]
            travelling = ready_to_travel(step.on_wire)
            names = [variable.name for _, variable in step.grads_and_vars]
            cut = fragments_of(gradients, names)
            reduced = self._reduce_sparse(travelling, route)
            reduced.update(self._reduce_dense(travelling, cut, route, step.should_apply))
        step.grads_and_vars = [
            (_like(grad, reduced.get(position)), variable)
            for position, (grad, variable) in enumerate(step.grads_and_vars)
        ]
        if route.leftover != 1.0:
            step.multiplied_by(route.leftover)

    def _as_sent(self, grad):
        if isinstance(grad, tf.IndexedSlices):
            grad = sum_repeated_rows(grad)
        return grad if self._wire_dtype is None else map_values(grad, lambda x: wire.rounded(x, self._wire_dtype))

    def _route(self, communicator, keeps_finite):
        if self._wire_dtype is not None:
            return _Rounded(communicator)
        return _Scaled(communicator) if keeps_finite else _AsItIs(communicator)

    def _reduce_dense(self, gradients, cut, route, decision):
        results, sent, most = {}, [], fragments.most_in_flight()
        sizes_bytes = [static_bytes(grad) if isinstance(grad, tf.Tensor) else 0 for grad in gradients]
        last_bytes = sum(sizes_bytes[position] for position in cut[-1]) if cut else 0
        # A large one would leave the link idle: what the decision sets free keeps the processor from sending it.
        lets_decision_pass = set(cut[-1]) if cut and last_bytes <= fragments.flight_bytes(route.size) else set()
        for number, positions in enumerate(fragments.cut_for_flight(cut, sizes_bytes, route.size)):
            waits_for = [] if len(sent) < most else [sent[-most]]
            if decision is not None and positions[0] in lets_decision_pass:
                waits_for.append(decision)
            tensors = [gradients[position] for position in positions]
            reduced = route.reduce(tensors, f"{self._name}_fragment_{number}", waits_for)
            sent.append(reduced[0])
            results.update(zip(positions, reduced))
        return results

    def _reduce_sparse(self, gradients, route):
        # Ranks meet in rows: only added up they have the norm that the caller may clip by.
        return {
            position: sum_repeated_rows(route.gather(grad, f"{self._name}_sparse_{position}"))
            for position, grad in enumerate(gradients)
            if isinstance(grad, tf.IndexedSlices)
        }


class _AsItIs:
    """Gradients travel in their own dtype and arrive as means; sparse ones come with every row once.

    Attributes:
      size: number of ranks.
      leftover: what the results are still multiplied by, besides what they were multiplied by before.
    """

    leftover = 1.0

    def __init__(self, communicator):
        self._communicator = communicator
        self.size = communicator.size

    def reduce(self, tensors, name, after):
        return self._communicator.all_reduce(tensors, name, after=after)

    def gather(self, grad, name):
        return self._gather_weighted(grad, 1.0 / self._communicator.size, name)

    def _gather_weighted(self, grad, weight, name):
        values = grad.values if weight == 1.0 else grad.values * tf.cast(weight, grad.values.dtype)
        return tf.IndexedSlices(
            self._communicator.all_gather(values, f"{name}_values"),
            self._communicator.all_gather(grad.indices, f"{name}_indices"),
            grad.dense_shape,
        )


class _Scaled(_AsItIs):
    """A power of two on the way keeps sums finite; the division by the loss scale does the rest of the mean."""

    def __init__(self, communicator):
        super().__init__(communicator)
        self._prescale = fragments.lossless_prescale(communicator.size)
        self.leftover = communicator.size * self._prescale

    def reduce(self, tensors, name, after):
        return self._communicator.all_reduce(tensors, name, average=False, prescale=self._prescale, after=after)

    def gather(self, grad, name):
        return self._gather_weighted(grad, self._prescale, name)


class _Rounded(_AsItIs):
    """Gradients travel in 16 bits and arrive as means."""

    def reduce(self, tensors, name, after):
        return wire.mean(self._communicator, tensors, name, after)

    def gather(self, grad, name):
        gathered = self._gather_weighted(grad, 1.0, name)
        return map_values(gathered, lambda values: tf.cast(values, tf.float32) / self._communicator.size)


def _description(grad, variable):
    """What other ranks must have alike in one gradient."""
    shape = str(tuple(variable.shape.as_list())) if variable.shape.rank is not None else "unknown"
    if grad is None:
        return Gradient(variable.name, shape, "no gradient", "")
    kind = "a sparse gradient" if isinstance(grad, tf.IndexedSlices) else "a dense gradient"
    return Gradient(variable.name, shape, kind, grad.dtype.name)


def _like(grad, reduced):
    """The reduced gradient in the dtype of the local one."""
    if reduced is None:
        return None
    return map_values(reduced, lambda values: tf.cast(values, values_of(grad).dtype))
