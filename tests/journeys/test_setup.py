"""`make venv` on machines that lack something: one line with the fix, and nothing installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELL_TOOLS = ("sh", "cat", "cksum", "dirname", "sed")
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
        shutil.copytree(ROOT / "tools", self.checkout / "tools")
        for name in ("Makefile", "setup.cfg"):
            shutil.copy(ROOT / name, self.checkout)
        for name in SHELL_TOOLS:
            (self.path / name).symlink_to(shutil.which(name))

    def add(self, name: str, script: str = "exit 0") -> None:
        """Puts a shell script on the PATH."""
        file = self.path / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def add_python(self, name: str, version: str | None = None) -> None:
        """Puts a Python on the PATH: the real one, or one that only tells a version."""
        pretence = f'case "$2" in *version_info*) printf {version} ;; esac'
        self.add(name, f'exec "{sys.executable}" "$@"' if version is None else pretence)

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


def assert_refused(machine, part, *arguments):
    code, lines = machine.make("venv", *arguments)
    assert code != 0
    assert len(lines) == 1
    assert lines[0].startswith("make venv: ") and part in lines[0]
    assert not (machine.checkout / ".venv").exists()
    return lines[0]


def test_missing_cmake(machine):
    machine.add_python("python3.11")
    machine.add("g++")
    assert "apt-get install cmake" in assert_refused(machine, "cmake is missing")


def test_missing_compiler(machine):
    machine.add_python("python3.11")
    machine.add("cmake")
    assert "apt-get install g++" in assert_refused(machine, "a C++ compiler is missing")


def test_wrong_python(machine):
    machine.add("g++")
    machine.add("cmake")
    machine.add_python("python3", "3.14")
    line = assert_refused(machine, "found python3 is 3.14")
    assert "One of Python 3.11, 3.10, 3.9, 3.13, 3.12 is needed" in line and "apt-get install python3.11" in line


@pytest.mark.parametrize(
    "chosen, python, told",
    [
        ("2.15", "3.12", "One of Python 3.11, 3.10, 3.9 is needed for TensorFlow 2.15; found python3 is 3.12"),
        ("2.22", "3.12", "TF=2.22 is not supported. Expected 2.15, 2.16, 2.17, 2.18, 2.19, 2.20 or 2.21."),
    ],
)
def test_wrong_tensorflow(machine, chosen, python, told):
    machine.add_python("python3", python)
    assert_refused(machine, told, f"TF={chosen}")


def test_wrong_python_by_choice(machine):
    machine.add_python("python3.11")
    machine.add_python("python2", "2.7")
    assert_refused(machine, "PYTHON=python2 is Python 2.7", "PYTHON=python2")
    assert_refused(machine, "PYTHON=nothing does not run", "PYTHON=nothing")


def test_no_python(machine):
    assert_refused(machine, "found no Python at all")


def test_name_of_a_python_that_does_not_run_is_passed_over(machine):
    machine.add("python3.11", "echo 'command not found' >&2; exit 127")
    machine.add_python("python3.10", "3.10")
    machine.add("g++")
    assert_refused(machine, "cmake is missing")


def test_missing_venv_module(machine):
    machine.add("python3.11", 'case "$2" in *ensurepip*) exit 1 ;; *) printf 3.11 ;; esac')
    assert "apt-get install python3.11-venv" in assert_refused(machine, "cannot make environments")


def test_second_run_installs_nothing_and_an_interrupted_one_is_taken_up(machine):
    for name in ("cmake", "g++"):
        machine.add(name)
    machine.add_python("python3.11")
    (machine.checkout / "tools" / "setup_env.py").write_text(INSTALLER)
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
    machine.add_python("python3.11")
    (machine.checkout / "tools" / "setup_env.py").write_text(INSTALLER)
    assert machine.make("venv-for-train", "RANKS=1") == (0, [])
    ready = {path.name for path in (machine.checkout / ".venv").glob("ready.*")}
    assert ready == {"ready.alone"}
    code, lines = machine.make("venv")
    assert code != 0 and "a C++ compiler is missing" in lines[0]
    assert machine.make("venv-for-train", "RANKS=2") == (0, [])
    for name in ("cmake", "g++"):
        machine.add(name)
    assert machine.make("venv-for-train", "RANKS=1") == (0, [])
    assert (machine.checkout / "installs").read_text() == "xx"
    assert machine.make("venv") == (0, [])
    assert machine.make("venv-for-train", "RANKS=2") == (0, [])
    assert (machine.checkout / "installs").read_text() == "xxx"


def test_a_kept_wheel_needs_no_compiler(machine):
    machine.add_python("python3.11")
    (machine.checkout / "tools" / "setup_env.py").write_text(INSTALLER)
    machine.keep_wheel("3.8")
    assert machine.make("venv")[0] != 0
    machine.keep_wheel(f"{sys.version_info[0]}.{sys.version_info[1]}")
    assert machine.make("venv") == (0, [])


def test_moved_checkout_is_set_up_again(machine):
    for name in ("cmake", "g++"):
        machine.add(name)
    machine.add_python("python3.11")
    (machine.checkout / "tools" / "setup_env.py").write_text(INSTALLER)
    machine.make("venv")
    machine.checkout = machine.checkout.rename(machine.checkout.with_name("elsewhere"))
    machine.make("venv")
    assert (machine.checkout / "installs").read_text() == "xx"


@pytest.mark.parametrize("is_ready", [False, True], ids=["new", "ready"])
def test_a_path_that_the_locale_cannot_read_is_refused(machine, is_ready):
    machine.add_python("python3.11")
    for name in ("cmake", "g++"):
        machine.add(name)
    (machine.checkout / "tools" / "setup_env.py").write_text(INSTALLER)
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
