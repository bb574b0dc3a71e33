"""Files beside a training, reading, printing, and checks of arguments have one way each; syntax trees show it."""

from __future__ import annotations

import ast
import pathlib

from tests.sources import nodes_of, tree_of

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
# Files that are written there are written beside a training, and a training continues without them.
BESIDE = ("npu_run", "reporting", "session")
# Packages at the top level; the others are in npu_bridge/.
TOP = ("npu_run", "tensorflow1_compat")
# Output of a command, which ends with one sentence if it cannot write; and files that belong to no user.
PRODUCTS = {
    "npu_run/compare/dumps.py": "compare --write-names",
    "npu_run/check.py": "what was found, where it is asked for",
    "npu_run/bisect.py": "the state of a search, and what it finds",
    "npu_run/doctor/build.py": "headers for a compiler; the wheel is attempted",
    "npu_run/doctor/ranks.py": "a script in a folder of its own that is gone afterwards",
    "npu_run/rank/processor_time.py": "names of threads, below /proc",
    "npu_run/record.py": "the file that reads a record",
    "npu_run/remote/tasks.py": "where other tasks find the first one, or an error",
    "npu_run/repeat.py": "the note in the folder of a repeat",
    "reporting/page/document.py": "npu-run report; ReportHook attempts it",
    "reporting/page/facts.py": "ReportHook attempts it",
    "reporting/picture_style.py": "npu-run plan --out; draw_training attempts it",
    "reporting/tail_report.py": "what npu-run --timeline ends with; Recording.draw_tail says what fails",
    "session/dump_files.py": "TensorWatch attempts it",
    "session/overflow_hook.py": "TensorWatch attempts it",
    "session/precision/op_lists.py": "files that a person asks for",
    "npu_run/trials/replay.py": "all that a replay is for",
}
WRITERS = {"new_file", "write_atomically", "savefig", "write_text", "write_bytes", "touch", "copyfile", "copyfileobj"}
READERS = {"read_text", "read_bytes", "load", "fromfile", "memmap", "genfromtxt", "loadtxt"}
# Files below /proc; a module that is copied to machines without this package; digits, which a script asks for and whose
# path the open file tells.
READ_OTHERWISE = {
    "npu_run/job/rank_process.py",
    "npu_run/rank/processor_time.py",
    "npu_run/trials/replay_tf1.py",
    "tensorflow1_compat/contrib/learn/datasets/mnist.py",
    "tensorflow1_compat/old_python/old_numpy.py",  # numpy's own readers, as scripts call them
    "tensorflow1_compat/old_python/old_numpy_rules.py",
}
# JSON, which is ASCII, read by Python 2 as well.
ENCODED_OTHERWISE = {"npu_run/trials/replay_tf1.py"}
READING = (*BESIDE, "boost", "options", "optimizers", "tensorflow1_compat")
# The way itself, then: the module that is copied, what a process of the doctor tells the one that has started it, and
# prints of scripts for TensorFlow 1 and of numpy's functions that print.
PRINT_OTHERWISE = {
    "base/terminal.py",
    "npu_run/doctor/trial.py",
    "npu_run/trials/replay_tf1.py",
    "tensorflow1_compat/old_python/old_numpy.py",
}

# Places that distinguish a boolean or a number for another reason than the check of an argument.
TOLD_OTHERWISE = {
    "boost/config.py": "the rows of its table say what is legal",
    "estimator/npu/checks.py": "a documented conversion, which refuses nothing",
    "estimator/npu/npu_scope.py": "which field of an attribute holds the value",
    "npu_run/bisect.py": "a field of a file",
    "operators/dropping.py": "a boolean counts as the number that it is, and a tensor is not looked at",
    "optimizers/hypers.py": "what JSON can hold",
    "options/kinds.py": "a kind returns what is wrong, and an option's map holds no numbers of numpy",
    "options/reading.py": "which slot of an option's map holds the value",
    "session/precision/batch_norm.py": "a tensor is taken too",
    "session/precision/levels.py": "words such as 'True' are taken too",
}


