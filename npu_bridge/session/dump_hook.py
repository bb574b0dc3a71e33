"""`dump_config` with `enable_dump`: inputs and outputs of operators, written for chosen steps."""

from __future__ import annotations

import logging
import time
from typing import Callable

from npu_bridge import collective
from npu_bridge.graph.run import Run
from npu_bridge.options import TrainingOptions
from npu_bridge.options.errors import nearest, say_once
from npu_bridge.options.grammar import parse_dump_step
from npu_bridge.session.dump_files import DumpedTensor, DumpFolder, write_operators, write_statistics, write_tensors
from npu_bridge.session.tensor_watch import TensorWatch

_SIDES = {"input": ("input",), "output": ("output",), "all": ("input", "output")}


class DumpHook(TensorWatch):
    """Writes tensors of the steps `dump_step` names, of the operators `dump_layer` names.

    Results of a step do not change: what is written is fetched along with it. A step that is dumped is optimised
    with its tensors kept, though, so where TensorFlow would fuse operators and the fused kernel rounds
    differently, so may that step.

    Constants are written when `dump_layer` names them, or as inputs of others. Operators inside loops and
    conditions, and tensors that hold no numbers, are left out.

    Args:
      options: the options of the run.
      graph_name: name of the graph's folder; by default what a run fetches first.
      clock: seconds since the epoch.
    Ranks: local; each writes to a folder of its own.
    """

    def __init__(self, options: TrainingOptions, graph_name: str | None = None, clock: Callable[[], float] = time.time):
        super().__init__()
        self._steps_to_dump = parse_dump_step(options.dump_step) if options.dump_step else None
        self._sides = _SIDES[options.dump_mode]
        self._layers = frozenset(options.dump_layer.split()) if options.dump_layer else None
        self._writes_statistics = options.dump_data == "stats"
        self._graph_name = graph_name
        self._folder = DumpFolder(options.dump_path, collective.current().rank, clock)

    def wanted(self, run: Run, step: int) -> list:
        """The tensors to write; none in a step that is not to be dumped."""
        if self._steps_to_dump is not None:
            if not any(first <= step <= last for first, last in self._steps_to_dump):
                return []
        if self._layers is not None:
            self._check_layers(run)
        return list(dict.fromkeys(tensor.name for *_, tensor in self._places(run)))

    def seen(self, run: Run, step: int, values: dict) -> None:
        """Writes one step."""
        name = self._graph_name or run.name
        folder = self._folder.of_step(name, run.purpose, step)
        # What was computed from what, so that a comparison of two dumps can follow it.
        write_operators(folder, ((op.name, op.type, [tensor.name for tensor in op.inputs]) for op in run.ops))
        tensors = (
            DumpedTensor(op.name, op.type, side, slot, tensor.name, values[tensor.name])
            for op, side, slot, tensor in self._places(run)
        )
        if self._writes_statistics:
            write_statistics(folder, tensors)
        else:
            write_tensors(folder, tensors, graph=name, step=step)

    def _places(self, run: Run):
        """(operator, side, slot, tensor) for all that is to be written of a run."""
        for op in run.ops:
            if op.name not in self._layers if self._layers is not None else op.type == "Const":
                continue
            for side in self._sides:
                for slot, tensor in enumerate(op.inputs if side == "input" else op.outputs):
                    if tensor.name in run.values:
                        yield op, side, slot, tensor

    def _check_layers(self, run: Run):
        if not run.ops:
            return
        graph = run.ops[0].graph
        names = [op.name for op in graph.get_operations()]
        for layer in sorted(self._layers.difference(names)):
            near = nearest(layer, names)
            say_once(
                logging.WARNING,
                f"dump_layer: the graph has no operator {layer!r}. Expected names of operators separated by "
                f"spaces; got {layer!r}. " + (f"Did you mean {near!r}?" if near else "Look in a dump of all."),
            )
