"""Averages gradients over the ranks: all-reduces dense ones in aggregation fragments, and gathers sparse ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_bridge import collective
from npu_bridge.base import environment
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.terminal import logger
from npu_bridge.collective import fragments, groups, wire
from npu_bridge.collective.cost_model import LEAST_STEPS
from npu_bridge.gradients.arithmetic import (
    backward_order_key,
    gather_sparse_rows,
    gradient_values,
    map_values,
    multiply_values,
    sum_repeated_rows,
)
from npu_bridge.gradients.stage import ReducingStage
from npu_bridge.gradients.step import Step
from npu_bridge.options import of_graph

_LOG = logger(__name__)


class AllReduce(ReducingStage):
    """Replaces every gradient by its mean over the ranks; does nothing when one process trains alone.

    Dense gradients are all-reduced in aggregation fragments, in the order in which the backward pass computes them. The
    split is set by `hccl.split.api`; the default is 96.54 % / 3.46 % of the bytes. A large fragment is sent in several
    pieces, only a few of them at the same time. The rows of a sparse gradient are gathered, so that it stays sparse.
    Rows with the same index are added up before and after, so that the norm equals the norm of a dense gradient.

    `Step.on_wire` holds the values to send. An overflow check of this rank's gradients reads the same tensors, so it
    checks every value that is sent.

    Gradients that are scaled, checked or of float16 are multiplied by a power of two, at most 1 / ranks, before their
    sum. This keeps a sum of finite values finite, and loses bits only of float16 numbers below 6e-5. The missing factor
    goes into `Step.divisor`, by which the pipeline later divides. In a 16-bit wire format gradients are only rounded,
    and their mean is of float32.

    If the decision about the step is known early, only the last fragment waits for the decision, if it is small. With
    `hcom_parallel=False` in the options of the run, no all-reduce starts before every gradient of this rank exists.

    Args:
      name: prefix of the names of collectives; the same on every rank.
      wire_dtype: the 16-bit dtype to which gradients are rounded before they are sent; None for no rounding. Gradients
        that already have 16 bits keep their dtype.
    Graph: name scope `<name>_Allreduce`; the collectives themselves are in the scope `transfers` at the root.
    """

    keeps_usable = True  # a mean of finite gradients is finite

    def __init__(self, name: str, wire_dtype: tf.DType | None = None):
        self.transfer_name = name
        self._wire_dtype = wire_dtype
        self._split: fragments.SplitStrategy | None = None

    def bind(self, name, first_parameters=None):
        super().bind(name, first_parameters)
        self._split = first_parameters and fragments.SplitStrategy(first_parameters=first_parameters)

    def __repr__(self):
        is_plain = type(self) is not AllReduce or self._wire_dtype is None
        return super().__repr__() if is_plain else f"AllReduce(wire={self._wire_dtype.name!r})"

    def sent_bytes(self, other_bytes, ranks):
        return other_bytes if self._wire_dtype is None else other_bytes * self._wire_dtype.size / tf.float32.size

    def split_strategy(self) -> fragments.SplitStrategy:
        """Returns this optimizer's split of gradients into fragments; the first call takes the split of the process."""
        if self._split is None:
            self._split = _split_of_process()
        return self._split

    def fragments(self, grads_and_vars):
        gradients = [grad for grad, _ in grads_and_vars]
        return cut_fragments(gradients, [variable.name for _, variable in grads_and_vars], self.split_strategy())

    def agreed_settings(self, grads_and_vars):
        if collective.current().size == 1:
            return {}
        return {
            "wire": "none" if self._wire_dtype is None else self._wire_dtype.name,
            "hcom_parallel": _is_overlapping_backward_pass(),
            "FUSION_TENSOR_SIZE": fragments.all_reduce_bytes(collective.current().size, _can_overlap_steps()),
            "NPU_TRANSFERS_IN_FLIGHT": fragments.max_concurrent_all_reduces(),
        }

    def before_reduce(self, step):
        if collective.current().size > 1:
            self._check_numbers(step.grads_and_vars)
            with tf.name_scope(f"{self.transfer_name}_Sent"):
                step.on_wire = [
                    grad if grad is None else self._prepare_to_send(grad) for grad, _ in step.grads_and_vars
                ]

    def _check_numbers(self, grads_and_vars):
        for grad, variable in grads_and_vars:
            if grad is not None and grad.dtype.is_complex:
                problem = f"ranks cannot exchange the complex gradient of {variable.name}"
                fix = "Train the real and the imaginary part as two variables."
                expected, got = "a gradient of real numbers", grad.dtype.name
                raise TypeError(message(type(self).__name__, problem, expected, got, fix))

    def _prepare_to_send(self, grad):
        if isinstance(grad, tf.IndexedSlices):
            grad = sum_repeated_rows(grad)
        if self._wire_dtype is None:
            return grad
        return map_values(grad, lambda x: wire.round_for_sending(x, self._wire_dtype))

    def all_reduce(self, step):
        communicator = collective.current()
        if communicator.size == 1:
            return
        if self._wire_dtype is not None:
            method = _RoundedMeanReduction(communicator)
        elif step.check is not None or step.divisor is not None or any(map(_is_float16, step.gradients)):
            method = _FiniteSumReduction(communicator)
        else:
            method = _MeanReduction(communicator)
        with tf.name_scope(f"{self.transfer_name}_Allreduce"):
            sent, cut = wait_for_all_gradients(step.on_wire), self.fragments(step.grads_and_vars)
            reduced = {
                # Different ranks can send the same row: their sum is needed for the correct norm in clipping.
                position: sum_repeated_rows(method.gather(grad, f"{self.transfer_name}_sparse_{position}"))
                for position, grad in enumerate(sent)
                if isinstance(grad, tf.IndexedSlices)
            }
            decision = None if step.check is None else step.check.early_decision
            reduced.update(self._reduce_dense(sent, cut, method, decision))
        replace_gradients(step, reduced)
        if method.leftover != 1.0:
            step.record_factor(method.leftover)

    def _reduce_dense(self, gradients, fragment_positions, reduction, overflow_decision):
        """Returns reduced gradients by position. A small last fragment waits for the decision unless it is None."""
        results, sent, most = {}, [], fragments.max_concurrent_all_reduces()
        sizes_bytes = [static_bytes(grad) if isinstance(grad, tf.Tensor) else 0 for grad in gradients]
        last_bytes = sum(sizes_bytes[position] for position in fragment_positions[-1]) if fragment_positions else 0
        # If a large fragment waited, the network would be idle while the updates occupy the processor.
        overlaps = _can_overlap_steps()
        is_small = last_bytes <= fragments.all_reduce_bytes(reduction.size, overlaps)
        waits_for_decision = set(fragment_positions[-1]) if fragment_positions and is_small else set()
        for number, positions in enumerate(
            fragments.split_large_fragments(fragment_positions, sizes_bytes, reduction.size, overlaps)
        ):
            waits_for = [] if len(sent) < most else [sent[-most]]
            if overflow_decision is not None and positions[0] in waits_for_decision:
                waits_for.append(overflow_decision)
            tensors = [gradients[position] for position in positions]
            reduced = reduction.reduce(tensors, f"{self.transfer_name}_fragment_{number}", waits_for)
            sent.append(reduced[0])
            results.update(zip(positions, reduced))
        return results


