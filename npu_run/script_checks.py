"""Finds the calls and options in a script that a run would refuse, and the effect of each option in this package."""

from __future__ import annotations

import ast
import builtins
import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from npu_bridge.base.errors import did_you_mean
from npu_bridge.base.reading import open_file
from npu_bridge.options import OPTIONS, table_precision
from npu_bridge.options.table import IN_SESSION, Option, UnknownKeyError
from npu_run import rank_rules, real_checks
from npu_run.literals import ExpressionEvaluator, UnknownValue, is_known, list_bound_names
from tensorflow1_compat.findings import Finding
from tensorflow1_compat.installed import list_exported_names
from tensorflow1_compat.journal import SourcePlace
from tensorflow1_compat.reading import FileFacts

_STARTS = ("npu_bridge.npu_init.tf.", "npu_bridge.npu_init.os.")
_PARAMETER = re.compile(r"""parameter_map\s*\[\s*['"](\w+)['"]\s*\]""")
_BY_NAME: dict[str, Option] = {name: option for option in OPTIONS for name in (option.name, option.key) if name}
_OWNERS = frozenset(option.owner for option in OPTIONS)
_CHANGE_NUMBERS = frozenset(option.name for option in table_precision.OPTIONS)


class _Setting(NamedTuple):
    """An option that a script sets: `custom_op.parameter_map["key"].s = value` or `options.key = value`.

    Attributes:
      target: the attribute that is assigned.
      value: the expression on the right.
      session: identifies the session's `parameter_map`; "" for an attribute of another object.
      is_certain: whether every call of the surrounding function carries out the assignment.
    """

    target: ast.Attribute
    value: ast.expr
    session: str
    is_certain: bool

    @property
    def key(self) -> str | None:
        """The key that is set in a `parameter_map`; None if the key is computed, or another object is set."""
        at = self.target.value
        key = at.slice if self.session and isinstance(at, ast.Subscript) else None
        return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def find_option_mistakes(files: Sequence[FileFacts], era: int, calls: bool = True) -> Iterator[Finding]:
    """Yields findings: mistakes with several ranks, refused calls and options, and the effects of options.

    Args:
      files: the script and its modules.
      era: 1 or 2, for TensorFlow 1 or 2.
      calls: whether to check calls of this package in the script.
    """
    yield from rank_rules.find_rank_mistakes(files)
    refused: set[tuple[str, str]] = set()
    if calls and any(map(_has_checkable_calls, files)):
        with real_checks.simulated_run(era):
            found = [each for facts in files for each in _find_refusals(facts)]
        yield from found
        refused = {(each.place.file, each.what) for each in found}
    for facts in files:
        yield from _find_misspelt_names(facts)
        for finding in _find_option_uses(facts):
            if (facts.path, finding.what) not in refused:
                yield finding


def _has_checkable_calls(facts: FileFacts) -> bool:
    return any(map(_is_call_of_npu_bridge, facts.uses)) or any(setting.session for setting in _list_all_settings(facts))


def _is_call_of_npu_bridge(use: Any) -> bool:
    return use.call is not None and use.name.startswith(real_checks.OURS) and not use.name.startswith(_STARTS)


def _find_refusals(facts: FileFacts) -> Iterator[Finding]:
    values = ExpressionEvaluator(facts, lambda name, call: real_checks.evaluate_call(name, values.arguments(call)))
    for use in facts.uses:
        if use.is_guarded:
            continue
        if use.call is None:
            continue
        if _is_call_of_npu_bridge(use):
            function, arguments = real_checks.import_object(use.name), values.arguments(use.call.node)
        elif use.name.endswith(real_checks.WRAPPER_SUFFIX):
            function, arguments = real_checks.import_from_tensorflow(use.name), values.arguments(use.call.node)
            if not any(is_known(each) and _is_of_this_package(each) for each in arguments.positional):
                continue
        else:
            continue
        error = real_checks.find_call_error(function, arguments) if function is not None else None
        if error is not None:
            yield _make_finding(error, f"{use.name}(...)", use.place)
    sessions: dict[str, list[_Setting]] = {}
    for setting in _list_all_settings(facts):
        place = SourcePlace(facts.path, setting.target.lineno)
        if setting.session:
            sessions.setdefault(setting.session, []).append(setting)
            error = _find_session_error([setting], values)
        else:
            error = _find_error_of_global_option(setting, values)
        if error is not None:
            yield _make_finding(error, ast.unparse(setting.target), place)
    for settings in sessions.values():
        certain = [each for each in settings if each.is_certain and is_known(values.value_of(each.value))]
        error = _find_session_error(certain, values) if len(certain) > 1 else None
        if error is not None and not any(_find_session_error([each], values) for each in certain):
            yield _make_finding(error, "parameter_map", SourcePlace(facts.path, certain[-1].target.lineno))


def _find_misspelt_names(facts: FileFacts) -> Iterator[Finding]:
    """Yields a finding for each undefined name that resembles a name in a star import of this package."""
    nodes = [*ast.walk(facts.tree)]
    stars = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"]
    if not stars or not all(f"{star}.".startswith(real_checks.OURS) for star in stars):
        return
    exported = {name for star in stars for name in list_exported_names(star)}
    bound = {name for node in nodes for name in list_bound_names(node)} | exported | {*dir(builtins)} | {*facts.aliases}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id not in bound:
            if near := difflib.get_close_matches(node.id, exported, n=1, cutoff=0.85):
                remark = f"name {node.id!r} is not defined. Did you mean: {near[0]!r}?"
                yield Finding("cannot work", node.id, remark, SourcePlace(facts.path, node.lineno))


