"""Whatever folder or file a command of `npu-run` must write to: every byte that it did not make is still there.

Nearly all cases are refused before anything is started, so the commands run in this process. A user's project has files
of all the names that commands would write, and the tree around it is hashed before and after.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from npu_bridge.base import held_folders
from npu_bridge.base.files import NotOursError, remove_unfinished_save
from npu_bridge.base.output_folders import OutputFolder, claim_output_folder
from npu_bridge.reporting import CsvWriter
from npu_bridge.reporting.picture_style import PICTURE_FILES, svg_picture
from npu_run.bisect import bisect
from npu_run.check import check
from npu_run.cli import run_script
from npu_run.compare.command import compare
from npu_run.errors import LaunchError
from npu_run.explain import explain
from npu_run.outputs import MADE_BY, claim_command_output
from npu_run.predict.command import plan
from npu_run.record import record, replay
from npu_run.report import report
from tests.holding import python
from tests.npu_run.launching import finish, npu_run, read_until, start, write_script
from tests.reporting.test_page import write_history
from tests.small_disk import SmallDisk

# Everything that commands write, and what users have.
NAMES = [
    *{re.sub(r"\[0-9\]\*|\*+", "0", pattern) for patterns in MADE_BY.values() for pattern in patterns},
    "train.py",
    "notes.txt",
    ".hidden",
    "rank_1.log",
    "rank_1/mine",
    "repeat-0/thesis.txt",
    "repeat-1/thesis.txt",
    "model/model.ckpt-1.index",
    "history.jsonl",
    "trial.json",
    "report.html",
    "report.json",
    "run.toml",
    "compare.html",
    "r.json",
    "plan.png",
    "stages.svg",
    "repeats/repeat-0/thesis.txt",
    "recorded/rank_0/record.json",
    "recorded/replayed/mine",
    "bisect/state.json",
    "timeline/tail.svg",
    "dump/index.json",
    "run_a/report.html",
    "run_b/report.html",
]
# The command that writes, as its marker says, its function, what makes it write to a folder, and what it would replace.
FOLDERS = {
    "--logs --out": ("npu-run", run_script, ["--logs", "--out", "{}", "train.py"], "rank_0.log"),
    "--repeat --out": ("npu-run", run_script, ["--repeat", "2", "--out", "{}", "train.py"], "repeat-1/x"),
    "--timeline --out": ("npu-run", run_script, ["--timeline", "0:1", "--out", "{}", "train.py"], "tail.svg"),
    "record --out": ("npu-run record", record, ["--out", "{}", "train.py"], "rank_0/record.json"),
    "replay --out": ("npu-run replay", replay, ["--out", "{}", "recorded", "train.py"], "run/replay_rank_0.json"),
    "bisect --out": ("npu-run bisect", bisect, ["--out", "{}", "train.py"], "kept.txt"),
    "compare --write-names": ("npu-run compare", compare, ["dump", "--write-names", "{}"], "one.0.1000000.npy"),
}
PLACES = {
    "this folder": ".",
    "the one above": "..",
    "the root": "/",
    "a tilde": "~",
    "below a tilde": "~/out",
    "the home folder": "{home}",
    "the temporary folder": "{tmp}",
    "a file": "notes.txt",
    "below a file": "notes.txt/out",
    "a stranger's folder": "../mine",
    "a stranger's hidden file": "../hidden",
    "a stranger's link": "../one_link",
    "a link to a stranger's folder": "../to_mine",
    "a link to a file": "../to_file",
    "a pipe": "../pipe",
    "a folder of another command": "{own}/of_another",
    "a copy of an own folder": "{own}/copy",
    "an own folder with a stranger's file": "{own}/with_strangers",
    "an own folder with a changed file": "{own}/with_changed",
    "a marker that is not one": "../no_marker",
    "held by another job": "{held}",
    "a full disk": "{full}/out",
    "a read-only folder": "{fixed}/empty",
    "a new folder in a read-only one": "{fixed}/new",
    "a stranger's read-only folder": "{fixed}/mine",
}
# Commands that write one file, and the name it has by itself or is given.
FILES = {
    "check --run --out": (check, ["--run", "--out", "{}", "train.py"], "r.json"),
    "check --out": (check, ["--out", "{}", "train.py"], "r.json"),
    "compare -o": (compare, ["run_a", "run_b", "-o", "{}"], "compare.html"),
    "report -o": (report, ["run_a", "-o", "{}"], "report.html"),
    "explain --out": (explain, ["stages.toml", "--out", "{}"], "stages.svg"),
    "plan --out": (plan, ["--params", "1M", "--bandwidth", "1Gbit", "--out", "{}"], "plan.png"),
}
FILE_PLACES = {
    "a stranger's file": "../mine/{name}",
    "a stranger's notes": "notes.txt",
    "a stranger's program": "train.py",
    "a link to a stranger's file": "../to_file",
    "a link to nothing": "../to_nothing",
    "this folder": ".",
    "the one above": "..",
    "the home folder": "{home}",
    "the temporary folder": "{tmp}",
    "a tilde": "~",
    "below a tilde": "~/{name}",
    "below a file": "notes.txt/{name}",
    "a pipe": "../pipe",
    "a folder that is not there": "nowhere/{name}",
    "a read-only folder": "{fixed}/empty/{name}",
    "a stranger's read-only file": "{fixed}/mine/{name}",
}
DEFAULTS = {
    "--repeat": (run_script, ["--repeat", "2", "train.py"]),
    "--timeline": (run_script, ["--timeline", "0:1", "train.py"]),
    "record": (record, ["train.py"]),
    "replay": (replay, ["recorded", "train.py"]),
    "bisect": (bisect, ["train.py"]),
    "compare": (compare, ["run_a", "run_b"]),
    "report": (report, ["run_a"]),
}
CASES = [
    *((function, arguments, place, name) for name, (_, function, arguments, _) in FOLDERS.items() for place in PLACES),
    *((function, arguments, place, name) for name, (function, arguments, _) in FILES.items() for place in FILE_PLACES),
    *((function, arguments, "by itself", name) for name, (function, arguments) in DEFAULTS.items()),
]


def put_strangers_files(folder):
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"years of work on {name}")


def tree_of(folder):
    """Returns kind and content of everything in a folder, without following links."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.match("with_*/.npu_bridge.json"):
            continue  # the command's own marker says when it was there last
        kind = stat.S_IFMT(path.lstat().st_mode)
        held = (
            os.readlink(path)
            if path.is_symlink()
            else hashlib.sha1(path.read_bytes()).hexdigest()
            if path.is_file()
            else ""
        )
        found[str(path)] = (kind, held)
    return found