def calls_in(packages):
    """(path below npu_bridge, functions around it, call) of every call in some packages."""
    for package in packages:
        place = REPOSITORY / ("" if package in TOP else "npu_bridge") / package
        for path in sorted(place.rglob("*.py") if place.is_dir() else [place]):
            for around, node in walk(tree_of(path), ()):
                yield path.relative_to(REPOSITORY).as_posix().removeprefix("npu_bridge/"), around, node


def walk(node, around):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield around, child
        inside = (*around, child.name) if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else around
        yield from walk(child, inside)


def name_of(call):
    """`open` of `open(...)`, and of `path.open(...)`."""
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def owner_of(call):
    return ast.unparse(call.func).rpartition(".")[0]


def opens(call):
    """ "r" or "w" of a call that opens a file, else None."""
    if name_of(call) not in ("open", "fdopen") or owner_of(call) not in ("", "os", "io"):
        return None
    texts = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    if owner_of(call) == "os":
        return "w" if "O_WRONLY" in ast.unparse(call) or "O_RDWR" in ast.unparse(call) else "r"
    return "w" if any(set("wax+") & set(text) and len(text) <= 3 for text in texts) else "r"


def named_in(call):
    return {node.id for node in ast.walk(call) if isinstance(node, ast.Name)} | {
        node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)
    }


def test_what_is_written_beside_a_training_is_attempted():
    calls = list(calls_in(BESIDE))
    attempted: dict[str, set[str]] = {}
    for path, _, call in calls:
        if name_of(call) in ("attempt", "GrowingFile"):
            attempted.setdefault(path, set()).update(named_in(call))
    found, seen = [], set()
    for path, around, call in calls:
        is_writing = name_of(call) in WRITERS or opens(call) == "w"
        if not is_writing or name_of(call) in ("attempt", "GrowingFile"):
            continue
        seen.add(path)
        if path not in PRODUCTS and not set(around) & attempted.get(path, set()):
            found.append(f"{path}:{call.lineno}: {ast.unparse(call)[:80]}")
    assert not found, "write it through NonFatalOutput.attempt or a GrowingFile"
    assert set(PRODUCTS) <= seen, "no longer written there; take it off the list"
    assert sum(map(len, attempted.values())) > 30


def test_files_are_read_in_one_way():
    found = []
    for path, _, call in calls_in(READING):
        is_reading = opens(call) == "r" and "devnull" not in ast.unparse(call)
        if name_of(call) in READERS and owner_of(call):
            is_reading = name_of(call) != "load" or owner_of(call) in ("np", "json")
        # Of an array that is open; of what is not a file.
        is_open = call.args and ast.unparse(call.args[0]) in ("file", "session")
        if is_reading and not is_open and path not in READ_OTHERWISE:
            found.append(f"{path}:{call.lineno}: {ast.unparse(call)[:80]}")
    assert not found, "read it through npu_bridge.base.reading"


def test_texts_are_opened_in_an_encoding_that_no_locale_chooses():
    found, seen = [], 0
    for path, _, call in calls_in(["", *TOP]):
        is_text = opens(call) is not None and owner_of(call) != "os"
        if name_of(call) in ("read_text", "write_text") and owner_of(call):
            is_text = owner_of(call) != "distribution"  # files of installed packages, in UTF-8
        texts = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant)]
        if not is_text or any(isinstance(text, str) and len(text) <= 3 and "b" in text for text in texts):
            continue
        seen += 1
        says_it = "utf-8" in texts or {"encoding", None} & {keyword.arg for keyword in call.keywords}
        if not says_it and path not in ENCODED_OTHERWISE:
            found.append(f"{path}:{call.lineno}: {ast.unparse(call)[:80]}")
    assert seen > 20 and not found, "say encoding=, or write bytes where the text holds names of files"


