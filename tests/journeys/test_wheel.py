"""The wheel, as somebody else installs it: built, unpacked elsewhere and imported from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("npu_bridge", "npu_device", "hccl")


def run(command, **options):
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built in a copy so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md", "MANIFEST.in"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(source / "wheels")]
    run([sys.executable, "-m", "pip", "wheel", *options, str(source)])
    (built,) = (source / "wheels").glob("npu_bridge-*.whl")
    return built


def test_wheel_holds_every_module(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    modules = {file.relative_to(ROOT).as_posix() for name in PACKAGES for file in (ROOT / name).rglob("*.py")}
    assert modules - inside == set()
    assert "npu_bridge/py.typed" in inside
    assert not any(name.startswith(("tests/", "examples/", "tools/")) for name in inside)


def test_installed_wheel_imports_from_outside_the_checkout(wheel, tmp_path):
    target = tmp_path / "site"
    run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-index",
            "--target",
            str(target),
            str(wheel),
        ]
    )
    code = (
        "import importlib.metadata as metadata, sys\n"
        "import hccl, npu_bridge, npu_bridge.launch.cli\n"
        "print(hccl.__file__, npu_bridge.__file__, sep='\\n')\n"
        "print(npu_bridge.__version__ == metadata.version('npu-bridge'))\n"
        "print('tensorflow' in sys.modules, 'horovod' in sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    hccl_file, package_file, same_version, imported = run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment
    ).splitlines()
    assert hccl_file.startswith(str(target)) and package_file.startswith(str(target))
    assert same_version == "True"
    assert imported == "False False"
    script = (target / "bin" / "npu-run").read_text()
    assert "from npu_bridge.launch.cli import main" in script
