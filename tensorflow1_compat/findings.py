"""Finds, without running a script, the names that it uses and the names that cannot work, for `npu-run check`."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import itertools
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from npu_bridge.base import environment
from npu_bridge.base.errors import did_you_mean
from npu_bridge.base.reading import open_file
from npu_bridge.base.terminal import path_for_message
from tensorflow1_compat.era import EraEvidence, explain_older_keras, find_evidence_in_files, find_evidence_of_script
from tensorflow1_compat.journal import SourcePlace
from tensorflow1_compat.lookup import find_call_problem, look_up
from tensorflow1_compat.missing import advise_replacement, shorten_name
from tensorflow1_compat.old_python import removed_names
from tensorflow1_compat.reach import find_reached_names
from tensorflow1_compat.reading import ANY, SET, FileFacts, NameUse, read_file
from tensorflow1_compat.reading_tree import likely_path_additions, mentions_search_path, read_tree
from tensorflow1_compat.tables import MODULES, NAMES, OF_1
from tensorflow1_compat.tree import SourceTree

__all__ = ["Finding", "ScriptSurvey", "survey"]

FATAL = ("cannot work", "needed")  # kinds that stop a script
_TENSORFLOW = ("tensorflow.", "tensorflow_core.", "keras.", "npu_bridge.npu_init.tf.")
_OWN = ("npu_bridge.", "npu_device.", "hccl.")
_OTHERS = (*_TENSORFLOW, "npu_bridge.npu_init.os.")  # what `from npu_bridge.npu_init import *` binds of others
_SET_FOR_RANKS = (*environment.RANK_VARIABLES, "HOROVOD_RANK", "HOROVOD_SIZE")
_OF_PYTHON_2 = re.compile(
    r"Missing parentheses in call|leading zeros|invalid (decimal|octal) literal|<>|`|multiple exception types|"
    r": .*(\b(print|exec)\s+[^\s(=]|\b(except|raise)\b[^():]*,|\bur['\"]|\bdef \w+\(.*\(|\blambda *\()"
)
_INSTALLED_AS = {
    "Crypto": "pycryptodome", "PIL": "pillow", "cv2": "opencv-python-headless", "skimage": "scikit-image",
    "audioop": "audioop-lts", "sklearn": "scikit-learn", "yaml": "pyyaml",
    **{name: f"standard-{name}" for name in (  # Python had these until 3.11 or 3.12
        "aifc", "asynchat", "asyncore", "cgitb", "chunk", "crypt", "mailcap", "nntplib", "smtpd", "sndhdr", "sunau",
        "telnetlib", "uu", "xdrlib",
    )},
}  # fmt: skip
_KNOWN_TO_WORK = {
    "PIL", "absl", "cv2", "google", "hccl", "horovod", "keras", "matplotlib", "npu_bridge", "npu_device", "numpy",
    "pandas", "scipy", "six", "sklearn", "tensorboard", "tensorflow", "tensorflow_addons", "tensorflow_core",
    "tensorflow_estimator", "tf_slim", "tqdm",
}  # fmt: skip
_KNOWN = {
    "gym", "h5py", "imageio", "jieba", "joblib", "librosa", "networkx", "nltk", "numba", "plotly", "psutil",
    "pycocotools", "pydot", "regex", "requests", "seaborn", "sentencepiece", "soundfile", "sympy", "tabulate",
    "tensorflow_datasets", "tensorflow_hub", "tensorflow_probability", "tensorflow_text", "transformers",
}  # fmt: skip
_DEEPEST, _MOST_FOLDERS = 4, 500
_AT_THE_TOP = ("README", "LICENSE", "REQUIREMENTS")  # of a project: folders beside its own belong to others


class Finding(NamedTuple):
    """One finding about a script.

    Attributes:
      kind: "cannot work", "needed", "ranks", "ignored", "healed", "contrib", "option" or "npu".
      what: the name, such as a function, an option or a package.
      remark: the meaning of the name in this package, or the cure.
      place: the first use of the name.
      effect: "changes numbers" if the training's results differ from those on an NPU or in float32, else "harmless".
        For the kind "ranks": the severity in a job of several ranks.
    """

    kind: str
    what: str
    remark: str
    place: SourcePlace
    effect: str = "harmless"

    @property
    def is_fatal(self) -> bool:
        """Whether the finding stops the script until the user changes something."""
        return self.kind in FATAL

    @property
    def severity(self) -> str:
        """The effect on the script: "stops it", "changes numbers" or "harmless"."""
        return "stops it" if self.is_fatal else self.effect


class ScriptSurvey(NamedTuple):
    """The result of reading a script and the user's modules that it imports.

    Attributes:
      era: 1 or 2, the version of TensorFlow for which the script is written.
      files: number of files read.
      findings: the findings, only the first for each name.
    """

    era: int
    files: int
    findings: list[Finding]


def survey(
    script: str,
    roots: Sequence[str],
    era: int = 0,
    gets_older_names: bool = True,
    find_more: Callable[[Sequence[FileFacts], int], Iterable[Finding]] = lambda files, era: (),
) -> ScriptSurvey:
    """Reads a script and its modules without running them; returns the findings.

    Args:
      script: path of the script.
      roots: folders of the user's modules.
      era: 1 or 2 for TensorFlow 1 or 2; 0 lets the text decide.
      gets_older_names: whether a script of an older TensorFlow 2 gets the names of the older version.
      find_more: a function that returns further findings; its arguments are the files and TensorFlow's version, 1 or 2.
    """
    files = list(read_tree(script, roots))
    evidence: EraEvidence = find_evidence_in_files(files)
    era = era or (1 if evidence.is_tensorflow_1 else 2)
    found: dict[tuple[str, str], Finding] = {}
    of_files = ((*_find_syntax_errors(facts), *_find_names(facts, era)) for facts in files)
    all_roots = [*roots, *likely_path_additions(script)]
    of_all = (
        *_find_missing_packages(files, all_roots),
        *_find_uncompiled_cython_modules(files, all_roots),
        *_find_unset_variables(files),
    )
    older = explain_older_keras(evidence.packages_needed_in_older_version) if era == 2 and gets_older_names else ()
    of_era = [Finding("healed", "older Keras", remark, use.place) for use, remark in older]
    for finding in _ignore_unreached_findings(files, itertools.chain(of_era, find_more(files, era), *of_files, of_all)):
        found.setdefault((finding.kind, finding.what), finding)
    return ScriptSurvey(era, len(files), list(found.values()))


def _ignore_unreached_findings(files: Sequence[FileFacts], findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yields the findings; makes fatal findings harmless if they are in functions that no code calls."""
    definitions = {facts.path: facts.definitions for facts in files}
    reached = find_reached_names(list(definitions.values()))
    for finding in findings:
        around = (
            definitions[finding.place.file].find_enclosing_definition(finding.place.line) if finding.is_fatal else None
        )
        if around is None or reached is None or around in reached:
            yield finding
        else:
            yield finding._replace(kind="ignored", remark=f"nothing here calls {around}; {finding.remark}")


