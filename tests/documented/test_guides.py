"""The claims of the guides are true: counts, messages, commands."""

from __future__ import annotations

import ast
import inspect
import os
import pathlib
import re
import subprocess

import pytest

from npu_bridge.options import OPTIONS
from npu_bridge.options.table import RUN_CONFIG

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PACKAGES = ("npu_bridge", "npu_run", "npu_device", "hccl", "tensorflow1_compat")
MESSAGES = re.findall(r"^### `(.+)`$", (DOCS / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
SHELLS = re.findall(r"```sh\n(#!/bin/sh\n.*?)```", (DOCS / "clusters.md").read_text(encoding="utf-8"), re.DOTALL)


def plain(text):
    """Returns a page or message in one line, with dots for values."""
    return " ".join(re.sub(r"%[sdgr]|\{[^{}]*\}", "…", text).replace("`", "").split())


def strings_of(path):
    """Returns every text in a module as the reader of a message sees it, each in one line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return [plain(text) for text in found]


@pytest.fixture(scope="module")
def texts_by_module():
    modules = (path for name in PACKAGES for path in (REPOSITORY / name).rglob("*.py") if "contrib" not in path.parts)
    return {path: strings_of(path) for path in modules}


@pytest.mark.parametrize("words", MESSAGES)
def test_a_message_with_a_cure_is_one_that_the_code_has(words, texts_by_module):
    """Each of its parts stands in one and the same module."""
    parts = [part.strip(" .;:()") for part in re.split(r"…|\bExpected\b|; got\b", plain(words))]
    parts = [part for part in parts if len(part) > 3]
    assert parts, "nothing to look for"
    places = [path for path, texts in texts_by_module.items() if all(any(p in t for t in texts) for p in parts)]
    assert places, f"no module has all of {parts}"


def test_the_check_of_messages_finds_what_is_missing(texts_by_module):
    with pytest.raises(AssertionError):
        test_a_message_with_a_cure_is_one_that_the_code_has("a message that … no code raises", texts_by_module)
    assert len(MESSAGES) > 30 and len(set(MESSAGES)) == len(MESSAGES)


def test_how_many_options_have_an_effect_is_said_as_it_is():
    levels = [option.effect.level for option in OPTIONS.options_of(RUN_CONFIG)]
    works, recorded, refused = map(levels.count, ("works", "recorded", "refused"))
    page, readme = (plain(path.read_text(encoding="utf-8")) for path in (DOCS / "for_me.md", REPOSITORY / "README.md"))
    assert (
        f"Of the {len(levels)} parameters of NPURunConfig, **{works} work**, **{recorded} are recorded only** and "
        in page
    )
    assert f"**{refused} are refused**" in page
    assert f"{recorded} of the {len(levels)} parameters have no effect here" in readme


def test_the_first_page_has_ten_terms_that_pages_use():
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", (DOCS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    others = [path for path in DOCS.glob("*.md") if path.name != "README.md"]
    used = " ".join(plain(path.read_text(encoding="utf-8")).lower() for path in others)
    assert len(terms) == 10 and [term for term in terms if term.split()[0] not in used] == []


def test_what_is_only_here_exists():
    from npu_bridge import optimizers, reporting, stages
    from npu_bridge.npu_init import NPUOptimizer, NPURunConfig

    page = (DOCS / "migration.md").read_text(encoding="utf-8")
    for module in (optimizers, reporting, stages):
        assert f"`{module.__name__}`" in page
    assert {"wire", "stages"} <= set(inspect.signature(NPUOptimizer).parameters)
    assert "`NPUOptimizer(..., wire=..., stages=[...])`" in page
    assert hasattr(NPURunConfig, "from_file") and '`NPURunConfig.from_file("run.toml")`' in page


@pytest.mark.parametrize(
    "shell, tool, place", zip(SHELLS, ("kubectl", "srun"), ("worker-1", "--nodelist=worker-1.workers"))
)
def test_a_way_to_other_hosts_without_ssh(shell, tool, place, tmp_path):
    """The page's scripts, called as `npu-run` calls ssh; a stand-in for the cluster's tool says where it would go."""
    (tmp_path / "ssh").write_text(shell)
    stand_in = '#!/bin/sh\necho "$@" > asked\nwhile [ "$1" != sh ]; do shift; done\nexec "$@"\n'
    (tmp_path / tool).write_text(stand_in)
    for name in ("ssh", tool):
        (tmp_path / name).chmod(0o755)
    options = ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new", "-o", "ConnectTimeout=15"]
    command = ["ssh", *options, "--", "worker-1.workers", "cd '/' && read words && echo \"$words in $PWD\""]
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, input="a b  c\n", capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a b  c in /\n", "")
    assert place in (tmp_path / "asked").read_text().split()


def test_every_page_has_a_place_on_the_site():
    settings = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {path.name for path in DOCS.glob("*.md")}
    assert [
        page for page in sorted(pages) if not re.search(rf"^ +- (.+: )?{re.escape(page)}$", settings, re.MULTILINE)
    ] == []
