"""`register_float_function` and its siblings: move operator types between the lists of mixed precision.

    register_float_function("Softmax")      # in the default graph: sessions of this graph follow
    lists = OpLists().with_half("Softmax")  # or as a value, for `from_opt_level` and `modify_mixlist`

The lists belong to a graph, never to the process. They change which operators a precision mode lowers. Without a mode,
and after the switch of an accelerated training, the lists have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from npu_bridge.base.arguments import check_instance
from npu_bridge.base.errors import did_you_mean, message
from npu_bridge.base.files import write_atomically
from npu_bridge.session.precision.mixlist import Mixlist
from npu_bridge.session.precision.rewriter import has_floating_type

_KEY = ("npu_bridge", "op_lists")  # TensorFlow exports collections with text keys only


class OpLists(NamedTuple):
    """Lists of operator types for mixed precision. A type is in at most one list: a later call moves the type.

    Attributes:
      half: types that compute in the low dtype.
      floats: types that keep their dtype.
      promote: types that are lowered only between lowered operators, and stay float32 after a float32 operator.
    """

    half: frozenset[str] = frozenset()
    floats: frozenset[str] = frozenset()
    promote: frozenset[str] = frozenset()

    def with_half(self, *op_types: str) -> OpLists:
        """Returns lists with `op_types` added to `half`; raises ValueError for a type that cannot be lowered."""
        return self._with_types_in_list("register_half_function", "half", op_types)

    def with_float(self, *op_types: str) -> OpLists:
        """Returns lists with `op_types` added to `floats`; raises ValueError for a type that cannot be lowered."""
        return self._with_types_in_list("register_float_function", "floats", op_types)

    def with_promote(self, *op_types: str) -> OpLists:
        """Returns lists with `op_types` added to `promote`; raises ValueError for a type that cannot be lowered."""
        return self._with_types_in_list("register_promote_function", "promote", op_types)

    def register(self, graph: tf.Graph | None = None) -> None:
        """Adds these lists to the lists of a graph; None means the default graph."""
        _update_registered_lists(
            graph, lambda lists: lists.with_half(*self.half).with_float(*self.floats).with_promote(*self.promote)
        )

    def as_mixlist(self) -> Mixlist:
        """Converts the lists to a `Mixlist`."""
        return Mixlist(allowed=self.half, denied=self.floats, following=self.promote)

    def write_mixlist(self, path: str) -> None:
        """Writes a file for the option `modify_mixlist`, completely or not at all."""
        following = sorted(self.promote)
        content = {
            "black-list": {"to-add": sorted(self.floats), "to-remove": following},
            "white-list": {"to-add": sorted(self.half), "to-remove": following},
        }
        write_atomically(path, json.dumps(content, indent=2) + "\n")

    def write_operator_dtypes(self, path: str, low_dtype: str) -> None:
        """Writes a file for the option `customize_dtypes`, which all precision modes allow; omits `promote` types."""
        dtypes = {**dict.fromkeys(sorted(self.floats), "float32"), **dict.fromkeys(sorted(self.half), low_dtype)}
        rules = (f"OpType::{name}:InputDtype:{dtype},OutputDtype:{dtype}\n" for name, dtype in dtypes.items())
        write_atomically(path, "".join(rules))

    def _with_types_in_list(self, function: str, list_name: str, op_types: Iterable[str]) -> OpLists:
        for op_type in op_types:
            _check_op_type(function, op_type)
        moved = frozenset(op_types)
        return OpLists(
            **{field: getattr(self, field) - moved | (moved if field == list_name else set()) for field in self._fields}
        )


def register_half_function(op_type: str, graph: tf.Graph | None = None) -> None:
    """Makes operators of a type compute in the low dtype, regardless of TensorFlow's lists.

    Call it before the first session run that computes these operators. A later call for the same type wins.

    Args:
      op_type: a TensorFlow operator type, such as "Softmax".
      graph: the graph; None means the default graph.
    Raises:
      TypeError: `op_type` is not a text.
      ValueError: there is no such type, or the type has no floating-point dtype to choose.
    """
    _update_registered_lists(graph, lambda lists: lists.with_half(op_type))


def register_float_function(op_type: str, graph: tf.Graph | None = None) -> None:
    """Makes operators of a type keep their dtype; arguments and errors as for `register_half_function`."""
    _update_registered_lists(graph, lambda lists: lists.with_float(op_type))


def register_promote_function(op_type: str, graph: tf.Graph | None = None) -> None:
    """Makes operators of a type follow their inputs.

    They compute in float32 unless all inputs are lowered. Arguments and errors are as for `register_half_function`.
    """
    _update_registered_lists(graph, lambda lists: lists.with_promote(op_type))


def registered_lists(graph: tf.Graph) -> OpLists:
    """Returns the lists registered for a graph, which can be empty."""
    kept = graph.get_collection_ref(_KEY)
    return kept[0] if kept else OpLists()


def _update_registered_lists(graph, change_lists):
    graph = tf.compat.v1.get_default_graph() if graph is None else graph
    graph.get_collection_ref(_KEY)[:] = [change_lists(registered_lists(graph))]


def _check_op_type(where: str, op_type: Any) -> None:
    expected = "the type of a TensorFlow operator with a floating dtype"
    fix = 'Pass "Softmax", for example, or the op.type of an operator.'
    check_instance(where, "the operator type", op_type, str, "a text", fix, expected)
    is_known = op_type.isidentifier() and hasattr(tf.raw_ops, op_type)
    if is_known and has_floating_type(op_type):
        return
    fix = did_you_mean(op_type, () if is_known else dir(tf.raw_ops), "Read the type of an operator from op.type.")
    problem = "this type has no floating dtype to choose" if is_known else "there is no such operator type"
    raise ValueError(message(where, problem, expected, repr(op_type), fix))
