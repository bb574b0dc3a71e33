"""Installs everything into .venv, step by step, and writes down at the end that it is complete.

Started by setup_env.sh, which has already chosen the Python that runs this and found a compiler and cmake.
Every step may be run again on top of a half-finished one: pip passes over what is there, and a step counts as
done only when the thing it installed really imports. Horovod is installed as `npu-run doctor --fix` does it
(npu_bridge/launch/doctor/build.py): its wheel is kept in the user's cache, so that the next checkout needs no compiler
and no minutes.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from npu_bridge.launch.doctor.build import Installer, InstallError  # of this checkout; it needs no other package

VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
# What may be wanted, each with all before it: one rank, several ranks, the test tools.
PARTS = ("alone", "ranks", "all")


def main(key: str, parts: str) -> None:
    """Runs the steps for `parts` and writes `key` into .venv/ready.PARTS, for what they include as well."""
    marks = [VENV / f"ready.{name}" for name in PARTS]
    began = time.monotonic()
    say(f"making .venv with Python {platform.python_version()} (full log: {LOG})")
    for mark in marks:
        mark.unlink(missing_ok=True)
    make_venv()
    INSTALLER.pip("pip, wheel, setuptools", ["--upgrade", "pip", "wheel", "setuptools>=64,<81"])
    extra = tensorflow_extra()
    others, title = ("test", " and the test tools") if parts == "all" else ("examples", "")
    packages = ["--editable", f".[{extra},{others}]"]
    install(
        f"TensorFlow, npu_bridge{title or ' and what its examples need'}", packages, "import tensorflow, npu_bridge"
    )
    if parts != "alone":
        INSTALLER.install_horovod()
    for mark in marks[: PARTS.index(parts) + 1]:
        mark.write_text(key + "\n")
    say(f"ready after {time.monotonic() - began:.0f} s")


def make_venv() -> None:
    """Creates .venv anew unless one of this Python version is there, whole enough to run pip."""
    if PYTHON.exists():
        code = f"import sys, pip; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
        if subprocess.run([str(PYTHON), "-c", code], capture_output=True).returncode == 0:
            return
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode != 0:
        fail(f"python -m venv did not work: {(finished.stdout + finished.stderr).strip()}")


def tensorflow_extra() -> str:
    """The extra that names the right TensorFlow: a much smaller one where no NVIDIA GPU can be used."""
    has_gpu = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()
    is_plain_linux = sys.platform == "linux" and platform.machine() == "x86_64"
    return "cpu" if is_plain_linux and not has_gpu else "tensorflow"


def install(title: str, packages: list[str], probe: str) -> None:
    """Installs packages and checks that `probe` runs; if not, once more from scratch.

    An interrupted installation looks installed but does not import.
    """
    INSTALLER.pip(title, packages)
    if INSTALLER.run([str(PYTHON), "-c", probe]) == 0:
        return
    INSTALLER.pip(
        "it does not import; once more without pip's cache", ["--force-reinstall", "--no-cache-dir", *packages]
    )
    if INSTALLER.run([str(PYTHON), "-c", probe]) != 0:
        fail("what was installed does not import")


def say(text: str) -> None:
    """Prints a line of progress."""
    print(f"make venv: {text}", flush=True)


def fail(text: str) -> None:
    """Prints the end of the log and one line of what went wrong, and stops."""
    if LOG.exists():
        print(INSTALLER.last_lines(), file=sys.stderr)
    sys.exit(f"make venv: {text}. The full log is {LOG}; run the same command again to go on from here.")


INSTALLER = Installer(str(PYTHON), LOG, say)

if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2])
    except InstallError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit("make venv: interrupted. Run the same command again to go on from here.")
