"""Implements `dump_config` with `enable_dump`: writes inputs and outputs of operators in chosen steps."""

from __future__ import annotations

from npu_bridge.graph.operators import warn_of_unknown_operators
from npu_bridge.graph.run import SessionRun
from npu_bridge.options import TrainingOptions
from npu_bridge.options.grammar import parse_dump_step
from npu_bridge.session.dump_files import write_operators
from npu_bridge.session.tensor_watch import TensorWatch, find_tensor_places

_SIDES = {"input": ("input",), "output": ("output",), "all": ("input", "output")}


class DumpHook(TensorWatch):
    """A hook that writes tensors of the operators named in `dump_layer`, in the steps given by `dump_step`.

    A dumped step fetches these tensors as well. In general its results do not change. But TensorFlow cannot fuse
    operators whose tensors are fetched: if the fused kernel rounds differently, results of a dumped step can differ in
    the last bits.

    Constants are written when `dump_layer` names them, or as inputs of other operators. Operators inside loops and
    conditions, and non-numeric tensors, are left out.

    Ranks: local; each rank writes to its own folder.
    """

    def __init__(self, options: TrainingOptions, graph_name: str | None = None):
        super().__init__(options, graph_name)
        self._steps_to_dump = parse_dump_step(options.dump_step) if options.dump_step else None
        self._sides = _SIDES[options.dump_mode]
        self._layers = frozenset(options.dump_layer.split()) if options.dump_layer else None

    def names_to_fetch(self, run: SessionRun, step: int) -> list:
        """Returns the names of the tensors to write; an empty list in a step that is not dumped."""
        if self._steps_to_dump is not None:
            if not any(first <= step <= last for first, last in self._steps_to_dump):
                return []
        if self._layers is not None:
            self._check_layers(run)
        return list(dict.fromkeys(tensor.name for *_, tensor in self._tensor_places(run)))

    def handle_fetched_values(self, run: SessionRun, step: int, values: dict) -> None:
        """Writes the tensors of one step."""
        folder = self.write_tensors_of_step(run, step, self._tensor_places(run), values)
        # A comparison of two dumps follows these edges.
        write_operators(folder, ((op.name, op.type, [tensor.name for tensor in op.inputs]) for op in run.ops))

    def _tensor_places(self, run: SessionRun):
        layers = self._layers
        ops = [op for op in run.ops if (op.type != "Const" if layers is None else op.name in layers)]
        return find_tensor_places(ops, self._sides, run.values)

    def _check_layers(self, run: SessionRun):
        if run.ops:
            expected, fix = "names of operators separated by spaces", "Find the name in a dump of all operators."
            warn_of_unknown_operators("dump_layer", self._layers, run.ops[0].graph, expected, fix)
