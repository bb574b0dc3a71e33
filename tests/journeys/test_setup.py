"""`make venv` on machines that lack something: one line with the fix, and nothing installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELL_TOOLS = ("sh", "cat", "cksum", "dirname", "sed")
REAL_PYTHON = f'exec "{sys.executable}" "$@"'
INSTALLER = """
import pathlib, sys
with open("installs", "a") as log:
    log.write("x")
pathlib.Path(".venv/bin").mkdir(parents=True, exist_ok=True)
python = pathlib.Path(".venv/bin/python")
python.write_text("#!/bin/sh\\nprintf 3.11")
python.chmod(0o755)
if not pathlib.Path("interrupt").exists():
    for parts in ("alone", "ranks", "all")[: ("alone", "ranks", "all").index(sys.argv[2]) + 1]:
        pathlib.Path(f".venv/ready.{parts}").write_text(sys.argv[1] + "\\n")
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


class Machine:
    """A copy of the set-up files, and a PATH with exactly the tools a test puts there."""

    def __init__(self, folder: Path):
        self.checkout = folder / "checkout"
        self.path = folder / "bin"
        self.path.mkdir(parents=True)
        self.home = folder / "home"
        self.home.mkdir()
        self.checkout.mkdir()
        shutil.copytree(ROOT / "tools", self.checkout / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("Makefile", "setup.cfg"):
            shutil.copy(ROOT / name, self.checkout)
        for name in SHELL_TOOLS:
            (self.path / name).symlink_to(shutil.which(name))

    def add(self, *names: str, script: str = "exit 0") -> None:
        """Puts a shell script on the PATH under some names."""
        for name in names:
            file = self.path / name
            file.write_text(f"#!/bin/sh\n{script}\n")
            file.chmod(0o755)

    def pretend_to_install(self) -> None:
        """Puts a real Python on the PATH, and an installer that only notes its calls."""
        self.add("python3.11", script=REAL_PYTHON)
        (self.checkout / "tools" / "setup_env.py").write_text(INSTALLER)

    def keep_wheel(self, python: str) -> None:
        """Puts a wheel of Horovod where an earlier set-up with that Python would have left it."""
        folder = self.home / ".cache" / "npu_bridge" / "wheels" / f"python{python}-x86_64-tensorflow-cpu-2.15.1"
        folder.mkdir(parents=True)
        (folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl").touch()

    def make(self, *arguments: str, **variables: str) -> tuple[int, list[str]]:
        """Runs make; gives its exit code and what the set-up printed."""
        finished = subprocess.run(
            [shutil.which("make"), *arguments],
            cwd=self.checkout,
            env={"PATH": str(self.path), "HOME": str(self.home), **variables},
            capture_output=True,
            text=True,
            timeout=600,
        )
        lines = (finished.stdout + finished.stderr).splitlines()
        return finished.returncode, [line for line in lines if not line.startswith("make:")]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def assert_refused(machine, parts, *arguments):
    code, lines = machine.make("venv", *arguments)
    assert code != 0
    assert len(lines) == 1
    assert lines[0].startswith("make venv: ") and all(part in lines[0] for part in parts)
    assert not (machine.checkout / ".venv").exists()


def test_missing_compiler(machine):
    machine.add("python3.11", script=REAL_PYTHON)
    machine.add("cmake")
    assert_refused(machine, ["a C++ compiler is missing", "apt-get install g++"])


def tells(version):
    return f'case "$2" in *version_info*) printf {version} ;; esac'


LACKS_VENV = 'case "$2" in *ensurepip*) exit 1 ;; *) printf 3.11 ;; esac'
NEEDED = "One of Python 3.11, 3.10, 3.9, 3.13, 3.12 is needed"
NEEDED_BY_2_15 = "One of Python 3.11, 3.10, 3.9 is needed for TensorFlow 2.15; found python3 is 3.12"
REFUSED = {  # Pythons on the PATH, arguments, what is told; there is a compiler, and no cmake
    "no cmake": ({"python3.11": REAL_PYTHON}, [], ["cmake is missing", "apt-get install cmake"]),
    "no Python": ({}, [], ["found no Python at all"]),
    "one that is too new": ({"python3": tells("3.14")}, [], [NEEDED, "python3 is 3.14", "apt-get install python3.11"]),
    "one that is too new for TensorFlow": ({"python3": tells("3.12")}, ["TF=2.15"], [NEEDED_BY_2_15]),
    "another TensorFlow": (
        {"python3": tells("3.12")},
        ["TF=2.22"],
        ["TF=2.22 is not supported. Expected 2.15, 2.16, 2.17, 2.18, 2.19, 2.20 or 2.21."],
    ),
    "an old one by choice": ({"python2": tells("2.7")}, ["PYTHON=python2"], ["PYTHON=python2 is Python 2.7"]),
    "none by choice": ({"python3.11": REAL_PYTHON}, ["PYTHON=nothing"], ["PYTHON=nothing does not run"]),
    "a name that is passed over": ({"python3.11": "exit 127", "python3.10": tells("3.10")}, [], ["cmake is missing"]),
    "no environments": (
        {"python3.11": LACKS_VENV},
        [],
        ["cannot make environments", "apt-get install python3.11-venv"],
    ),
}


@pytest.mark.parametrize(("pythons", "arguments", "told"), REFUSED.values(), ids=REFUSED)
def test_what_is_missing_is_told_with_its_fix(machine, pythons, arguments, told):
    machine.add("g++")
    for name, script in pythons.items():
        machine.add(name, script=script)
    assert_refused(machine, told, *arguments)


def test_second_run_installs_nothing_and_an_interrupted_one_is_taken_up(machine):
    machine.add("cmake", "g++")
    machine.pretend_to_install()
    installs = machine.checkout / "installs"
    interrupt = machine.checkout / "interrupt"
    interrupt.touch()
    assert machine.make("venv") == (0, [])
    interrupt.unlink()
    assert machine.make("venv") == (0, [])
    assert installs.read_text() == "xx"
    assert machine.make("venv") == (0, [])
    assert installs.read_text() == "xx"
    with (machine.checkout / "setup.cfg").open("a") as config:
        config.write("# another requirement\n")
    assert machine.make("venv") == (0, [])
    assert installs.read_text() == "xxx"


def test_trainings_need_neither_compiler_nor_cmake_nor_the_test_tools(machine):
    machine.pretend_to_install()
    assert machine.make("venv-for-train", "RANKS=1") == (0, [])
    ready = {path.name for path in (machine.checkout / ".venv").glob("ready.*")}
    assert ready == {"ready.alone"}
    code, lines = machine.make("venv")
    assert code != 0 and "a C++ compiler is missing" in lines[0]
    assert machine.make("venv-for-train", "RANKS=2") == (0, [])
    machine.add("cmake", "g++")
    assert machine.make("venv-for-train", "RANKS=1") == (0, [])
    assert (machine.checkout / "installs").read_text() == "xx"
    assert machine.make("venv") == (0, [])
    assert machine.make("venv-for-train", "RANKS=2") == (0, [])
    assert (machine.checkout / "installs").read_text() == "xxx"


def test_a_kept_wheel_needs_no_compiler(machine):
    machine.pretend_to_install()
    machine.keep_wheel("3.8")
    assert machine.make("venv")[0] != 0
    machine.keep_wheel(f"{sys.version_info[0]}.{sys.version_info[1]}")
    assert machine.make("venv") == (0, [])


def test_moved_checkout_is_set_up_again(machine):
    machine.add("cmake", "g++")
    machine.pretend_to_install()
    machine.make("venv")
    machine.checkout = machine.checkout.rename(machine.checkout.with_name("elsewhere"))
    machine.make("venv")
    assert (machine.checkout / "installs").read_text() == "xx"


@pytest.mark.parametrize("is_ready", [False, True], ids=["new", "ready"])
def test_a_path_that_the_locale_cannot_read_is_refused(machine, is_ready):
    machine.add("cmake", "g++")
    machine.pretend_to_install()
    machine.checkout = machine.checkout.rename(machine.checkout.with_name("mit Lücke"))
    if is_ready:
        assert machine.make("venv") == (0, [])
        (machine.checkout / ".venv" / "bin" / "python").unlink()
        (machine.checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, lines = machine.make("venv", **ascii_alone)
    problem = "make venv: the path of this checkout cannot be decoded. Expected ASCII, or UTF-8 in a UTF-8 locale"
    assert code != 0 and len(lines) == 1
    assert lines[0].startswith(f"{problem}; got {machine.checkout} in the locale C. Set LC_ALL=C.UTF-8 and unset ")
    assert machine.make("venv", LC_ALL="C.UTF-8") == (0, [])
    assert machine.make("venv", LC_ALL="C") == (0, [])  # there Python chooses UTF-8
