"""`tf.contrib.graph_editor.subgraph`: views of parts of graphs with their inputs and outputs."""

from __future__ import annotations

import copy

from tensorflow1_compat.contrib.graph_editor import select
from tensorflow1_compat.contrib.graph_editor.util import make_list_of_op


class SubGraphView:
    """A list of operations with their input and output tensors.

    Attributes:
      ops: the operations.
      inputs, outputs: tensors that the operations read from outside, and that they provide to other operations.
    """

    def __init__(self, inside_ops=(), passthrough_ts=()):
        self.ops = make_list_of_op(inside_ops)
        self.graph = self.ops[0].graph if self.ops else None
        self.inputs, leaving, _ = select.compute_boundary_ts(self.ops)
        self.outputs = [*passthrough_ts, *leaving]
        self._passthrough = list(passthrough_ts)

    def remap(self, new_input_indices=None, new_output_indices=None):
        """Returns a view of the same operations with other inputs and outputs, given as positions or tensors."""
        made = copy.copy(self)
        made.inputs, made.outputs = (
            _select_by_index(self.inputs, new_input_indices),
            _select_by_index(self.outputs, new_output_indices),
        )
        return made

    def remap_inputs(self, new_input_indices):
        """Returns a view with other inputs; see `remap`."""
        return self.remap(new_input_indices)

    def remap_outputs(self, new_output_indices):
        """Returns a view with other outputs; see `remap`."""
        return self.remap(None, new_output_indices)

    def remap_default(self, remap_inputs=True, remap_outputs=True):
        """Returns a view with the original inputs (`remap_inputs`) and the original outputs (`remap_outputs`)."""
        first, made = SubGraphView(self.ops, self._passthrough), copy.copy(self)
        made.inputs = first.inputs if remap_inputs else self.inputs
        made.outputs = first.outputs if remap_outputs else self.outputs
        return made

    def remap_outputs_make_unique(self):
        """Returns a view whose outputs have no duplicates."""
        return self.remap(None, list({id(tensor): tensor for tensor in self.outputs}.values()))

    def remap_outputs_to_consumers(self):
        """Returns a view in which each output is repeated for every operation that reads the output."""
        unique = self.remap_outputs_make_unique().outputs
        return self.remap(None, [tensor for tensor in unique for _ in tensor.consumers()])

    def remove_unused_ops(self, control_inputs=True):
        """Returns a view without operations that neither depend on an input nor contribute to an output."""
        used = set(select.get_walks_union_ops(self.inputs, [each.op for each in self.outputs], within_ops=self.ops,
                                              control_inputs=control_inputs))  # fmt: skip
        made = copy.copy(self)
        made.ops = [op for op in self.ops if op in used]
        return made


def _select_by_index(tensors, indices):
    return tensors if indices is None else [tensors[each] if isinstance(each, int) else each for each in indices]


def sgv(*args, **kwargs):
    """Returns a `SubGraphView` of operations, given as objects and as regular expressions for their names."""
    return SubGraphView(select.select_ops(*args, **kwargs))


make_view = sgv


def sgv_scope(scope, graph):
    """Returns a `SubGraphView` of the operations in a name scope."""
    return SubGraphView(select.get_name_scope_ops(graph, scope))


make_view_from_scope = sgv_scope
