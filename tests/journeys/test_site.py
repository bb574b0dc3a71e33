"""The site that `make docs` builds: whole, without a network, with every documented name in its reference."""

from __future__ import annotations

import html
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
pytest.importorskip("mkdocstrings", reason="the tools of the site are not installed; `make venv` brings them")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built strictly: a warning (a broken link or anchor, a page that is nowhere) is an error.

    Not with --quiet, which keeps warnings from being counted.
    """
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_page_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loads = re.findall(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"([^\"]+)\"|<link[^>]*\shref=\"([^\"]+)\"", text)
        assert [target for pair in loads for target in pair if re.match(r"(https?:)?//", target)] == [], page.name


def test_options_can_be_searched_for(site):
    assert "options_search.js" in (site / "options.html").read_text(encoding="utf-8")
    assert (site / "assets" / "options_search.js").is_file()
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    found = {entry["location"].partition("#")[0] for entry in entries if "precision_mode_v2" in entry["text"]}
    assert {"options.html", "precision.html", "reference/configuration.html"} <= found


def test_the_reference_has_every_documented_name(site):
    from npu_bridge import npu_init, optimizers, reporting, stages

    shown = " ".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    shown = set(re.findall(r'id="[\w.]+\.(\w+)"', html.unescape(shown)))
    own = {
        name
        for name in npu_init.__all__
        if str(getattr(getattr(npu_init, name), "__module__", "")).split(".")[0] in ("npu_bridge", "hccl")
    }
    wanted = own | set(stages.__all__) | set(reporting.__all__) | set(optimizers.__all__)
    wanted -= {"PLACES"}  # a constant, which explains itself in the docstrings around it
    assert len(own) > 40 and sorted(wanted - shown) == []
    text = (site / "reference" / "configuration.html").read_text(encoding="utf-8")
    assert "No effect here." in text and "iterations_per_loop" in text
