"""Installs everything into .venv, step by step, and writes down at the end that it is complete.

Started by setup_env.sh, which has already chosen the Python that runs this and found a compiler and cmake.
Every step may be run again on top of a half-finished one: pip passes over what is there, and a step counts as
done only when the thing it installed really imports. Horovod's wheel is kept in the user's cache, so that the next
checkout needs no compiler and no minutes.
"""

from __future__ import annotations

import configparser
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
# What may be wanted, each with all before it: one rank, several ranks, the test tools.
PARTS = ("alone", "ranks", "all")
HEARTBEAT_SECS = 20
LOG_TAIL_LINES = 30

# Horovod's build imports these but cannot fetch them itself, because it has to see the installed TensorFlow.
HOROVOD_BUILD_NEEDS = ["cloudpickle", "packaging", "psutil", "pyyaml"]
HOROVOD_BUILD_CHOICES = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    # cmake 4 refuses the bundled Gloo, which asks for cmake 2.8 behaviour, unless told otherwise.
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
}


def main(key: str, parts: str) -> None:
    """Runs the steps for `parts` and writes `key` into .venv/ready.PARTS, for what they include as well."""
    marks = [VENV / f"ready.{name}" for name in PARTS]
    began = time.monotonic()
    say(f"making .venv with Python {platform.python_version()} (full log: {LOG})")
    for mark in marks:
        mark.unlink(missing_ok=True)
    make_venv()
    pip("pip, wheel, setuptools", ["--upgrade", "pip", "wheel", "setuptools>=64,<81"])
    extra = tensorflow_extra()
    others, title = ("test", " and the test tools") if parts == "all" else ("examples", "")
    packages = ["--editable", f".[{extra},{others}]"]
    install(
        f"TensorFlow, npu_bridge{title or ' and what its examples need'}", packages, "import tensorflow, npu_bridge"
    )
    if parts != "alone":
        pip("what Horovod is built with", HOROVOD_BUILD_NEEDS)
        install_horovod()
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


def requirements(extra: str) -> list[str]:
    """What setup.cfg lists under an extra."""
    config = configparser.ConfigParser()
    config.read("setup.cfg")
    return config["options.extras_require"][extra].split()


def install_horovod() -> None:
    """Installs the wheel of an earlier set-up, or builds one and keeps it in the user's cache."""
    probe = [str(PYTHON), "-c", "import horovod.tensorflow as hvd, sys; sys.exit(not hvd.gloo_built())"]
    folder = wheel_folder()
    kept = sorted(folder.glob("horovod-*.whl"))
    if kept:
        pip(f"Horovod, compiled earlier ({kept[-1]})", ["--no-deps", "--force-reinstall", str(kept[-1])])
        if run(probe) == 0:
            return
    say("Horovod, compiled here (2 to 6 minutes on 2 cores)")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as built:
        build = ["wheel", "--verbose", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", built]
        if run([str(PYTHON), "-m", "pip", *build, *requirements("horovod")], horovod_environment()) != 0:
            fail("Horovod could not be compiled")
        (wheel,) = Path(built).glob("horovod-*.whl")
        wheel = wheel.replace(folder / wheel.name)  # in one move: whoever looks finds a whole file
    pip("Horovod, from the wheel that was compiled", ["--no-deps", "--force-reinstall", str(wheel)])
    if run(probe) != 0:
        wheel.unlink()
        fail("Horovod was compiled, but does not import")


def wheel_folder() -> Path:
    """Where wheels are kept that were compiled for this Python and the TensorFlow in .venv."""
    code = (
        "import importlib.metadata as m; "
        "print(*sorted({f'{d.name}-{d.version}' for d in m.distributions() "
        "if d.name in ('tensorflow', 'tensorflow-cpu')}), sep='_')"
    )
    tensorflow = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True).stdout.strip()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return cache / "npu_bridge" / "wheels" / f"{python}-{platform.machine()}-{tensorflow}"


def horovod_environment() -> dict[str, str]:
    """The environment of Horovod's build: TensorFlow over Gloo, on as many cores as the memory allows."""
    # One compiler process on TensorFlow's headers takes up to about 2 GiB.
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    jobs = max(1, min(os.cpu_count() or 1, int(memory_gib / 2)))
    # The `make` that started us offers its job slots through MAKEFLAGS; Horovod's own make cannot reach them.
    return {**os.environ, **HOROVOD_BUILD_CHOICES, "MAKEFLAGS": f"-j{jobs}"}


def install(title: str, packages: list[str], probe: str) -> None:
    """Installs packages and checks that `probe` runs; if not, once more from scratch.

    An interrupted installation looks installed but does not import.
    """
    pip(title, packages)
    if run([str(PYTHON), "-c", probe]) == 0:
        return
    pip("it does not import; once more without pip's cache", ["--force-reinstall", "--no-cache-dir", *packages])
    if run([str(PYTHON), "-c", probe]) != 0:
        fail("what was installed does not import")


def pip(title: str, arguments: list[str]) -> None:
    """Runs `pip install` with its output in the log."""
    say(title)
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    if run([*command, *arguments]) != 0:
        fail("pip install did not work")


def run(command: list[str], environment: dict[str, str] | None = None) -> int:
    """Runs a command with its output in the log and a sign of life now and then; gives its exit code."""
    began = time.monotonic()
    with LOG.open("ab") as log:
        log.write(f"\n$ {' '.join(command)}\n".encode())
        log.flush()
        start = log.tell()
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            while True:
                try:
                    return process.wait(timeout=HEARTBEAT_SECS)
                except subprocess.TimeoutExpired:
                    print(f"    {time.monotonic() - began:.0f} s{compiled_share(start)}", flush=True)
        except BaseException:
            process.terminate()
            process.wait()
            raise


def compiled_share(start: int) -> str:
    """How far cmake says it has come, from what the log holds past `start`; empty when it says nothing."""
    with LOG.open("rb") as log:
        log.seek(start)
        shares = re.findall(rb"\[ *(\d+)%\]", log.read())
    return f", {int(shares[-1])} % compiled" if shares else ""


def say(text: str) -> None:
    """Prints a line of progress."""
    print(f"make venv: {text}", flush=True)


def fail(text: str) -> None:
    """Prints the end of the log and one line of what went wrong, and stops."""
    if LOG.exists():
        print("\n".join(LOG.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]), file=sys.stderr)
    sys.exit(f"make venv: {text}. The full log is {LOG}; run the same command again to go on from here.")


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2])
    except KeyboardInterrupt:
        sys.exit("make venv: interrupted. Run the same command again to go on from here.")