def test_lines_are_printed_in_one_way():
    found = []
    for path, _, call in calls_in(["", *TOP]):
        whole = ast.unparse(call.func)
        is_print = whole in ("print", "click.echo", "click.secho", "click.utils.echo", "console.print", "warnings.warn")
        is_stream = any(f"std{name}" in whole for name in ("out", "err")) and name_of(call) in ("write", "writelines")
        is_logger = whole == "logging.getLogger" and "__name__" in ast.unparse(call)
        if (is_print or is_stream or is_logger) and path not in PRINT_OTHERWISE and path != "npu_run/table.py":
            found.append(f"{path}:{call.lineno}: {ast.unparse(call)[:80]}")
    assert not found, "print it through npu_bridge.base.terminal, rows of tables through npu_run/table.py"


def test_numbers_are_told_from_booleans_in_one_way():
    found = {}
    for path, _, call in calls_in(["", "npu_run"]):
        if name_of(call) == "isinstance" and {"bool", "bool_", "Real", "Integral"} & named_in(call.args[1]):
            found.setdefault(path, f"{path}:{call.lineno}: {ast.unparse(call)[:80]}")
    assert found.pop("base/arguments.py")
    extra = [text for path, text in found.items() if path not in TOLD_OTHERWISE]
    assert not extra, "check it through npu_bridge.base.arguments"
    assert set(found) >= set(TOLD_OTHERWISE), "no longer done there; take it off the list"


# Shapes of numpy; and a list that only goes into an operator.
SHAPES_OTHERWISE = {
    "optimizers/subspace/basis.py",
    "npu_run/compare/spread.py",
    "session/precision/batch_norm.py",
}


def test_sizes_of_tensors_are_read_in_one_way():
    """Without TensorFlow 2 behaviour, `shape[0]` is a `Dimension`, of which an operator makes no number."""
    found, seen = [], set()
    for file in (file for name in ("npu_bridge", "npu_run") for file in sorted((REPOSITORY / name).rglob("*.py"))):
        path = file.relative_to(REPOSITORY).as_posix().removeprefix("npu_bridge/")
        for node in nodes_of(file):
            value = node.value if isinstance(node, (ast.Subscript, ast.Starred)) else None
            if isinstance(node, ast.Starred) and isinstance(value, ast.Subscript):
                value = value.value  # *x.shape[1:]
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
                continue  # a shape again
            if isinstance(value, ast.Attribute) and value.attr == "shape":
                seen.add(path)
                found += [] if path in SHAPES_OTHERWISE else [f"{path}:{node.lineno}: {ast.unparse(node)}"]
    assert not found, "read shape.as_list(), or shape.num_elements() of a vector"
    assert seen == SHAPES_OTHERWISE, "no longer done there; take it off the list"


OF_SESSIONS = {"partial_run", "partial_run_setup", "run", "make_callable", "close", "_make_callable_from_options"}
OF_SESSIONS |= {"_call_tf_sessionprun", "_call_tf_sessionrun", "_do_run", "__init__"}


def patched(node):
    """(object, name) of attributes that a statement or a call gives to an object; a name that is computed is ""."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
        yield ast.unparse(node.value), node.attr
    elif isinstance(node, ast.Call) and name_of(node) in ("setattr", "delattr", "__setattr__", "wrap_function"):
        yield ast.unparse(node.args[0]), getattr(node.args[1], "value", "")


def test_sessions_are_changed_in_one_place():
    """Methods of one session, or of a class of sessions, whatever name the class has there."""
    found = []
    packages = [REPOSITORY / name for name in ("npu_bridge", "npu_run", "npu_device", "hccl", "tensorflow1_compat")]
    for path in (path for package in packages for path in sorted(package.rglob("*.py"))):
        for part in tree_of(path).body:
            is_about_sessions = "ession" in ast.unparse(part)
            for target, name in (pair for node in ast.walk(part) for pair in patched(node)):
                is_method = name in OF_SESSIONS and is_about_sessions and target != "self"
                if is_method or target.endswith("Session"):
                    found.append(f"{path.relative_to(REPOSITORY)}: {target}.{name}")
    assert sorted(found) == [
        "npu_bridge/base/session_wrapper.py: kind.__init__",
        "npu_bridge/base/session_wrapper.py: module.BaseSession.",
    ], "add a SessionEngine with npu_bridge.base.session_wrapper"