def _find_syntax_errors(facts: FileFacts) -> Iterator[Finding]:
    if facts.error is not None:
        place = SourcePlace(facts.path, facts.error.lineno or 1)
        is_old = isinstance(facts.error, TabError) or _OF_PYTHON_2.search(f"{facts.error.msg}: {facts.error.text}")
        remark = ": is it Python 2? 2to3 and reindent make it Python 3" if is_old else ""
        yield Finding("cannot work", f"syntax of {place}", f"{facts.error.msg}{remark}", place)


def _find_names(facts: FileFacts, era: int) -> Iterator[Finding]:
    for use in facts.uses:
        if use.name.startswith(_OWN) and not use.name.startswith(_OTHERS):
            yield from _check_package_name(use)
        elif era == 1 and use.name.startswith(_TENSORFLOW):
            yield from _check_tensorflow_name(use)
        elif era == 1 and use.name.startswith(f"{removed_names.OF_OLD}."):
            remark = "its replacement is used where it is gone"
            yield Finding("healed", f"{use.name.replace('.', ' ')}", remark, use.place)
        elif era == 1:
            for table in (removed_names.GONE_NAMES, removed_names.GONE_MODULES):
                if use.name in table:
                    remark = f"{table[use.name].replace(':', '.')} is used where it is gone"
                    yield Finding("healed", use.name, remark, use.place)


