"""Formats the findings of `npu-run check` as JSON and as lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npu_bridge.base.terminal import escape_in_line

if TYPE_CHECKING:
    from tensorflow1_compat.findings import Finding, ScriptSurvey
    from tensorflow1_compat.journal import OldNameUse

_TITLES = {
    "cannot work": "cannot work here",
    "needed": "needed, but missing here",
    "ranks": "with several ranks",
    "healed": "made to work in the script's own files",
    "contrib": "of TensorFlow 1.15, supplied by npu_bridge",
    "npu": "of the NPU interface",
    "option": "options that act here",
    "ignored": "differs from an NPU, or is ignored",
    "met": "found while it ran",
}


def findings_as_facts(script: str, survey: ScriptSurvey, used_old_names: list[OldNameUse] = ()) -> dict[str, Any]:
    """Returns the findings as plain data for JSON; `used_old_names` are old names that a run of the script met."""
    return {
        "script": script,
        "tensorflow": survey.era,
        "files": survey.files,
        "findings": [_finding_facts(each) for each in survey.findings],
        "met": [_finding_facts(each) for each in used_old_names],
    }


def _finding_facts(finding: Finding | OldNameUse) -> dict[str, str]:
    row = {"kind": finding.kind, "what": finding.what, "remark": finding.remark, "place": str(finding.place)}
    return row | ({"severity": finding.severity} if hasattr(finding, "severity") else {})


def _describe_finding(finding: Finding | OldNameUse) -> str:
    what = f"{finding.what} ({finding.severity})" if finding.kind == "ranks" else finding.what
    return f"{what}: {finding.remark}" if finding.remark else what


def format_findings(script: str, survey: ScriptSurvey, used_old_names: list[OldNameUse] = ()) -> str:
    """Returns the findings as text to print: a block for each kind of finding, and a verdict."""
    lines = [f"{escape_in_line(script)}: a script of TensorFlow {survey.era}, {survey.files} file(s) read"]
    blocks = {kind: [each for each in survey.findings if each.kind == kind] for kind in _TITLES}
    for kind, title in _TITLES.items():
        rows = list(used_old_names) if kind == "met" else blocks[kind]
        if rows:
            lines += ["", f"{title}:"]
            lines += [f"  {each.place}: {_describe_finding(each)}" for each in rows]
    count, needed = len(blocks["cannot work"]), len(blocks["needed"])
    verdict = [f"{count} name(s) or file(s) cannot work."] if count else []
    verdict += [f"{needed} package(s) or variable(s) must be installed or set first."] if needed else []
    return "\n".join([*lines, "", " ".join(verdict) or "Nothing was found that cannot work."])