def _is_of_this_package(value: Any) -> bool:
    return any(kind.__module__.startswith("npu_bridge.") for kind in type(value).__mro__)


def _make_finding(error: Exception, subject: str, place: SourcePlace) -> Finding:
    option = getattr(error, "option", None)
    return Finding("cannot work", f"option {option}" if option else subject, str(error), place)


def _find_session_error(settings: Iterable[_Setting], values: ExpressionEvaluator) -> Exception | None:
    """Returns the error that these options of a session raise for all values of its other options, or None."""
    from tensorflow.compat.v1 import ConfigProto

    from npu_bridge.options.reading import ENTRY_NAME, collect_settings, optimizer_entry_values

    config = ConfigProto()
    entry = config.graph_options.rewrite_options.custom_optimizers.add(name=ENTRY_NAME)
    for setting in settings:
        value = values.value_of(setting.value)
        if setting.key is not None and is_known(value):
            error = real_checks.catch_refusal(setattr, entry.parameter_map[setting.key], setting.target.attr, value)
            if error is not None:
                return error
    try:
        given = optimizer_entry_values(config)
        read = collect_settings(given, IN_SESSION)
    except (TypeError, ValueError) as error:
        return error
    unknown = {option.name: UnknownValue() for option in OPTIONS if option.has_plain_value and option.name not in given}
    return next(real_checks.find_broken_rules(read, unknown), None)


def _find_error_of_global_option(assignment: _Setting, evaluator: ExpressionEvaluator) -> Exception | None:
    """Returns the error of an assignment `npu_device.global_options().name = value`, or None."""
    names: list[str] = []
    node: ast.expr = assignment.target
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    options = evaluator.value_of(node)
    if not is_known(options) or type(options).__name__ != "NpuConfig":
        return None
    for name in names[:-1]:
        options = getattr(options, name, None)
    return real_checks.catch_refusal(setattr, options, names[-1], evaluator.value_of(assignment.value))


def _list_all_settings(file_facts: FileFacts) -> Iterator[_Setting]:
    return _list_settings(file_facts.tree.body, "", Counter())


def _list_settings(
    body: Iterable[ast.stmt], scope: str, binding_counts: Counter[str], is_certain: bool = True
) -> Iterator[_Setting]:
    """Yields the settings in a block of statements.

    `scope` is the dotted name of the surrounding function; `binding_counts` counts its assignments of each name so far;
    with `is_certain`, every call of the function runs the block.
    """
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _list_settings(node.body, f"{scope}.{node.name}", Counter())
        elif isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Attribute):
            at = target.value
            holder = at.value if isinstance(at, ast.Subscript) else None
            session = ""
            if isinstance(holder, ast.Attribute) and holder.attr == "parameter_map":
                owner = ast.unparse(holder.value)
                session = f"{scope} {owner} {binding_counts[owner]}"
            yield _Setting(target, node.value, session, is_certain)
        elif isinstance(node, ast.Assign):
            binding_counts.update(map(ast.unparse, node.targets))
        elif not (isinstance(node, ast.Try) and node.handlers):  # a block that can fail
            inner = [*getattr(node, "body", ()), *getattr(node, "orelse", ()), *getattr(node, "finalbody", ())]
            yield from _list_settings(inner, scope, binding_counts, is_certain and isinstance(node, ast.With))


def _find_option_uses(facts: FileFacts) -> Iterator[Finding]:
    """Yields a finding for each option in a file: keywords of configuration objects, and keys of `parameter_map`."""
    written: list[tuple[str, int, bool]] = []
    for use in facts.uses:
        if use.call is not None and use.name.startswith(real_checks.OURS) and use.name.rpartition(".")[2] in _OWNERS:
            written += [(keyword, use.place.line, False) for keyword in use.call.keywords]
    if facts.error is None:
        with open_file(facts.path, errors="replace") as file:
            for number, line in enumerate(file, start=1):
                written += [(key, number, True) for key in _PARAMETER.findall(line.partition("#")[0])]
    for name, line, is_key in written:
        option, place = _BY_NAME.get(name), SourcePlace(facts.path, line)
        if option is None:
            remark = (
                _describe_unknown_key(name)
                if is_key
                else did_you_mean(name, _BY_NAME, "not an option of this interface")
            )
            yield Finding("ignored", f"option {name}", remark, place)
        elif option.effect.level == "recorded":
            yield Finding("ignored", f"option {name}", option.effect.note or "checked and kept without effect", place)
        else:
            remark = f"{option.effect.level}. {option.effect.note}".strip()
            effect = "changes numbers" if option.name in _CHANGE_NUMBERS else "harmless"
            yield Finding("option", f"option {name}", remark, place, effect)


def _describe_unknown_key(name: str) -> str:
    try:
        OPTIONS.option_by_key(name)
    except UnknownKeyError as error:  # a run warns and ignores the key
        return str(error)
    return ""
