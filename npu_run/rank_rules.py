"""Lists mistakes that only appear with several ranks, and finds them in a script's text.

An optimizer wrapped twice is not listed: `script_checks.py` calls the wrappers' constructors, which refuse it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from tensorflow1_compat.findings import Finding
from tensorflow1_compat.journal import SourcePlace
from tensorflow1_compat.reading import FileFacts, NameUse

_RANKS = {"get_rank_id", "get_npu_rank_id", "get_local_rank_id", "get_npu_local_rank_id"}
_SIZES = {"get_rank_size", "get_npu_rank_size", "get_local_rank_size", "get_npu_local_rank_size"}
_HOROVOD_FUNCTIONS = {"rank", "local_rank", "size", "local_size"}
_VARIABLES = {"RANK_ID", "RANK_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE"}
_AVERAGES = {
    "DistributedOptimizer",
    "KerasDistributeOptimizer",
    "NPUDistributedOptimizer",
    "npu_distributed_optimizer_wrapper",
    "npu_keras_optimizer",
    "npu_tf_optimizer",
}
# Parts of the names of functions that can combine gradients or weights of the ranks, or that distribute rows.
_CAN_AVERAGE = (*_AVERAGES, "istribut", "allreduce", "all_reduce", "strategy", "sync_all")
_DISTRIBUTES_ROWS = ("GlobalBatches", "resumable", "ResumableLoop", "AutoShard", "InputContext", "EndTogether")
_TRAINS = {"run", "train", "fit", "train_on_batch", "train_step", "apply_gradients", "minimize", "apply"}
_EQUALISES_LENGTHS = {"repeat", "take"}  # methods of a dataset, after which all ranks have the same number of batches


class Rule(NamedTuple):
    """A kind of mistake in scripts for several ranks.

    Attributes:
      name: name of the finding.
      severity: "stops it", "changes numbers" or "harmless", for a job with several ranks.
      sentence: describes the consequence.
      cure: tells how to correct the mistake.
      find: returns the places where a script makes the mistake.
    """

    name: str
    severity: str
    sentence: str
    cure: str
    find: Callable[[_ScriptFacts], Iterable[SourcePlace]]


class _ScriptFacts:
    """A script and its modules, with methods that find calls and names in these files."""

    def __init__(self, files: Sequence[FileFacts]):
        self.files = files
        self.uses = [use for facts in files for use in facts.uses]
        nodes = [(facts, node) for facts in files for node in ast.walk(facts.tree)]
        self.methods = [
            (node.func.attr, node, SourcePlace(facts.path, node.lineno))
            for facts, node in nodes
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ]
        self.variables = {name for facts in files for name in facts.variables}

    def calls_named(self, *names: str) -> list[NameUse]:
        """Returns calls of functions with one of these names, in any module."""
        return [use for use in self.uses if use.call is not None and use.name.rpartition(".")[2] in names]

    def shard_calls(self) -> list[SourcePlace]:
        return [place for name, node, place in self.methods if name == "shard" and len(node.args) == 2]

    def rank_queries(self) -> list[SourcePlace]:
        places = [use.place for use in self.uses if _is_rank_function(use.name, _RANKS | _SIZES, _HOROVOD_FUNCTIONS)]
        return places or [SourcePlace(self.files[0].path, 1)] * bool(self.variables & _VARIABLES)

    def mentions(self, words: Iterable[str]) -> bool:
        return any(word in use.name for use in self.uses for word in words)

    def surely_averages_gradients(self) -> bool:
        """Returns whether some call certainly averages gradients over the ranks."""
        return bool(self.calls_named(*_AVERAGES)) or any(
            map(_may_distribute_training, self.calls_named("NPUOptimizer"))
        )

    def may_average_gradients(self) -> bool:
        """Returns whether some call averages gradients over the ranks or could do so."""
        return self.surely_averages_gradients() or self.mentions(_CAN_AVERAGE)


def _is_rank_function(name: str, own_names: set[str], horovod_names: set[str]) -> bool:
    last = name.rpartition(".")[2]
    return last in own_names or (name.startswith("horovod.") and last in horovod_names)


def _may_distribute_training(use: NameUse) -> bool:
    call = use.call
    return call is not None and (
        call.is_open or call.positional is None or call.positional > 2 or "is_distributed" in call.keywords
    )


def _find_missing_is_distributed(script: _ScriptFacts) -> Iterator[SourcePlace]:
    if not script.may_average_gradients() and (script.shard_calls() or script.rank_queries()):
        yield from (use.place for use in script.calls_named("NPUOptimizer"))


def _find_plain_keras_optimizer(script: _ScriptFacts) -> Iterator[SourcePlace]:
    if not script.may_average_gradients() and any(name == "compile" for name, *_ in script.methods):
        yield from (
            use.place for use in script.calls_named("npu_callbacks_append", "NPUBroadcastGlobalVariablesCallback")
        )


def _find_unsharded_rows(script: _ScriptFacts) -> Iterator[SourcePlace]:
    knows_ranks = script.shard_calls() or script.rank_queries() or script.mentions(_DISTRIBUTES_ROWS)
    if script.surely_averages_gradients() and not knows_ranks:
        datasets = [use.place for use in script.uses if ".data." in use.name and "Dataset" in use.name]
        yield from datasets[:1]


def _find_loops_over_rank(script: _ScriptFacts) -> Iterator[SourcePlace]:
    for facts in () if script.mentions(("EndTogether",)) else script.files:
        lengths = {
            node.lineno: node.iter if isinstance(node, ast.For) else node.test
            for node in ast.walk(facts.tree)
            if isinstance(node, (ast.For, ast.While)) and _trains_inside(node)
        }
        yield from _find_lines_using_source(facts, lengths, functools.partial(_is_rank_call, facts))


def _find_loops_over_own_rows(script: _ScriptFacts) -> Iterator[SourcePlace]:
    for facts in () if script.mentions(_DISTRIBUTES_ROWS) else script.files:
        rows = {}
        for node in ast.walk(facts.tree):
            if isinstance(node, ast.For) and _trains_inside(node):
                rows[node.lineno] = node.iter
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "fit" and node.args:
                if not any(keyword.arg in ("steps_per_epoch", None) for keyword in node.keywords):
                    rows[node.lineno] = node.args[0]
        yield from _find_lines_using_source(facts, rows, _selects_rows_of_rank)


def _find_lines_using_source(
    facts: FileFacts, lines: dict[int, ast.expr], is_source: Callable[[ast.AST], bool]
) -> Iterator[SourcePlace]:
    """Yields the places of those `lines` whose expression contains a source, or a variable computed from one.

    `lines` are by number; a source is, for example, a call that returns this rank.
    """
    names: set[str] = set()

    def depends(expression: ast.expr) -> bool:
        parts = [*ast.walk(expression)]
        if any(isinstance(each, ast.Attribute) and each.attr in _EQUALISES_LENGTHS for each in parts):
            return False
        return any(is_source(each) or (isinstance(each, ast.Name) and each.id in names) for each in parts)

    assigned = [node for node in ast.walk(facts.tree) if isinstance(node, ast.Assign)] if lines else []
    before = -1
    while len(names) > before:
        before = len(names)
        for node in filter(lambda node: depends(node.value), assigned):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    yield from (SourcePlace(facts.path, line) for line, expression in lines.items() if depends(expression))


def _is_rank_call(facts: FileFacts, node: ast.AST) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Name):
        return _is_rank_function(facts.aliases.get(function.id, function.id), _RANKS, {"rank", "local_rank"})
    if isinstance(function, ast.Attribute):
        module = facts.aliases.get(function.value.id, "") if isinstance(function.value, ast.Name) else ""
        return _is_rank_function(f"{module}.{function.attr}", _RANKS, {"rank", "local_rank"})
    return False


def _selects_rows_of_rank(node: ast.AST) -> bool:
    """Returns whether a node selects a rank's rows: `shard`, or a slice such as `rows[rank::size]`."""
    if isinstance(node, ast.Slice):
        return node.step is not None and not isinstance(node.step, (ast.Constant, ast.UnaryOp))
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "shard"