HOLD = """
import contextlib, sys
from npu_bridge.base.output_folders import claim_output_folder
from npu_run.outputs import MADE_BY
with contextlib.ExitStack() as stack:
    for command, folder in zip(MADE_BY, sys.argv[1:]):
        stack.enter_context(claim_output_folder(folder, command, "x", ()))
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """Folders by the command that made them, each held by a job that runs."""
    root = tmp_path_factory.mktemp("held")
    folders = {command: root / command.replace(" ", "_") for command in MADE_BY}
    job = python(HOLD, *folders.values(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert job.stdout.readline() == "held\n"
    yield folders
    job.communicate()


@pytest.fixture(scope="module")
def disks(tmp_path_factory):
    """A full disk and one that is read-only; None where nothing can be mounted."""
    full, fixed = tmp_path_factory.mktemp("full"), tmp_path_factory.mktemp("fixed")
    mounted = []
    try:
        for folder in (full, fixed):
            mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
            if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
                yield None
                return
            mounted.append(folder)
        (full / "out").mkdir()
        (fixed / "empty").mkdir()
        put_strangers_files(fixed / "mine")
        SmallDisk(full).fill()
        subprocess.run(["mount", "-o", "remount,ro", str(fixed)], check=True)
        yield full, fixed
    finally:
        for folder in mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


class World:
    """A user's project, a home, other people's folders around it, and what commands have made there before.

    Nothing of it changes in a case that is refused, so that one serves them all.
    """

    def __init__(self, root):
        self.root = root
        for name in ("project", "mine", "hidden", "one_link", "home", "tmp"):
            (root / name).mkdir(parents=True)
        for name in ("project", "mine", "home"):
            put_strangers_files(root / name)
        (root / "tmp" / "of_others").write_text("a socket, say")
        (root / "hidden" / ".hidden").write_text("hidden")
        (root / "one_link" / "link").symlink_to(root / "mine")
        (root / "to_mine").symlink_to(root / "mine")
        (root / "to_file").symlink_to(root / "mine" / "notes.txt")
        (root / "to_nothing").symlink_to(root / "nothing")
        os.mkfifo(root / "pipe")
        write_script(root / "project", "open('started', 'w').close()")
        (root / "no_marker").mkdir()
        (root / "no_marker" / ".npu_bridge.json").write_text('{"made_by": "npu-run"}')
        for number, (command, _, _, name) in enumerate(FOLDERS.values()):
            self._make_own_folders(root / f"by_{number}", command, name)
        self.tree = tree_of(root)

    def _make_own_folders(self, root, command, name):
        """Folders of a command with a file of that name, into which a stranger has come since."""
        for folder in ("own", "with_strangers", "with_changed"):
            with claim_output_folder(str(root / folder), command, "--out", MADE_BY[command]) as own:
                path = Path(own.path, name)
                if folder != "with_strangers":
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text("made by the command")
        with claim_output_folder(str(root / "of_another"), "npu-run something", "--out", ()):
            pass
        shutil.copytree(root / "own", root / "copy")
        for folder in ("with_strangers", "with_changed"):
            (root / folder / name).parent.mkdir(exist_ok=True)
            (root / folder / name).write_text("a stranger's")


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(shared_world, monkeypatch):
    """The shared world, with the project as working directory."""
    root = shared_world.root
    monkeypatch.chdir(root / "project")
    monkeypatch.setenv("HOME", str(root / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(root / "tmp"))
    return shared_world


def place_of(place, world, disks, **others):
    if "{f" in place and disks is None:
        pytest.skip("nothing can be mounted here")
    full, fixed = disks or ("", "")
    return place.format(home=world.root / "home", tmp=world.root / "tmp", full=full, fixed=fixed, **others)


@pytest.mark.few_fast("each", "not every command with every kind of file")
@pytest.mark.parametrize("function, arguments, place, name", CASES, ids=[f"{case[3]}: {case[2]}" for case in CASES])
def test_nothing_of_somebody_elses_is_touched(function, arguments, place, name, world, disks, held):
    target = ""
    if name in FOLDERS:
        number = list(FOLDERS).index(name)
        target = place_of(PLACES[place], world, disks, held=held[FOLDERS[name][0]], own=f"../by_{number}")
    elif name in FILES:
        target = place_of(FILE_PLACES[place], world, disks, name=FILES[name][2])
    around = [*(disks or ()), *held.values()]
    before, variables = [tree_of(folder) for folder in around], dict(os.environ)
    result = CliRunner().invoke(function, [each.format(target) for each in arguments])
    after, expected = tree_of(world.root), world.tree
    world.tree = after
    assert after == expected, result.output
    assert [tree_of(folder) for folder in around] == before, result.output
    assert dict(os.environ) == variables, "nothing was begun"
    assert result.exit_code == 2, result.output or result.exception
    said = result.output.strip()
    assert said and "\n" not in said and "Traceback" not in said and len(said) < 400 + 4 * len(str(world.root)), said


def test_messages_name_what_is_below_the_current_folder_from_there_and_all_else_from_the_root(tmp_path, monkeypatch):
    """Wherever the command was given an absolute or a relative path."""
    for name in ("here", "here_too"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("years")
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "inner").mkdir()
    (tmp_path / "here" / "inner" / "thesis.txt").write_text("years")
    beside = tmp_path / "here_too"
    for given, said in (("inner", "inner"), (tmp_path / "here" / "inner", "inner"), ("../here_too", beside)):
        with pytest.raises(LaunchError, match=f"--out: {said} holds"), claim_command_output(str(given), "--out"):
            pass


@pytest.mark.slow("starts every command twice")
def test_a_folder_that_a_command_made_serves_it_again_and_only_once_at_a_time(tmp_path):
    """New, empty, own; what a stranger has put beside stays; two at once are refused, and a killed one is no matter."""
    write_script(
        tmp_path,
        """
        import os, sys, time
        print("begun", flush=True)
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.05)
        """,
    )
    (tmp_path / "repeats").mkdir()
    for number in range(2):
        code, output = npu_run("--repeat", 2, "--logs", "--out", "logs", "train.py", "train.py", cwd=tmp_path)
        assert code == 0 and output.count("begun") == 2, output
        (tmp_path / "repeats" / f"notes_{number}.txt").write_text("mine")
        (tmp_path / "logs" / f"notes_{number}.txt").write_text("mine")
    notes = [tmp_path / folder / f"notes_{number}.txt" for folder in ("repeats", "logs") for number in range(2)]
    assert [path.read_text() for path in notes] == ["mine"] * 4
    assert (tmp_path / "logs" / "rank_0.log").read_text().count("begun") == 4
    first = start("--logs", "train.py", "later", cwd=tmp_path)
    read_until(first, "begun\n")
    code, output = npu_run("--logs", "train.py", "train.py", cwd=tmp_path)
    assert code == 2 and "begun" not in output
    assert "logs is in use. Expected a folder that no other job uses; got npu-run, process " in output
    assert f"stop it (kill {first.pid})" in output
    first.kill()
    finish(first)
    (tmp_path / "later").touch()
    code, output = npu_run("--logs", "train.py", "train.py", cwd=tmp_path)
    assert code == 0 and "begun" in output, "what a killed job has left is taken over"


@pytest.mark.slow("records a training")
def test_what_somebody_saves_into_a_folder_while_a_command_runs_stays(tmp_path):
    """The next run continues beside it, or is refused where it would have to clear its folder."""
    write_script(
        tmp_path,
        """
        import os, sys
        import tensorflow.compat.v1 as tf
        tf.disable_eager_execution()
        # A reference variable shares its memory with what was read of it: a loss might be that after the update.
        weight = tf.get_variable("weight", [], initializer=tf.ones_initializer(), use_resource=True)
        train = tf.train.GradientDescentOptimizer(0.1).minimize(weight * weight, tf.train.get_or_create_global_step())
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for name in sys.argv[2:]:
                os.makedirs(os.path.dirname(name), exist_ok=True)
                open(name, "a").write("mine")
            for _ in range(3):
                session.run(train)
        """,
    )
    record_it = ("record", "--steps", 2, "--out", "rec", "train.py", "{out}/model")
    replay_it = ("replay", "--out", "rep", "rec", "train.py", "{out}/model")
    assert npu_run(*record_it, "rec/notes.txt", cwd=tmp_path)[0] == 0
    assert npu_run(*record_it, "{out}/of_the_run", cwd=tmp_path)[0] == 0
    assert npu_run(*record_it, cwd=tmp_path)[0] == 0
    assert not (tmp_path / "rec" / "run" / "of_the_run").exists(), "a script writes what it makes to the run's folder"
    for _ in range(2):
        code, output = npu_run(*replay_it, "rep/notes.txt", "{out}/of_the_run", cwd=tmp_path)
        assert code == 0 and "bit for bit" in output, output
    assert (tmp_path / "rep" / "run" / "of_the_run").read_text() == "mine"
    assert (tmp_path / "rep" / "notes.txt").read_text() == "minemine"
    assert npu_run(*record_it, "rec/rank_0/notes.txt", cwd=tmp_path)[0] == 0
    for _ in range(2):
        code, output = npu_run(*record_it, cwd=tmp_path)
        assert code == 2 and "holds 'rank_0/notes.txt', which npu-run record did not make" in output, output
    assert [(tmp_path / "rec" / name).read_text() for name in ("notes.txt", "rank_0/notes.txt")] == ["mine", "mine"]


@pytest.mark.slow("a job for one folder")
def test_ranks_that_another_launcher_started_share_their_folder(tmp_path):
    write_script(tmp_path, "import time\ntime.sleep(1)\nprint('ran')")
    ranks = [{"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"} for rank in range(2)]
    jobs = [start("--logs", "train.py", cwd=tmp_path, **variables) for variables in ranks]
    for code, output in map(finish, jobs):
        assert code == 0 and "ran" in output


def test_pages_and_pictures_that_a_command_made_are_made_anew(tmp_path, monkeypatch):
    for name in ("run_c", "run_d"):
        write_history(str(tmp_path / name), [3.0, 2.0, 1.0])
    monkeypatch.chdir(tmp_path)
    for function, arguments, made in (
        (compare, ["run_c", "run_d"], "compare.html"),
        (report, ["run_c"], "run_c/report.html"),
        (plan, ["--params", "1M", "--bandwidth", "1Gbit", "--out", "plan.png"], "plan.png"),
    ):
        for _ in range(2):
            ended = CliRunner().invoke(function, arguments)
            assert ended.exit_code in (0, 1), ended.output
            assert os.path.getsize(made) > 1000
            os.truncate(made, 900)  # so that the second time is seen


def test_a_migration_report_is_written_again(tmp_path):
    write_script(tmp_path, "print('ran')")
    for _ in range(2):
        assert npu_run("check", "--run", "--out", "r.json", "train.py", cwd=tmp_path)[0] == 0
        assert json.loads((tmp_path / "r.json").read_text())["script"] == "train.py"


def test_what_commands_write_is_known_by_its_beginning(tmp_path):
    assert re.search(PICTURE_FILES, svg_picture(["<g/>"], 100, 50, "#888", "", attributes=' role="img"').encode())
    assert not re.search(PICTURE_FILES, b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 10 10">\n<style>')
    numbers = CsvWriter(str(tmp_path / "numbers.csv"))
    for step in (0, 1):
        numbers.begin(step)
        numbers.write(step + 1, {"loss": 1.0}, None)
        numbers.close()
    (tmp_path / "mine.csv").write_text("step,weight\n1,2.0\n")
    with pytest.raises(NotOursError, match="mine.csv is a file that npu_bridge did not make"):
        CsvWriter(str(tmp_path / "mine.csv")).begin(0)
    assert (tmp_path / "mine.csv").read_text() == "step,weight\n1,2.0\n"


KILLED = """
import os, signal, sys
from npu_bridge.base.output_folders import claim_output_folder
with claim_output_folder(sys.argv[1], "npu-run record", "--out", ["rank_*/record.json"]) as own:
    os.mkdir(os.path.join(own.path, "rank_0"))
    open(os.path.join(own.path, "rank_0", "record.json"), "w").close()
    os.utime(os.path.join(own.path, ".npu_bridge.lock"))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_comes_after_a_command_was_killed_is_not_its_own(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    assert python(KILLED, folder).wait() == -signal.SIGKILL
    monkeypatch.setattr(held_folders, "BEAT_SECS", 0.05)  # that much later it may be the command's last word
    time.sleep(0.1)
    (folder / "rank_0" / "notes.txt").write_text("mine")
    for _ in range(2):
        with pytest.raises(FileExistsError, match="holds 'rank_0/notes.txt'"):
            with claim_output_folder(str(folder), "npu-run record", "--out", ["rank_*/record.json"]) as own:
                own.clear("rank_*")
    (folder / "rank_0" / "notes.txt").rename(tmp_path / "notes.txt")
    with claim_output_folder(str(folder), "npu-run record", "--out", ["rank_*/record.json"]) as own:
        own.clear("rank_*")
    assert not (folder / "rank_0").exists()


def test_what_a_command_lists_is_json(tmp_path):
    """A marker names the command, and every file it has left; others that came meanwhile are not among them."""
    with claim_output_folder(str(tmp_path / "out"), "npu-run record", "--out", ["a", "b/*.c", "d/**"]) as own:
        for name in ("a", "mine", "b/1.c", "b/mine", "b/e/1.c", "d/1", "d/e/2", "d_", "e/d/3"):
            Path(own.path, name).parent.mkdir(parents=True, exist_ok=True)
            Path(own.path, name).write_text("1")
    facts = json.loads((tmp_path / "out" / ".npu_bridge.json").read_text())
    assert facts["made_by"] == "npu-run record" and facts["is_open"] is False
    assert set(facts["files"]) == {"a", "b/1.c", "d/1", "d/e/2"}


def test_a_file_that_somebody_has_changed_since_is_not_the_commands(tmp_path):
    def opened():
        return OutputFolder(str(tmp_path), "npu-run record", "--out", ["*.txt"])

    first, made = opened(), tmp_path / "a.txt"
    made.write_text("made")
    first.close()
    second = opened()
    assert second.check("*.txt") == ["a.txt"]
    second.close()
    made.write_text("changed")
    probe = tmp_path / "probe"
    probe.touch()
    while probe.stat().st_ctime_ns <= made.stat().st_ctime_ns:  # the clock of a file system has long ticks
        probe.touch()
    with pytest.raises(NotOursError, match="a.txt"):
        opened().check("*.txt")


def test_a_link_among_the_leftovers_of_a_save_is_removed_and_not_its_target(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir()
    (target / "weights").touch()
    link.symlink_to(target)
    remove_unfinished_save(str(link), is_new=True)
    assert (target / "weights").exists() and not link.is_symlink()
