"""Combines the gradients or updates of ranks by Adasum: in pairs, depending on the angle between the two."""

from __future__ import annotations

import logging
from typing import Any

from npu_bridge import collective
from npu_bridge.base.arguments import check_choice, check_count
from npu_bridge.base.errors import message, say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.collective import fragments, wire_names
from npu_bridge.collective.adasum_tree import AdasumTree
from npu_bridge.collective.engines.communicator import Communicator
from npu_bridge.gradients.arithmetic import average_sparse_rows, gradient_values, unscale_in_float32
from npu_bridge.gradients.first_step.start_values import compare_variables_before_first_run
from npu_bridge.gradients.graph_mode import (
    assign_constrained,
    group_with_update,
    is_building_graph,
    value_before_update,
)
from npu_bridge.gradients.stage import FROZEN_UNCHANGED, VERDICT
from npu_bridge.gradients.stages.all_reduce import (
    AllReduce,
    replace_gradients,
    static_bytes,
    wait_for_all_gradients,
)


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class Adasum(AllReduce):
    """Combines the gradients or the updates of all ranks by Adasum, in place of the all-reduce that averages gradients.

    Two tensors a and b of one variable become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: the sum of orthogonal
    tensors, the mean of equal tensors. More ranks are combined in a binary tree of neighbouring ranks, or of
    neighbouring groups of ranks whose gradients are averaged first.

    `on="gradients"`: gradients are combined before the update. Sparse gradients stay sparse and give the same result as
    dense gradients. A step whose gradients overflow on one rank is skipped on all ranks. The results are checked, too,
    because a sum can overflow even if no gradient does.

    `on="weights"`: every rank updates with its own gradients, or with the mean gradients of its group. All ranks then
    set each variable to the old value minus the Adasum of (old - new). Before the update, all ranks decide from these
    gradients whether to skip the step. Optimizer slots differ between groups and are never exchanged. A variable is
    sent as a whole, even if its gradient is sparse.

    Args:
      averaged_ranks: the number of neighbouring ranks that average their gradients before Adasum combines the means: 1
        for no averaging, "host" for all ranks of a host.
      on: which values are combined, "gradients" or "weights".
    Raises:
      TypeError: `averaged_ranks` is neither an integer nor "host".
      ValueError: `averaged_ranks` is below 1, or `on` is neither "gradients" nor "weights". When gradients are
        computed: the number of groups is not a power of two.
    Graph: for each fragment and level of the tree, two exchanges between pairs: one of values, half as large as on the
      level before, and one of three numbers for each variable. Finally an all-gather. In total a rank sends about as
      many bytes as in an all-reduce. With `on="weights"` also a copy of each variable.
    """

    needs = (VERDICT,)

    def __init__(self, averaged_ranks: int | str = 1, on: str = "gradients"):
        super().__init__(type(self).__name__)
        fix = "Leave it out to combine every two ranks."
        if not isinstance(averaged_ranks, str) or averaged_ranks != "host":
            what = "'host', or a number of ranks"
            averaged_ranks = check_count("Adasum", "averaged_ranks", averaged_ranks, fix, value_text=what)
        self._averaged_ranks = averaged_ranks
        fix = "Leave it out to combine gradients."
        self._combines_weights = check_choice("Adasum", "on", on, ("gradients", "weights"), fix) == "weights"
        self.keeps_usable = self._combines_weights  # a sum of gradients can be too large where no gradient is
        self.differ_between_ranks = ("slots",) if self._combines_weights else ()  # weights are equal after each update
        if self._combines_weights:
            # The Adasum of unchanged variables changes nothing.
            self.place, self.gives = "synchronise", (FROZEN_UNCHANGED,)
            self.needs_unscaled_gradients = True

    def get_config(self):
        return {"averaged_ranks": self._averaged_ranks, "on": "weights" if self._combines_weights else "gradients"}

    def agreed_settings(self, grads_and_vars):
        ranks = collective.current()
        if ranks.size == 1:
            return {}
        config = {**self.get_config(), "averaged_ranks": _count_averaged_ranks(self._averaged_ranks, ranks)}
        return {**super().agreed_settings(grads_and_vars), "Adasum": str(config)}

    def all_reduce(self, step):
        ranks = collective.current()
        if ranks.size == 1:
            return
        tree = AdasumTree(ranks, _count_averaged_ranks(self._averaged_ranks, ranks))
        if self._combines_weights and tree.averaged_ranks == 1:
            return
        combined, of_sparse = (
            (tree.mean, _average_sparse_gradient) if self._combines_weights else (tree.combine, _combine_sparse)
        )
        with tf.name_scope(f"{self.transfer_name}_Adasum"):
            sent = [
                None if grad is None else unscale_in_float32(grad, step.divisor)
                for grad in wait_for_all_gradients(step.on_wire)
            ]
            results = _combine_dense_gradients(
                sent, self.fragments(step.grads_and_vars), combined, f"{self.transfer_name}_adasum"
            )
            for position, grad in enumerate(sent):
                if isinstance(grad, tf.IndexedSlices):
                    results[position] = of_sparse(grad, tree, f"{self.transfer_name}_adasum_sparse_{position}")
            replace_gradients(step, results)
        step.mark_as_unscaled()

    def gate(self, step, update):
        ranks = collective.current()
        if not self._combines_weights or ranks.size == 1:
            return update()
        tree = AdasumTree(ranks, _count_averaged_ranks(self._averaged_ranks, ranks))
        if tree.groups == 1:  # all ranks have the same gradients, and so the same updates
            return update()
        variables = update.variables
        old_values = [value_before_update(variable) for variable in variables]
        with tf.control_dependencies(old_values):
            updated = update()
        with tf.name_scope(f"{self.transfer_name}_Adasum"), wire_names.record_collective_names() as transfers:
            with tf.control_dependencies([] if updated is None else [updated]):
                assigned = self._combine_updates(variables, old_values, tree)
        if is_building_graph():
            # Ranks must start from equal values here, too, even if no gradients are exchanged.
            compare_variables_before_first_run(self.transfer_name, lambda: variables, transfers)
        return group_with_update(updated, *assigned)

    def _combine_updates(self, variables, old_values, tree):
        old_values = [unscale_in_float32(value, None) for value in old_values]
        deltas = [old - unscale_in_float32(variable.read_value(), None) for variable, old in zip(variables, old_values)]
        # A few values that overflow 16 bits must not discard the whole variable's update.
        finite = [
            delta if variable.dtype.size >= 4 else tf.where(tf.math.is_finite(delta), delta, tf.zeros_like(delta))
            for variable, delta in zip(variables, deltas)
        ]
        cut = [range(len(finite))] if finite else []
        combined = _combine_dense_gradients(finite, cut, tree.combine_groups, f"{self.transfer_name}_adasum_weights")
        return [
            assign_constrained(variable, tf.cast(old - combined[position], variable.dtype.base_dtype))
            for position, (variable, old) in enumerate(zip(variables, old_values))
        ]


