"""Chooses the TensorFlow that a script sees (`--tf1`, `--tf2`, `--as-installed`, `--tree DIR`)."""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from npu_bridge.base import environment
from npu_bridge.base.files import write_atomically
from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.base.terminal import echo
from npu_run.errors import LaunchError

if TYPE_CHECKING:
    from tensorflow1_compat.findings import ScriptSurvey

REPORT_FILES = rb'^\{\n "script": .*\n "tensorflow": '  # how migration reports begin
_CHOICE = "NPU_RUN_SOURCE"
AS_INSTALLED = 3
_OWN_PROJECT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


class TensorFlowChoice(NamedTuple):
    """The choice of TensorFlow on the command line, which ranks inherit in an environment variable.

    Attributes:
      era: 1 or 2 for TensorFlow 1 or 2; 0 lets the script's text decide; `AS_INSTALLED` for a script of TensorFlow 2
        without old names.
      trees: absolute paths of the folders of `--tree`, which hold more of the user's modules.
      report: absolute path of the migration report; "" only prints the report, None makes no report.
    """

    era: int = 0
    trees: tuple[str, ...] = ()
    report: str | None = None

    def announce(self) -> None:
        """Passes these settings to the ranks, in an environment variable.

        Raises:
          LaunchError: a path given with `--tree` is not a folder.
        """
        for tree in self.trees:
            if not os.path.isdir(tree):
                raise LaunchError(f"--tree {tree} is not a folder. Name the folder that holds the script's modules.")
        if self != TensorFlowChoice():
            environment.write_variable(_CHOICE, json.dumps(self))

    def find_roots(self, script: str) -> list[str]:
        """Returns the folders that hold a script's modules.

        They are the script's folder, the folders above its package, folders of `PYTHONPATH` that contain the script,
        and `trees`.
        """
        folder = os.path.dirname(os.path.realpath(script))
        paths = [os.path.realpath(path) for path in sys.path[1:] if path]
        # PYTHONPATH=. python tools/train.py: the modules beside `tools` belong to the same project. This package is
        # the exception: its modules are written for the installed TensorFlow.
        above = [path for path in paths if folder.startswith(path.rstrip(os.sep) + os.sep) and path != _OWN_PROJECT]
        return list(dict.fromkeys([folder, *folders_above_package(folder), *above, *self.trees]))

    def survey_script(self, script: str, checks_calls: bool = True) -> ScriptSurvey:
        """Reads a script without running it, and returns the findings.

        Args:
          script: path of the script.
          checks_calls: whether to check calls of this package in the script.
        """
        from npu_run.script_checks import (
            find_option_mistakes,  # imported late: every start of a script loads this module
        )
        from tensorflow1_compat.findings import survey

        more = functools.partial(find_option_mistakes, calls=checks_calls)
        return survey(script, self.find_roots(script), min(self.era, 2), self.era != AS_INSTALLED, more)

    def apply_to_script(self, script: str, rank: int) -> bool:
        """Gives the script's files the TensorFlow they are written for; called in a rank before the script runs.

        A script of TensorFlow 1 sees TensorFlow 1.15. A script of TensorFlow 2 sees the installed TensorFlow, with
        removed names added if the script uses any.

        Returns:
          Whether the script's files see anything other than the installed TensorFlow.
        """
        from tensorflow1_compat import child, era, journal, start

        start.mark_script_version_as_known()
        roots = self.find_roots(script)
        found = self.era
        older: dict = {}
        if found == AS_INSTALLED:
            return False
        if found != 1:
            evidence = era.find_evidence_of_script(script, roots)
            found = found or (1 if evidence.is_tensorflow_1 else 2)
            if found == 2 and not evidence.old_of_2:
                return False
            older = evidence.packages_needed_in_older_version
        if rank > 0:
            journal.stop_printing()
        start.prepare_process(roots, sys.path[1:], found, older)
        if found == 1:
            child.redirect_python3(roots)
        elif older and rank == 0:
            for use, remark in era.explain_older_keras(older):
                echo(f"npu-run: {use.place}: {remark}; --as-installed keeps the installed Keras", err=True)
        return True

    def write_report(self, script: str, path: str, rank: int) -> None:
        """Writes and prints the migration report, if requested; called in a rank after the script.

        Args:
          script: the script's name in the report.
          path: its absolute path.
          rank: number of the rank; only rank 0 writes a report.
        """
        if self.report is None or rank > 0:
            return
        from npu_run.check_page import findings_as_facts, format_findings
        from tensorflow1_compat.journal import list_old_name_uses

        found = self.survey_script(path, checks_calls=False)  # the script has run, so its calls need no checks
        facts = json.dumps(findings_as_facts(script, found, list_old_name_uses()), indent=1)
        if self.report:
            NonFatalOutput(f"the report {self.report}").attempt(write_atomically, self.report, facts, REPORT_FILES)
        sys.stdout.flush()
        echo(format_findings(script, found, list_old_name_uses()), err=True)


def folders_above_package(folder: str) -> list[str]:
    """Returns the folders above a package's folder, from which its scripts import `package.module`."""
    folders = []
    while os.path.isfile(os.path.join(folder, "__init__.py")) and os.path.dirname(folder) not in (folder, _OWN_PROJECT):
        folder = os.path.dirname(folder)
        folders.append(folder)
    return folders


def take_choice_from_environment() -> TensorFlowChoice:
    """Returns the settings that the launcher passed to this rank, and hides them from child processes."""
    text = os.environ.pop(_CHOICE, None)
    if text is None:
        return TensorFlowChoice()
    era, trees, report = json.loads(text)
    return TensorFlowChoice(era, tuple(trees), report)
