"""Reports how a restored object-based checkpoint or Keras file differs from a training with other stages or ranks.

Object-based checkpoints are restored object by object, as soon as an object exists. Variables that the checkpoint lacks
silently keep their initial values, and unused values are silently ignored. This report is logged once, before the first
update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_bridge import collective
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.savers import is_restored, names_restored_but_unused
from npu_bridge.gradients.checkpoints import kept_state
from npu_bridge.gradients.checkpoints.rank_values import RankValues

_CHECKPOINT_LABEL = "the restored checkpoint"


def log_restore_differences(
    state: dict, rule_variables: Sequence, optimizer: Any, rank_values: Sequence[RankValues]
) -> None:
    """Logs on rank 0 how the restored state differs from the state of the training, if the optimizer was restored.

    Args:
      state: the state of a pipeline, by name.
      rule_variables: the variables of the optimizer that updates.
      optimizer: the object that is saved as the optimizer, or None.
      rank_values: the `RankValues` whose restored rows have not been used yet.
    """
    size = collective.current().size
    counts = {name: count for values in rank_values for name, count in values.counts().items()}
    merged = {name: count for name, count in counts.items() if count > 1 and count != size}
    kept_state.warn_about_averaged_state(
        _CHECKPOINT_LABEL, [_name_without_output(name) for name in merged], merged.values()
    )
    if not any(map(is_restored, rule_variables)):
        return
    parts = [part for name, part in state.items() if not name.endswith("of_ranks")]
    of_stages = [var for part in parts for var in (part.variables if isinstance(part, tf.Module) else [part])]
    slots = [_name_without_output(variable.name) for variable in rule_variables if not is_restored(variable)]
    begun = [*slots, *(_name_without_output(variable.name) for variable in of_stages if not is_restored(variable))]
    kept_state.warn_about_missing_state(_CHECKPOINT_LABEL, begun, slots)
    below = [f"{name}/{left}" for name, part in state.items() for left in names_restored_but_unused(part)]
    left = [name for name in (*names_restored_but_unused(optimizer), *below) if not name.startswith("of_ranks")]
    kept_state.warn_about_dropped_state(
        _CHECKPOINT_LABEL, [name for name in left if kept_state.belongs_to_optimizer_state(name, ())]
    )


def _name_without_output(name):
    return name.partition(":")[0]