class _MeanReduction:
    """A reduction that averages gradients in their dtype.

    Attributes:
      size: number of ranks.
      leftover: the factor by which results must still be divided to give the mean.
    """

    leftover = 1.0

    def __init__(self, communicator):
        self._communicator = communicator
        self.size = communicator.size

    def reduce(self, tensors, name, after):
        return self._communicator.all_reduce(tensors, name, after=after)

    def gather(self, grad, name):
        return self._gather_weighted(grad, 1.0 / self.size, name)

    def _gather_weighted(self, grad, weight, name):
        if weight != 1.0:
            grad = map_values(grad, lambda values: multiply_values(values, weight))
        return gather_sparse_rows(grad, self._communicator.all_gather, name)


class _FiniteSumReduction(_MeanReduction):
    """A reduction that sums gradients after multiplying them by a power of two, which keeps the sums finite."""

    def __init__(self, communicator):
        super().__init__(communicator)
        self._prescale = fragments.lossless_prescale(communicator.size)
        self.leftover = communicator.size * self._prescale

    def reduce(self, tensors, name, after):
        return self._communicator.all_reduce(tensors, name, average=False, prescale=self._prescale, after=after)

    def gather(self, grad, name):
        return self._gather_weighted(grad, self._prescale, name)


class _RoundedMeanReduction(_MeanReduction):
    """A reduction that sends gradients in 16 bits and averages them in float32."""

    def reduce(self, tensors, name, after):
        return wire.average_tensors(self._communicator, tensors, name, after)

    def gather(self, grad, name):
        gathered = self._gather_weighted(grad, 1.0, name)
        return map_values(gathered, lambda values: tf.cast(values, tf.float32) / self.size)


