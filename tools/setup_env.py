"""Installs everything into .venv or .venv-tfVERSION, step by step, and writes down at the end that it is complete.

Started by setup_env.sh, which has already chosen the Python that runs this and found a compiler and cmake.
Every step may be run again on top of a half-finished one: pip passes over what is there, and a step counts as
done only when the thing it installed really imports. Horovod is installed as `npu-run doctor --fix` does it
(npu_run/doctor/build.py): its wheel is kept in the user's cache, so that the next checkout needs no compiler
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
from npu_bridge.base.install import CHOSEN  # all are of this checkout, and need no other package
from npu_bridge.base.secondary_files import describe_failure
from npu_run.doctor.build import Installer, InstallError, MissingToolsError

ASKED_FOR = sys.argv[3] if sys.argv[3:] else ""  # a version of TensorFlow
VENV = Path(f".venv-tf{ASKED_FOR}" if ASKED_FOR else ".venv")
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
TENSORFLOW = ASKED_FOR or CHOSEN
# What may be wanted, each with all before it: one rank, several ranks, the test tools.
PARTS = ("alone", "ranks", "all")


def main(key: str, parts: str) -> None:
    """Runs the steps for `parts` and writes `key` into .venv/ready.PARTS, for what they include as well."""
    marks = [VENV / f"ready.{name}" for name in PARTS]
    began = time.monotonic()
    say(f"making {VENV} with Python {platform.python_version()} and TensorFlow {TENSORFLOW} (full log: {LOG})")
    for mark in marks:
        mark.unlink(missing_ok=True)
    make_venv()
    INSTALLER.pip("pip, wheel, setuptools", ["--upgrade", "pip", "wheel", "setuptools>=64,<81"])
    title = " and the test tools" if parts == "all" else " and what its examples need"
    install(f"TensorFlow, npu_bridge{title}", packages_for(parts), "import tensorflow, npu_bridge")
    if parts != "alone":
        install_horovod(parts)
    for mark in marks[: PARTS.index(parts) + 1]:
        mark.write_text(key + "\n")
    say(f"ready after {time.monotonic() - began:.0f} s")


def install_horovod(parts: str) -> None:
    """Installs Horovod; trainings do without it where it cannot be compiled."""
    try:
        INSTALLER.install_horovod()
    except MissingToolsError as error:
        if parts == "all":
            raise
        say(f"several ranks will use TensorFlow's own collectives, on one machine. {error}; then npu-run doctor --fix")


def make_venv() -> None:
    """Creates .venv anew unless one of this Python version is there, whole enough to run pip."""
    if PYTHON.exists():
        code = f"import sys, pip; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
        if subprocess.run([str(PYTHON), "-c", code], capture_output=True).returncode == 0:
            return
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode != 0:
        raise INSTALLER.failure(f"python -m venv did not work ({(finished.stdout + finished.stderr).strip()})")


def packages_for(parts: str) -> list[list[str]]:
    """What pip is given, call by call."""
    has_gpu = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()
    is_plain_linux = sys.platform == "linux" and platform.machine() == "x86_64"
    # The one that is called cpu is much smaller.
    name, extra = ("tensorflow-cpu", "cpu") if is_plain_linux and not has_gpu else ("tensorflow", "tensorflow")
    # Without the libraries of CUDA, TensorFlow finds no GPU and says so in a line that is easily missed.
    cuda = ["tensorflow[and-cuda]"] if is_plain_linux and has_gpu else []
    if TENSORFLOW == "2.15":
        return [[*cuda, "--editable", f".[{extra},{'test' if parts == 'all' else 'examples'}]"]]
    # TensorFlow 2.21 no longer brings TensorBoard.
    beside = ["tensorboard", "tensorflow-estimator==2.15.*", "scikit-learn>=1.3,<1.8"]
    if TENSORFLOW == "2.20":
        beside.append("protobuf<7")  # which it would take, and whose texts of graphs it cannot write
    versions = [f"{name}=={TENSORFLOW}.*", *beside]
    # Keras 2 asks for the package tensorflow, whichever of the two is there.
    return [[*versions, *cuda, "--editable", f".[{'plot,tools' if parts == 'all' else 'plot'}]"],
            ["--no-deps", f"tf-keras=={TENSORFLOW}.*"]]  # fmt: skip


def install(title: str, calls: list[list[str]], probe: str) -> None:
    """Installs packages and checks that `probe` runs; if not, once more from scratch.

    An interrupted installation looks installed but does not import.
    """
    for packages in calls:
        INSTALLER.pip(title, packages)
    if INSTALLER.run([str(PYTHON), "-c", probe]) == 0:
        return
    for packages in calls:
        again = "it does not import; once more without pip's cache"
        INSTALLER.pip(again, ["--force-reinstall", "--no-cache-dir", *packages])
    if INSTALLER.run([str(PYTHON), "-c", probe]) != 0:
        raise INSTALLER.failure("what was installed does not import")


def say(text: str) -> None:
    """Prints a line of progress."""
    print(f"make venv: {text}", flush=True)


def fail(error: InstallError) -> None:
    """Prints the end of the log, where it says more, and one line of what went wrong, and stops."""
    if LOG.exists() and not error.is_explained:
        print(INSTALLER.last_lines(), file=sys.stderr)
    sys.exit(f"make venv: {error}. The full log is {LOG}; run the same command again to go on from here.")


INSTALLER = Installer(str(PYTHON), LOG, say)

if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2])
    except InstallError as error:
        fail(error)
    except OSError as error:
        fail(INSTALLER.failure(describe_failure(error)))
    except KeyboardInterrupt:
        sys.exit("make venv: interrupted. Run the same command again to go on from here.")
