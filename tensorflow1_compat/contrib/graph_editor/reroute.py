"""`tf.contrib.graph_editor.reroute`: changes connections between operations."""

from __future__ import annotations

from npu_bridge.base.tf_internals import graphs
from tensorflow1_compat.contrib.graph_editor.util import make_list_of_op, make_list_of_t


def add_control_inputs(op, cops):
    """Adds control inputs to an operation, so that the operation runs after these inputs."""
    graphs.add_control_inputs(op, make_list_of_op(cops))


def remove_control_inputs(op, cops):
    """Removes control inputs from an operation."""
    gone = set(make_list_of_op(cops))
    kept = [other for other in op.control_inputs if other not in gone]
    graphs.remove_control_inputs(op)
    graphs.add_control_inputs(op, kept)


def reroute_ts(ts0, ts1, can_modify=None, cannot_modify=None):
    """Makes operations that read the tensors `ts1` read the tensors `ts0` instead.

    Args:
      ts0, ts1: lists of tensors of the same length.
      can_modify: operations that can be changed; default: all.
      cannot_modify: operations that stay unchanged.

    Returns:
      The number of changed inputs.
    """
    modifiable = None if can_modify is None else set(make_list_of_op(can_modify))
    unmodifiable = set(make_list_of_op(cannot_modify or []))
    count, news, olds = 0, make_list_of_t(ts0), make_list_of_t(ts1)
    if len(news) != len(olds):
        raise ValueError(f"reroute_ts: ts0 and ts1 must have the same length; got {len(news)} and {len(olds)}.")
    for new, old in zip(news, olds):
        for reader in set(old.consumers()):
            if reader in unmodifiable or (modifiable is not None and reader not in modifiable):
                continue
            for place, each in enumerate(reader.inputs):
                if each is old:
                    graphs.update_input(reader, place, new)
                    count += 1
    return count


def swap_ts(ts0, ts1, can_modify=None, cannot_modify=None):
    """Makes operations that read the tensors `ts0` read `ts1` and vice versa; arguments as in `reroute_ts`."""
    firsts, seconds, count = make_list_of_t(ts0), make_list_of_t(ts1), 0
    readers = [(set(first.consumers()), set(second.consumers())) for first, second in zip(firsts, seconds)]
    for first, second, (of_first, of_second) in zip(firsts, seconds, readers):
        count += reroute_ts(first, second, list(of_second), cannot_modify)
        count += reroute_ts(second, first, list(of_first - of_second), cannot_modify)
    return count
