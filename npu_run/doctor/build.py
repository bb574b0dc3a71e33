"""Installs Horovod for the installed TensorFlow: from a wheel in the user's cache, or by compiling and caching a wheel.

`npu-run doctor --fix` and `make venv` (tools/setup_env.py) use this module. `make venv` uses a Python without packages.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Callable

from npu_bridge.base.files import new_file, temporary_folder
from npu_bridge.base.install import HOROVOD, HOROVOD_CHOICES, HOROVOD_NEEDS
from npu_bridge.base.memory_folders import free_bytes
from npu_bridge.base.reading import open_file
from npu_bridge.base.secondary_files import NonFatalOutput, describe_failure

_HEARTBEAT_SECS = 20
_LOG_TAIL_LINES = 30
# For pip's temporary files (0.4 GB, measured with TensorFlow for CPUs), and for the packages (1.6 to 2.1 GB).
_TEMPORARY_BYTES, _INSTALLED_BYTES = 10**9, 25 * 10**8
_PROBE = "import horovod.tensorflow as hvd, sys; sys.exit(not hvd.gloo_built())"
# The smaller package's wheels are named with a dash, or, from 2.18 on, with an underscore.
_TENSORFLOW = (
    "import importlib.metadata as m; "
    "print(*sorted({f'{name}-{d.version}' for d in m.distributions() "
    "if (name := d.name.replace('_', '-')) in ('tensorflow', 'tensorflow-cpu')}), sep='_')"
)
# Finds TensorFlow's headers without loading it.
_INCLUDE = "import importlib.util as u; print(u.find_spec('tensorflow').submodule_search_locations[0] + '/include')"
_XLA_BUILDER = "tensorflow/compiler/xla/client/xla_builder.h"  # the path that Horovod includes
_XLA_BUILDERS = ("xla/hlo/builder/xla_builder.h", "xla/client/xla_builder.h")
_BROUGHT = ("highwayhash", "farmhash_archive/src")
# Read before each of Horovod's sources, which g++ 14 refuses for two reasons: they rely on a header that earlier
# compilers include by themselves, and their own `span` assigns to a constant. This one replaces it.
_BEFORE_SOURCES = """\
#include <stdexcept>
#if __GNUC__ >= 14 && __cplusplus < 202002L
#include <cstddef>
#define FLATBUFFERS_USE_STD_SPAN
namespace std {
inline constexpr size_t dynamic_extent = static_cast<size_t>(-1);
template <class T, size_t extent = dynamic_extent>
class span {
 public:
  span(T* first, size_t count) : first_(first), count_(count) {}
  T* data() const { return first_; }
  size_t size() const { return count_; }