def _check_package_name(use: NameUse) -> Iterator[Finding]:
    _, missing, neighbours = look_up(use.name)
    if missing is not None and not use.is_guarded:
        module, _, leaf = missing.rpartition(".")
        remark = did_you_mean(leaf, neighbours, "No similar name exists here.")
        yield Finding("cannot work", missing, f"{module} has no name {leaf!r}. {remark}", use.place)
    else:
        yield Finding("npu", use.name, "", use.place)


def _check_tensorflow_name(use: NameUse) -> Iterator[Finding]:
    _, missing, neighbours = look_up(use.name)
    short = shorten_name(missing or use.name)
    if missing is not None:
        kind = "ignored" if use.is_guarded else "cannot work"
        yield Finding(kind, short, advise_replacement(missing, neighbours), use.place)
    elif use.call and not use.is_guarded and (complaint := find_call_problem(use.name, use.call)):
        yield Finding("cannot work", f"{short}(...)", f"it {complaint}", use.place)
    elif use.name in NAMES:
        yield Finding("contrib", short, f"is {NAMES[use.name].replace(':', '.')} here", use.place)
    elif ".contrib." in use.name:
        yield Finding("contrib", ".".join(short.split(".")[:4]), "", use.place)


def _find_missing_packages(files: Sequence[FileFacts], roots: Sequence[str]) -> Iterator[Finding]:
    """Yields a finding for each imported package that is not installed or whose folder Python does not search."""
    adds_folders = any(mentions_search_path(facts.path) for facts in files)
    own, *others = map(os.path.realpath, roots)
    searched = {own, *(root for root in others if not own.startswith(os.path.join(root, "")))}
    for facts in files:
        for use in facts.uses:
            package = use.name.partition(".")[0]
            if not use.is_import or use.is_guarded:
                continue
            folder = "" if _is_installed(package) else _find_folder_of_module(use.name, roots)
            if folder is None:
                # Do not suggest unknown names: anyone can publish a package under such a name.
                is_known = package in _INSTALLED_AS or package in _KNOWN_TO_WORK or package in _KNOWN
                fix = f"pip install {_INSTALLED_AS.get(package, package)}" if is_known else "install its package"
                remark = f"it is not installed: {fix}, or name its folder with --tree"
                yield Finding("needed", f"package {package}", remark, use.place)
            elif folder and not adds_folders and os.path.realpath(folder) not in searched:
                place = path_for_message(folder)
                remark = f"it is in {place}, where Python does not look: start with PYTHONPATH={place}"
                yield Finding("needed", f"package {package}", remark, use.place)
            elif (helper := _folder_of_old_package(package, tuple(roots))) is not None:
                remark = f"it is written for TensorFlow 1: start with npu-run --tree {path_for_message(helper)}"
                yield Finding("needed", f"package {package}", remark, use.place)


def _find_uncompiled_cython_modules(files: Sequence[FileFacts], roots: Sequence[str]) -> Iterator[Finding]:
    """Yields a finding for each imported Cython module that is not compiled."""
    uses = [use for facts in files for use in facts.uses if use.is_import and not use.is_guarded]
    if any(use.name.partition(".")[0] == "pyximport" for use in uses):
        return  # pyximport compiles the modules
    for use in uses:
        if (source := _find_uncompiled_cython_source(use.name, roots)) is not None:
            remark = "only its source is there: build it with Cython, as the project says or with `cythonize -i`"
            yield Finding("needed", f"module {source}", remark, use.place)


def _find_uncompiled_cython_source(name: str, roots: Sequence[str]) -> str | None:
    """Returns a module's `.pyx` file if the module is not compiled and has no other form; else None."""
    for folder in roots:
        for part in name.split("."):
            at = os.path.join(folder, part)
            if os.path.isfile(f"{at}.pyx"):
                is_there = any(os.path.isfile(at + suffix) for suffix in importlib.machinery.all_suffixes())
                return None if is_there or os.path.isdir(at) else path_for_message(f"{at}.pyx")
            if not os.path.isdir(at):
                break
            folder = at
    return None


