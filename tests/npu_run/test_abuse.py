"""`npu-run` where its streams, its open files, its thread or what it is given are not as they should be."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading

import pytest

from npu_bridge.base.terminal import escape_controls, escape_in_line
from npu_run import cli
from tests.npu_run.launching import LIMIT_SECS, ROOT, npu_run, write_script
from tests.reporting.test_page import write_history

# Clears the screen, rings, sets colours in both ways, begins a line, turns the direction, is no UTF-8.
EVIL = "\x1b[2J\x07\x9b31m\nnpu-run: done\u202e\udc9b"
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\udc9b]")
COMMANDS = {
    "alone": "train.py",
    "job": "-np 2 train.py",
    "compare": "compare run run",
    "help": "--help",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    write_history(str(folder / "run"), [3.0, 2.0, 1.0])
    # In one piece: parts of lines are shown, too.
    write_script(folder, "import sys\nsys.stdout.write('x' * 10 + '\\n')\n")
    return folder


def shell(folder, command, around, **others):
    """Runs a command of npu-run in a shell; gives exit code, output and errors."""
    start = f"{shlex.quote(sys.executable)} -m npu_bridge.run {command}"
    text = ["bash", "-c", f"set -o pipefail; {around.format(start)}"]
    done = subprocess.run(
        text,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_SECS,
        check=False,
        **others,
    )
    return done.returncode, done.stdout.decode(errors="surrogateescape"), done.stderr.decode(errors="surrogateescape")


@pytest.mark.few_fast(2, "other commands print in the same way")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_stream_is_told_in_one_sentence(folder, command):
    for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
        code, output, errors = shell(folder, COMMANDS[command], f"{{}} {closed}")
        said = (
            ""
            if "2>&-" in closed
            else "standard output is closed. Expected a terminal, a file or a pipe; add >/dev/null"
        )
        assert code == 2 and output == "" and said in errors and errors.count("\n") == bool(said), errors


def test_a_closed_input_is_none(folder):
    code, output, _ = shell(folder, COMMANDS["job"], "{} <&-")
    assert code == 0 and sorted(output.splitlines()) == ["[rank 1] " + "x" * 10, "x" * 10]


@pytest.mark.few_fast(2, "other commands print in the same way")
@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"alone"}))
def test_output_that_nobody_takes_is_told_in_one_sentence(folder, command):
    """A pipe whose reader is gone, and a disk that is full; the script of a single rank is on its own."""
    reader, writer = os.pipe()
    os.close(reader)
    code, _, errors = shell(folder, COMMANDS[command], f"{{}} >&{writer}", pass_fds=[writer])
    os.close(writer)
    lines = errors.splitlines()[command == "job" :]
    assert code == (141 if command == "job" else 2) and len(lines) == 1 and "the program that reads" in lines[0], errors
    code, _, errors = shell(folder, COMMANDS[command], "{} > /dev/full")
    lines = errors.splitlines()[command == "job" :]
    assert code == (0 if command == "job" else 2) and len(lines) == 1 and "No space left" in lines[0], errors


@pytest.mark.few_fast(2, "other commands open files in the same way")
@pytest.mark.parametrize("command", COMMANDS)
def test_few_open_files_are_told_in_one_sentence(folder, command):
    for count in (10, 20):
        code, output, errors = shell(folder, COMMANDS[command], f"ulimit -n {count}; {{}}")
        assert code == 2 and output == "" and errors.count("\n") == 1, errors
        assert f"this process can open only {count} files. Expected at least 64; run ulimit -n 1024" in errors
    code, _, errors = shell(folder, COMMANDS[command], "ulimit -Sn 20; {}")
    assert code in (0, 2) and "can open" not in errors, "what may be raised is raised"


def test_a_job_in_a_thread_is_refused(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    codes = []

    def run(*arguments):
        try:
            cli.main(list(arguments))
        except SystemExit as stop:
            codes.append(stop.code)

    for arguments in (["train.py"], ["-np", "2", "train.py"]):
        thread = threading.Thread(target=run, args=arguments, name="mine")
        thread.start()
        thread.join(LIMIT_SECS)
    assert codes == [2, 2]
    refused = [line for line in capsys.readouterr().err.splitlines() if "starting" not in line]
    assert len(refused) == 2
    assert all(line.startswith("npu-run: a job is started in the thread 'mine'. Expected the main") for line in refused)


@pytest.mark.parametrize(
    "command",
    ["{0}", "-np {0} train.py", "-H {0} train.py", "--hostfile {0} train.py", "--rank-table {0} train.py", "--{0}"]
    + ["--timeline {0} train.py", "--logs --out train.py/{0} train.py", "compare {0} {0}"]
    + ["report {0}", "check {0}", "plan --params {0} --bandwidth 1", "replay {0} train.py"]
    + ["bisect --out train.py/{0} train.py", "plan --params 1 --bandwidth 1Gbit --from-run {0}"],
)
def test_what_is_typed_is_shown_and_not_sent(folder, command, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit, match="2"):
        cli.main([word.format(EVIL) for word in command.split()])
    said = "".join(capsys.readouterr())
    assert not CONTROLS.search(said), said
    assert "\\x1b[2J\\x07\\x9b31m\\nnpu-run: done\\u202e" in said


def test_names_and_errors_of_ranks_are_shown_and_their_own_output_is_sent(tmp_path):
    name = f"{EVIL}.py"
    colours = "\x1b[31mred\x1b[0m"
    write_script(
        tmp_path,
        f"""
        import os, pathlib, time
        print({colours!r}, flush=True)
        pathlib.Path("printed." + os.environ["RANK_ID"]).touch()
        while not all(pathlib.Path(f"printed.{{rank}}").exists() for rank in range(2)):
            time.sleep(0.02)
        if os.environ["RANK_ID"] == "0":
            raise ValueError({EVIL!r} + chr(0x1b))
        time.sleep({LIMIT_SECS})
        """,
        name=name,
    )
    code, output = npu_run("-np", "2", name, cwd=tmp_path)
    assert code == 1 and f"\n{colours}\n" in f"\n{output}" and f"[rank 1] {colours}\n" in output
    launcher = output[output.index("npu-run: traceback") :] if "npu-run: traceback" in output else output
    assert not CONTROLS.search(launcher) and "ended with ValueError: \\x1b[2J" in launcher


def test_visible():
    everything = "".join(map(chr, [*range(0x300), 0x2028, 0x202E, 0x2066, 0xD800, 0x1F600]))
    shown = escape_controls(everything)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", shown)
    assert escape_controls(shown) == shown and "\t\n" in shown and "\u00e9" in shown and "\U0001f600" in shown
    assert (
        escape_in_line("a\tb\nc") == "a\\tb\\nc"
        and escape_controls("\x1b\x9b\u202e\ud800") == "\\x1b\\x9b\\u202e\\ud800"
    )