def _split_of_process():
    return groups.groups_of_process().strategies.strategy_of(groups.WORLD)


def cut_fragments(
    gradients: Sequence[Any], names: Sequence[str], strategy: fragments.SplitStrategy | None = None
) -> list[list[int]]:
    """Splits the dense gradients into aggregation fragments.

    Args:
      gradients: dense tensors, `tf.IndexedSlices` or Nones.
      names: names of their variables, for the log line that shows the order to which indices refer.
      strategy: the split strategy; None for the current setting of the process.
    Returns:
      For each fragment a list of positions of dense gradients, in the order in which the backward pass computes them.
    Raises:
      ValueError: an index of the strategy is beyond the last gradient.
    """
    dense = [position for position, grad in enumerate(gradients) if isinstance(grad, tf.Tensor)]
    ready = sorted(dense, key=backward_order_key(gradients))
    strategy = strategy or _split_of_process()
    if strategy.last_indices is not None:
        _LOG.info(
            "Gradients in the order of set_split_strategy_by_idx: %s",
            ", ".join(f"{index} {names[position]}" for index, position in enumerate(ready)),
        )
    cut = strategy.split([static_bytes(gradients[position]) for position in ready])
    return [[ready[index] for index in fragment] for fragment in cut]


def wait_for_all_gradients(gradients: Sequence) -> list:
    """Returns the gradients to send. With `hcom_parallel=False`, each of them waits until all have been computed.

    The option `hcom_parallel` comes from the current graph; without options, as in eager execution, it is on.
    """
    of_graph.record_built_value("hcom_parallel", _is_overlapping_backward_pass())
    if _is_overlapping_backward_pass():
        return list(gradients)
    with tf.control_dependencies([gradient_values(grad) for grad in gradients if grad is not None]):
        return [grad if grad is None else map_values(grad, tf.identity) for grad in gradients]


def _is_float16(grad):
    """Returns whether a sum over the ranks can be infinite although no gradient is, as the largest number is 65504."""
    return grad.dtype == tf.float16


def _is_overlapping_backward_pass():
    options = of_graph.options_of_current_graph()
    return options is None or options.hcom_parallel


def _can_overlap_steps():
    """Returns whether the options of the run allow consecutive steps to overlap."""
    options = of_graph.options_of_current_graph()
    in_a_row = options is not None and options.iterations_per_loop > LEAST_STEPS
    return in_a_row and environment.read_overlapped_steps() is not False


def static_bytes(tensor: tf.Tensor) -> int:
    """Returns the size of a tensor in bytes by its static shape; 0 for an unknown shape."""
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def replace_gradients(step: Step, reduced_by_position: dict) -> None:
    """Replaces the gradients of a step by reduced gradients, given by position, in dtypes of no fewer bits."""

    def cast_without_loss(position, grad):
        made = reduced_by_position[position]
        return made if made.dtype.size > grad.dtype.size else map_values(made, lambda x: tf.cast(x, grad.dtype))

    step.grads_and_vars = [
        (None if grad is None else cast_without_loss(position, grad), variable)
        for position, (grad, variable) in enumerate(step.grads_and_vars)
    ]
