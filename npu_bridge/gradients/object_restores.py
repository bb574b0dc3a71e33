"""Reports how object-based checkpoints and Keras' files differ from a training with other stages or ranks.

Such checkpoints are restored part by part, each as soon as it exists. So missing values silently keep their start, and
unused ones are silently left over. The report is made once, when the first step is about to update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_bridge import collective
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.savers import restored_and_unused, was_restored
from npu_bridge.gradients import kept_state
from npu_bridge.gradients.rank_values import RankValues

_WHICH = "the restored checkpoint"


def tell(state: dict, of_rule: Sequence, optimizer: Any, rank_values: Sequence[RankValues]) -> None:
    """Logs the differences on rank 0, if the optimizer was restored.

    Args:
      state: the state that a pipeline keeps, by name.
      of_rule: the variables of the optimizer that updates.
      optimizer: the object that is saved as the optimizer, or None.
      rank_values: those that hold rows which were not taken yet.
    """
    size = collective.current().size
    counts = {name: count for values in rank_values for name, count in values.counts().items()}
    merged = {name: count for name, count in counts.items() if count > 1 and count != size}
    kept_state.say_merged(_WHICH, [_plain(name) for name in merged], merged.values())
    if not any(map(was_restored, of_rule)):
        return
    parts = [part for name, part in state.items() if not name.endswith("of_ranks")]
    of_stages = [var for part in parts for var in (part.variables if isinstance(part, tf.Module) else [part])]
    slots = [_plain(variable.name) for variable in of_rule if not was_restored(variable)]
    begun = [*slots, *(_plain(variable.name) for variable in of_stages if not was_restored(variable))]
    kept_state.say_begun(_WHICH, begun, slots)
    below = [f"{name}/{left}" for name, part in state.items() for left in restored_and_unused(part)]
    left = [name for name in (*restored_and_unused(optimizer), *below) if not name.startswith("of_ranks")]
    kept_state.say_dropped(_WHICH, [name for name in left if kept_state.is_kept(name, ())])


def _plain(name):
    return name.partition(":")[0]