@functools.cache
def _folder_of_old_package(package: str, roots: Sequence[str]) -> str | None:
    """Returns the folder of an installed package if the package is written for TensorFlow 1; else None."""
    spec = importlib.util.find_spec(package) if package not in _KNOWN_TO_WORK else None
    if spec is None or not spec.origin or not spec.submodule_search_locations or package in sys.stdlib_module_names:
        return None
    folder = os.path.dirname(spec.origin)
    if folder in map(os.path.abspath, roots) or SourceTree(roots).contains_file(folder):
        return None
    files = itertools.islice(pathlib.Path(folder).glob("**/*.py"), _MOST_FOLDERS)
    if not any(map(_imports_tensorflow, files)):
        return None
    return folder if find_evidence_of_script(spec.origin, [os.path.dirname(folder)]).is_tensorflow_1 else None


def _imports_tensorflow(path: pathlib.Path) -> bool:
    with open_file(path, "rb") as file:
        if b"tensorflow" not in file.read():  # true of most files; parsing all files takes minutes
            return False
    return any("tensorflow" in module for module, _ in read_file(str(path)).modules)


def _is_installed(package: str) -> bool:
    known = package in sys.stdlib_module_names or package in MODULES or package in OF_1.same
    if known or package in removed_names.GONE_MODULES or package in removed_names.WRAPPED:
        return True
    spec = importlib.util.find_spec(package)
    # `python -m` adds the current folder, only for this command.
    current = os.path.join(os.getcwd(), "")
    is_added = sys.path[0] in ("", current[:-1]) and current[:-1] not in sys.path[1:]
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    return spec is not None and not (is_added and any(place.startswith(current) for place in places))


def _find_folder_of_module(name: str, roots: Sequence[str]) -> str | None:
    """Returns the folder of the project that contains the package or module of a dotted name; None if none does."""
    package, *inner = name.split(".")
    folders = [folder for root in roots for folder in _modules_below(root).get(package, ())]
    for folder in folders:  # several folders can have a package of this name
        if not inner or _contains_module(inner[0], os.path.join(folder, package)):
            return folder
    return folders[0] if folders else None


def _contains_module(name: str, package: str) -> bool:
    return os.path.isfile(f"{package}.py") or any(
        os.path.exists(os.path.join(package, name + end)) for end in ("", ".py")
    )


@functools.cache
def _modules_below(root: str) -> dict[str, list[str]]:
    """Maps the names of folders and modules to their parent folders, for folders in, below and beside a root."""
    found: dict[str, list[str]] = {}
    is_top = any(name.upper().startswith(_AT_THE_TOP) for name in os.listdir(root))
    for folder, depth in [(root, _DEEPEST), (os.path.dirname(root), 2)][: 1 if is_top else 2]:
        for at, folders, names in itertools.islice(os.walk(folder), _MOST_FOLDERS):
            modules = (name.partition(".")[0] for name in names if name.endswith((".py", ".so")))
            for name in (*folders, *modules):
                found.setdefault(name, []).append(at)
            if at[len(folder) :].count(os.sep) >= depth:
                folders.clear()
    return found


def _find_unset_variables(files: Sequence[FileFacts]) -> Iterator[Finding]:
    """Yields a finding for each environment variable that is read without a default and not set.

    Variables that the launcher or the project sets are left out.
    """
    set_by_project = {name for facts in files for name, line in facts.variables.items() if line == SET}
    if ANY in set_by_project:
        return
    for facts in files:
        for name, line in facts.variables.items():
            if (
                line != SET
                and name not in set_by_project
                and name not in _SET_FOR_RANKS
                and environment.read_variable(name) is None
            ):
                remark = "it is not set, and the script reads it without a default"
                yield Finding("needed", f"environment variable {name}", remark, SourcePlace(facts.path, line))
