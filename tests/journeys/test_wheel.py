"""Sdist and wheel, as users get them: the wheel is built from the sdist and imported from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("npu_bridge", "npu_run", "npu_device", "hccl", "tensorflow1_compat")
HOME_PAGE = "https://example.org/somebody/npu_bridge"


def run(command, **options):
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The sdist, unpacked; built in a copy so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    passed_over = shutil.ignore_patterns(
        ".git", ".*venv*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "out"
    )
    shutil.copytree(ROOT, source, ignore=passed_over)
    command = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    run([sys.executable, "-c", command], cwd=source, env={**os.environ, "HOME_PAGE": HOME_PAGE})
    (built,) = (source / "dist").glob("npu_bridge-*.tar.gz")
    with tarfile.open(built) as archive:
        archive.extractall(source.parent)
    return source.parent / built.name[: -len(".tar.gz")]


@pytest.fixture(scope="module")
def wheel(sdist):
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(sdist.parent)]
    run([sys.executable, "-m", "pip", "wheel", *options, str(sdist)], env={**os.environ, "HOME_PAGE": ""})
    (built,) = sdist.parent.glob("npu_bridge-*.whl")
    return built


def described(metadata):
    """The address of each link of the metadata, and the description."""
    message = message_from_bytes(metadata)
    links = dict(link.split(", ") for link in message.get_all("Project-URL", ()))
    return links, message.get_payload(decode=True).decode()


def test_wheel_holds_every_module_and_its_types(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    modules = {file.relative_to(ROOT).as_posix() for name in PACKAGES for file in (ROOT / name).rglob("*.py*")}
    # Python also writes into __pycache__ meanwhile.
    modules = {name for name in modules if name.endswith((".py", ".pyi"))}
    assert modules - inside == set()
    assert {f"{name}/py.typed" for name in PACKAGES} | {"npu_bridge/estimator/npu/npu_config.pyi"} <= inside
    assert not any(name.startswith(("tests/", "examples/", "tools/")) for name in inside)


@pytest.mark.parametrize("extra", ["cpu", "tensorflow"])
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_an_extra_brings_all_that_tensorflow_needs_beside_it(wheel, python, extra):
    """From 2.16 on that is Keras 2, which asks for the package tensorflow, and Estimator."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        asked = message_from_bytes(archive.read(path)).get_all("Requires-Dist")
    named = {"extra": extra, "python_version": python}
    found = {each.name for each in map(Requirement, asked) if each.marker and each.marker.evaluate(named)}
    beside = {"tf-keras", "tensorflow-estimator", "tensorflow"}
    assert found >= beside if python != "3.11" else not found & (beside - {"tensorflow"}), found


def test_sdist_holds_what_tests_and_pages_need(sdist):
    for name in ("Makefile", "mkdocs.yml", "setup.py", "docs/README.md", "tests/conftest.py", "tools/setup_env.sh"):
        assert (sdist / name).is_file(), name


def test_every_link_of_the_readme_works_on_a_package_index(sdist, wheel):
    """It leads to the page of the repository that the builder has named; without one, there is no link to follow."""
    links, text = described((sdist / "PKG-INFO").read_bytes())
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets and links["Source"] == HOME_PAGE
    for target in [*targets, links["Documentation"], links["Changelog"]]:
        assert target.startswith(f"{HOME_PAGE}/"), target
        assert (ROOT / re.sub(r"^(blob|raw)/v[\d.]+/", "", target[len(HOME_PAGE) + 1 :]).partition("#")[0]).exists(), (
            target
        )
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    links, text = described(archive.read(metadata))
    assert links == {} and re.findall(r"\]\(([^)\s]+)\)", text) == [] and "hooks to `est.train`" in text


def test_installed_wheel_imports_from_outside_the_checkout(wheel, tmp_path):
    target = tmp_path / "site"
    options = ["--no-deps", "--no-index", "--target", str(target)]
    run([sys.executable, "-m", "pip", "install", *options, str(wheel)])
    code = (
        "import importlib.metadata as metadata, sys\n"
        "import hccl, npu_bridge, npu_run.cli\n"
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
    assert "from npu_run.cli import main" in script