 private:
  T* first_;
  size_t count_;
};
}  // namespace std
#endif
"""


class InstallError(RuntimeError):
    """Raised if an installation step fails; the message names the step and the cure.

    Attributes:
      is_explained: whether the message is complete, so that the log need not be shown.
    """

    is_explained = False


class MissingToolsError(InstallError):
    """Raised if a compiler is not installed; nothing has been changed then."""


def cache_folder() -> Path:
    """Returns the cache folder: in the user's home, or, if the home is not writable, in this Python's folder."""
    given, home = os.environ.get("XDG_CACHE_HOME"), os.path.expanduser("~")
    if not given and not os.access(home, os.W_OK):
        return Path(sys.prefix, "npu_bridge_cache")
    return Path(given or os.path.join(home, ".cache"), "npu_bridge")


class Installer:
    """Installs packages into a Python environment; logs the output of commands and prints progress.

    Args:
      python: the environment's interpreter, of the same version as this one.
      log: the file to which output is appended.
      say: function that prints a line of progress.
    """

    def __init__(self, python: str, log: Path, say: Callable[[str], None]):
        self._python, self._log, self._say = python, log, say

    def install_horovod(self) -> None:
        """Installs Horovod, and checks that Horovod can be imported.

        Raises:
          InstallError: a step fails, or a tool is missing.
        """
        self.run_pip("what Horovod is built with", HOROVOD_NEEDS)
        folder = self._wheel_folder()
        kept = sorted(folder.glob("horovod-*.whl"))
        if kept and self._try_wheel(f"Horovod, compiled earlier ({kept[-1]})", kept[-1]):
            return
        problem = _list_missing_tools()
        if problem:
            raise MissingToolsError(problem)
        self._say("Horovod, compiled here (2 to 6 minutes on 2 cores)")
        with self._temporary_folder() as built:
            build = ["wheel", "--verbose", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", built]
            before = Path(built) / "before_sources.h"
            before.write_text(_BEFORE_SOURCES, encoding="utf-8")
            environment = {
                **_make_build_environment(self._extra_header_folders(Path(built)), before),
                **_compiler_without_debug_info(built),
            }
            if (
                self.run([_python_path_without_spaces(self._python, built), "-m", "pip", *build, HOROVOD], environment)
                != 0
            ):
                raise self.make_error("Horovod could not be compiled")
            (wheel,) = Path(built).glob("horovod-*.whl")
            if not self._try_wheel("Horovod, from the wheel that was compiled", wheel):
                raise self.make_error("Horovod was compiled, but cannot be imported")
            NonFatalOutput("the wheel of Horovod for the next time", say=self._say).attempt(_cache_wheel, wheel, folder)

    def run_pip(self, title: str, arguments: Sequence[str]) -> None:
        """Runs `pip install`, with a title in the log.

        Raises:
          InstallError: pip failed.
        """
        self._say(title)
        command = [self._python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
        if self.run([*command, *arguments]) != 0:
            raise self.make_error("pip install failed")

    def make_error(self, text: str) -> InstallError:
        """Returns the error for a failed step; mentions a nearly full disk, which pip reports as a network problem."""
        lack = _describe_lack_of_space(self._python)
        error = InstallError(f"{text}{lack}")
        error.is_explained = bool(lack)
        return error

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """Runs a command and returns its exit code; from time to time prints how long it has been running.

        Raises:
          InstallError: the log cannot be written.
        """
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            try:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                log = stack.enter_context(self._log.open("ab", buffering=0))
                log.write(b"\n$ %b\n" % os.fsencode(" ".join(command)))
            except OSError as error:
                raise self.make_error(f"the log cannot be written: {describe_failure(error)}") from error
            start = log.tell()
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                while True:
                    try:
                        return process.wait(timeout=_HEARTBEAT_SECS)
                    except subprocess.TimeoutExpired:
                        self._say(f"    {time.monotonic() - began:.0f} s{self._compile_progress(start)}")
            except BaseException:
                process.terminate()
                process.wait()
                raise

    def last_lines(self) -> str:
        """Returns the last lines of the log."""
        with open_file(self._log, errors="replace") as text:
            return "\n".join(text.read().splitlines()[-_LOG_TAIL_LINES:])

    @contextlib.contextmanager
    def _temporary_folder(self) -> Iterator[str]:
        try:
            folder = temporary_folder()
        except OSError as error:
            raise InstallError(str(error)) from error
        with folder as path:
            yield path

    def _compile_progress(self, start: int) -> str:
        """Returns cmake's latest progress in the log after `start`; "" if there is none."""
        with self._log.open("rb") as log:
            log.seek(start)
            shares = re.findall(rb"\[ *(\d+)%\]", log.read())
        return f", {int(shares[-1])} % compiled" if shares else ""

    def _try_wheel(self, title: str, wheel: Path) -> bool:
        self.run_pip(title, ["--no-deps", "--force-reinstall", str(wheel)])
        return self.run([self._python, "-c", _PROBE]) == 0

    def _extra_header_folders(self, folder: Path) -> list[str]:
        """Returns further folders of headers that the sources of Horovod and TensorFlow need.

        TensorFlow from 2.16 on has another name for the header of XLA's builder, and includes two bundled libraries as
        if they were installed. This method writes a header with the old name, which includes the new header.
        """
        found = subprocess.run([self._python, "-c", _INCLUDE], capture_output=True, text=True)
        include = Path(found.stdout.strip())
        if (include / _XLA_BUILDER).exists():
            return []
        new = next((name for name in _XLA_BUILDERS if (include / name).exists()), None)
        if new is not None:
            header = folder / "include" / _XLA_BUILDER
            header.parent.mkdir(parents=True)
            header.write_text(f'#include "{new}"\n', encoding="utf-8")
        folders = (folder / "include", *(include / "external" / name for name in _BROUGHT))
        return [str(each) for each in folders if each.is_dir()]

    def _wheel_folder(self) -> Path:
        """Returns the folder of wheels compiled for this Python and its TensorFlow; setup_env.sh uses it too."""
        found = subprocess.run([self._python, "-c", _TENSORFLOW], capture_output=True, text=True)
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        return cache_folder() / "wheels" / f"{version}-{platform.machine()}-{found.stdout.strip()}"


