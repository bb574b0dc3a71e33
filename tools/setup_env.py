"""Installs everything into .venv or .venv-tfVERSION, step by step, and marks it as complete at the end.

Started by setup_env.sh, which has already chosen the Python for it and found a compiler and cmake. Every step can be
repeated on top of a half-finished one: pip skips existing packages, and a step is only complete when the installed
package can be imported. Horovod is installed as by `npu-run doctor --fix` (npu_run/doctor/build.py): its wheel is kept
in the user's cache, so that the next checkout needs neither a compiler nor minutes.
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
# The possible targets, each with all before it: one rank, several ranks, the test tools.
PARTS = ("alone", "ranks", "all")


def main(key: str, parts: str) -> None:
    """Runs the steps for `parts` and writes `key` into .venv/ready.PARTS, also for the parts that they include."""
    marks = [VENV / f"ready.{name}" for name in PARTS]
    began = time.monotonic()
    say(f"making {VENV} with Python {platform.python_version()} and TensorFlow {TENSORFLOW} (full log: {LOG})")
    for mark in marks:
        mark.unlink(missing_ok=True)
    make_venv()
    INSTALLER.run_pip("pip, wheel, setuptools", ["--upgrade", "pip", "wheel", "setuptools>=64,<81"])
    title = " and the test tools" if parts == "all" else " and what its examples need"
    install(f"TensorFlow, npu_bridge{title}", packages_for(parts), "import tensorflow, npu_bridge")
    if parts != "alone":
        install_horovod(parts)
    for mark in marks[: PARTS.index(parts) + 1]:
        mark.write_text(key + "\n")
    say(f"ready after {time.monotonic() - began:.0f} s")


def install_horovod(parts: str) -> None:
    """Installs Horovod; if it cannot be compiled, trainings work without it."""
    try:
        INSTALLER.install_horovod()
    except MissingToolsError as error:
        if parts == "all":
            raise
        say(f"several ranks will use TensorFlow's own collectives, on one machine. {error}; then npu-run doctor --fix")


def make_venv() -> None:
    """Creates .venv, unless there is one of this Python version that is complete enough to run pip."""
    if PYTHON.exists():
        code = f"import sys, pip; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
        if subprocess.run([str(PYTHON), "-c", code], capture_output=True).returncode == 0:
            return
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode != 0:
        raise INSTALLER.make_error(f"python -m venv did not work ({(finished.stdout + finished.stderr).strip()})")


def packages_for(parts: str) -> list[list[str]]:
    """Returns the packages for pip, call by call."""
    has_gpu = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()
    is_plain_linux = sys.platform == "linux" and platform.machine() == "x86_64"
    # The package with cpu in its name is much smaller.
    name, extra = ("tensorflow-cpu", "cpu") if is_plain_linux and not has_gpu else ("tensorflow", "tensorflow")
    # Without the libraries of CUDA, TensorFlow finds no GPU, and reports that in an inconspicuous line.
    cuda = ["tensorflow[and-cuda]"] if is_plain_linux and has_gpu else []
    if TENSORFLOW == "2.15":
        return [[*cuda, "--editable", f".[{extra},{'test' if parts == 'all' else 'examples'}]"]]
    # TensorFlow 2.21 no longer brings TensorBoard.
    beside = ["tensorboard", "tensorflow-estimator==2.15.*", "scikit-learn>=1.3,<1.8"]
    if TENSORFLOW == "2.20":
        beside.append("protobuf<7")  # pip would install 7, which cannot write TensorFlow's graphs as text
    versions = [f"{name}=={TENSORFLOW}.*", *beside]
    # Keras 2 requires the package tensorflow, even beside tensorflow-cpu.
    return [[*versions, *cuda, "--editable", f".[{'plot,tools' if parts == 'all' else 'plot'}]"],
            ["--no-deps", f"tf-keras=={TENSORFLOW}.*"]]  # fmt: skip


def install(title: str, calls: list[list[str]], probe: str) -> None:
    """Installs packages and checks that the Python code `probe` runs; if it fails, installs them again from scratch.

    An interrupted installation looks installed but does not import.
    """
    for packages in calls:
        INSTALLER.run_pip(title, packages)
    if INSTALLER.run([str(PYTHON), "-c", probe]) == 0:
        return
    for packages in calls:
        again = "it cannot be imported; again without pip's cache"
        INSTALLER.run_pip(again, ["--force-reinstall", "--no-cache-dir", *packages])
    if INSTALLER.run([str(PYTHON), "-c", probe]) != 0:
        raise INSTALLER.make_error("the installed packages cannot be imported")


def say(text: str) -> None:
    """Prints a line of progress."""
    print(f"make venv: {text}", flush=True)


def fail(error: InstallError) -> None:
    """Prints the end of the log if it explains the error, and one line about the error, and stops."""
    if LOG.exists() and not error.is_explained:
        print(INSTALLER.last_lines(), file=sys.stderr)
    sys.exit(f"make venv: {error}. The full log is {LOG}; run the same command again to continue.")


INSTALLER = Installer(str(PYTHON), LOG, say)

if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2])
    except InstallError as error:
        fail(error)
    except OSError as error:
        fail(INSTALLER.make_error(describe_failure(error)))
    except KeyboardInterrupt:
        sys.exit("make venv: interrupted. Run the same command again to continue.")