def _count_averaged_ranks(wanted: Any, ranks: Communicator) -> int:
    """Returns how many neighbouring ranks average their gradients; raises ValueError if ranks cannot be grouped so."""
    averaged = ranks.local_size if wanted == "host" else wanted
    groups, left = divmod(ranks.size, averaged)
    if left or groups & (groups - 1) or not groups:
        problem = "ranks are combined in pairs, pairs of pairs and so on"
        what = "ranks" if averaged == 1 else f"groups of {averaged} ranks that average"
        got = f"{ranks.size} ranks" if averaged == 1 else f"{ranks.size} ranks in groups of {averaged}"
        fix = "Start another number of ranks, or leave Adasum out."
        raise ValueError(message("Adasum", problem, f"1, 2, 4, 8... {what}", got, fix))
    if wanted == "host" and ranks.local_rank != ranks.rank % averaged:
        problem = "ranks of one host are not neighbours"
        expected = f"rank {ranks.rank} as number {ranks.rank % averaged} of its host"
        fix = "Start the ranks host by host, with the same number on each host."
        raise ValueError(message("Adasum", problem, expected, f"number {ranks.local_rank}", fix))
    if groups == 1:
        say_once(logging.INFO, f"Adasum: all {ranks.size} ranks average their gradients; nothing is left to combine.")
    return averaged


def _combine_dense_gradients(grads, cut, combine, name):
    """Applies `combine` to dense tensors, one fragment after the other; returns the results by position."""
    sizes_bytes = [0 if grad is None else static_bytes(gradient_values(grad)) for grad in grads]
    results = {}
    for number, positions in enumerate(fragments.split_large_fragments(cut, sizes_bytes, collective.current().size)):
        together = _combine_tensors([grads[position] for position in positions], combine, f"{name}_{number}")
        results.update(zip(positions, together))
    return results


def _combine_tensors(grads, combine, name):
    """Applies `combine` to tensors: all tensors of one dtype together, but each tensor of unknown shape alone."""
    results = {}
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        of_dtype = [number for number, grad in enumerate(grads) if grad.dtype == dtype]
        known = [number for number in of_dtype if grads[number].shape.is_fully_defined()]
        sizes = [grads[number].shape.num_elements() for number in known]
        if known:
            flat = tf.concat([tf.reshape(grads[number], [-1]) for number in known], axis=0)
            parts = tf.split(combine(flat, sizes, f"{name}_{dtype.name}"), sizes)
            results.update(zip(known, parts))
        for number in set(of_dtype).difference(known):
            flat = tf.reshape(grads[number], [-1])
            results[number] = combine(flat, None, f"{name}_{dtype.name}_{number}")
    return [
        tf.ensure_shape(tf.reshape(results[number], tf.shape(grad)), grad.shape) for number, grad in enumerate(grads)
    ]


def _combine_sparse(grad, tree, name):
    """Combines a sparse gradient of all ranks; the result has every row of any rank once, in ascending order."""
    rows = tf.sort(tf.unique(tree.ranks.all_gather(grad.indices, f"{name}_indices"))[0])
    own = tf.math.unsorted_segment_sum(grad.values, tf.searchsorted(rows, grad.indices), tf.size(rows))
    combined = tree.combine(tf.reshape(own, [-1]), None, name)
    values = tf.ensure_shape(tf.reshape(combined, tf.shape(own)), [None, *grad.values.shape.as_list()[1:]])
    return tf.IndexedSlices(values, rows, grad.dense_shape)


def _average_sparse_gradient(grad, tree, name):
    """Averages a sparse gradient over the ranks of a group; the result has each row once."""
    return average_sparse_rows(grad, tree.gather_in_group, tree.averaged_ranks, name)