def _describe_lack_of_space(python: str) -> str:
    """Returns the end of a sentence about a disk with too little space for an installation; "" if there is enough."""
    places = [(os.path.dirname(os.path.dirname(os.path.abspath(python))), _INSTALLED_BYTES, "make room there")]
    with contextlib.suppress(FileNotFoundError):  # no folder is writable
        fix = "name a folder with room for temporary files: TMPDIR=/path"
        places.append((tempfile.gettempdir(), _TEMPORARY_BYTES, fix))
    for folder, needed, fix in places:
        with contextlib.suppress(OSError):
            free = free_bytes(folder)
            if free < needed:
                amounts = f"Expected {needed / 1e9:g} GB; got {free / 1e9:.2f} GB"
                return f", and the disk of {folder} has little room. {amounts}. If that is the cause, {fix}"
    return ""


def _python_path_without_spaces(python: str, folder: str) -> str:
    """Returns an interpreter path without spaces, through a link if needed, as make and compilers split at spaces."""
    environment = os.path.dirname(os.path.dirname(os.path.abspath(python)))
    if re.fullmatch(r"[\w.+/-]*", environment, re.ASCII):
        return python
    link = Path(folder, "environment")
    link.symlink_to(environment)
    return str(link / "bin" / os.path.basename(python))


def _cache_wheel(wheel: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with wheel.open("rb") as source, new_file(folder / wheel.name, "wb") as target:
        shutil.copyfileobj(source, target)


def _list_missing_tools() -> str:
    """Returns a sentence: which compilers are missing and how to install them; "" if none is missing."""
    compilers = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    compiler = any(name and shutil.which(name.split()[0]) for name in compilers)
    missing = ["a C++ compiler"] * (not compiler) + ["cmake"] * (shutil.which("cmake") is None)
    if not missing:
        return ""
    return (
        f"Horovod is compiled here, for which {' and '.join(missing)} must be installed: apt-get install g++ cmake "
        "(Debian/Ubuntu), dnf install gcc-c++ cmake (Fedora), brew install cmake (macOS)"
    )


def _compiler_without_debug_info(folder: str) -> dict[str, str]:
    """Returns an environment variable with a compiler command that leaves out debug information, so compiles faster.

    Horovod's build requests debug information with its last option, so only a wrapper around the compiler can leave it
    out. The compiled code is the same.
    """
    compiler = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is None or not re.fullmatch(r"[\w./-]+", folder, re.ASCII):  # cmake splits the variable at spaces
        return {}
    wrapper = Path(folder, "compiler")
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" -g0\n', encoding="utf-8")
    wrapper.chmod(0o755)
    return {"CXX": str(wrapper)}


def _make_build_environment(headers: Sequence[str], preloaded_header: Path) -> dict[str, str]:
    """Returns the environment variables of the build: for TensorFlow over Gloo, on as many cores as memory allows."""
    # One compiler process on TensorFlow's headers takes up to about 2 GiB.
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    jobs = max(1, min(os.cpu_count() or 1, int(memory_gib / 2)))
    # A `make` that started us offers its job slots through MAKEFLAGS; Horovod's own make cannot reach them.
    paths = os.pathsep.join([*headers, *filter(None, [os.environ.get("CPLUS_INCLUDE_PATH")])])
    more = {"CPLUS_INCLUDE_PATH": paths} if headers else {}
    more["CXXFLAGS"] = " ".join(filter(None, [f'-include "{preloaded_header}"', os.environ.get("CXXFLAGS")]))
    return {**os.environ, **HOROVOD_CHOICES, "MAKEFLAGS": f"-j{jobs}", **more}