def _trains_inside(loop: ast.For | ast.While) -> bool:
    functions = [node.func for part in loop.body for node in ast.walk(part) if isinstance(node, ast.Call)]
    return any(getattr(each, "attr", getattr(each, "id", "")) in _TRAINS for each in functions)


RULES = (
    Rule(
        "is_distributed left out",
        "changes numbers",
        "the script asks for ranks, but nothing averages gradients: each rank trains a separate model",
        "Write NPUOptimizer(..., is_distributed=True).",
        _find_missing_is_distributed,
    ),
    Rule(
        "a plain Keras optimizer",
        "changes numbers",
        "the ranks start with the same weights, but nothing averages gradients: each rank trains a separate model",
        "Write model.compile(npu_keras_optimizer(optimizer), ...).",
        _find_plain_keras_optimizer,
    ),
    Rule(
        "the same rows on all ranks",
        "changes numbers",
        "every rank reads all rows, so that more ranks repeat the same work",
        "Write dataset.shard(get_rank_size(), get_rank_id()) before it is shuffled and batched.",
        _find_unsharded_rows,
    ),
    Rule(
        "a loop whose length depends on the rank",
        "stops it",
        "a rank that ends first leaves the others waiting, which ends the job",
        "Give all ranks the same number of steps, or add EndTogether, in Keras EndTogetherCallback (docs/ranks.md).",
        _find_loops_over_rank,
    ),
    Rule(
        "a loop over this rank's rows",
        "harmless",
        "the ranks end together only if all ranks have equally many batches",
        "If the rows do not divide evenly, add EndTogether, in Keras EndTogetherCallback (docs/ranks.md).",
        _find_loops_over_own_rows,
    ),
)


def find_rank_mistakes(files: Sequence[FileFacts]) -> Iterator[Finding]:
    """Yields a finding for each place where the files break one of `RULES`."""
    script = _ScriptFacts(files)
    for rule in RULES:
        for place in rule.find(script):
            yield Finding("ranks", rule.name, f"{rule.sentence}. {rule.cure}", place, rule.severity)
