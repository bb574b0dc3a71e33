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

from tests.reporting.chromium import CHROMIUM, visit
from tools.options_pages import row

pytestmark = pytest.mark.slow("builds the site; the pages themselves are looked at in tests/documented")
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


def words_of(text, separator):
    """The words that the site's search cuts a text into."""
    return {word for word in re.split(separator, html.unescape(re.sub(r"<[^>]+>", " ", text)).lower()) if word}


def test_search_finds_every_option_message_and_command(site):
    """Each on its own page: the words of a query stand there together."""
    from npu_run.cli import COMMANDS
    from tools.options_pages import PAGES

    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    separator = index["config"]["separator"]
    pages = {}
    for entry in index["docs"]:
        words = words_of(entry["title"] + " " + entry["text"], separator)
        pages.setdefault(entry["location"].partition("#")[0], set()).update(words)
    errors = (REPOSITORY / "docs" / "errors.md").read_text(encoding="utf-8")
    queries = [(entry.name, page.file) for page in PAGES for entries in page.sections.values() for entry in entries]
    queries += [(message, "errors.md") for message in re.findall(r"^### `(.*)`$", errors, re.MULTILINE)]
    queries += [(f"npu-run {command}", "") for command in COMMANDS]
    assert len(queries) > 200
    lost = []
    for query, page in queries:
        found = [place for place, words in pages.items() if words_of(query, separator) <= words]
        if not found or (page and page.replace(".md", ".html") not in found):
            lost.append((query, found))
    assert lost == []
    assert "checkpoints" in pages["options_working.html"], "a part of save_checkpoints_steps"


def test_options_can_be_filtered(site, tmp_path):
    """The first page has the rows of all pages. In a browser, if there is one, its field keeps those with the words."""
    from tools.options_pages import PAGES

    text = (site / "options.html").read_text(encoding="utf-8")
    assert "options_filter.js" in text
    every = [entry for page in PAGES for entries in page.sections.values() for entry in entries]
    inside = text[text.index('id="all-options"') :]
    assert {entry.name for entry in every} <= set(re.findall(r"<tr>\s*<td><code>(\w+)</code>", inside))
    if CHROMIUM is None:
        return
    document, console = visit(f"{site}/options.html#q=recorded+graph+dump", tmp_path / "profile", "--dump-dom")
    inside = document[document.index('id="all-options"') :]
    shown = re.findall(r"<tr>\s*<td><code>(\w+)</code>", inside)
    words = ("recorded", "graph", "dump")
    wanted = {entry.name for entry in every if all(word in " ".join(row(entry)).lower() for word in words)}
    # The search needs a server, so it complains about a page that is opened as a file.
    assert [line for line in console if "search_index.js" not in line] == []
    assert set(shown) == wanted and 0 < len(wanted) < 10


@pytest.mark.skipif(CHROMIUM is None, reason="no browser")
def test_a_page_is_not_wider_than_its_window(site, tmp_path):
    """On a laptop and on a telephone."""
    frames = [(name, width) for name in ("index", "options", "options_working") for width in (1280, 390)]
    (tmp_path / "frames.html").write_text(
        "<body>"
        + "".join(
            f'<iframe src="file://{site}/{name}.html" width="{width}" height="700"></iframe>' for name, width in frames
        )
        + "<p id='widths'></p><script>onload = () => document.getElementById('widths').textContent = 'widths '"
        " + Array.from(document.querySelectorAll('iframe'), frame => frame.contentDocument.body.scrollWidth)</script>"
    )
    flags = ("--allow-file-access-from-files", "--virtual-time-budget=5000", "--dump-dom")
    document, _ = visit(tmp_path / "frames.html", tmp_path / "profile", *flags)
    widths = [int(width) for width in re.search(r">widths ([\d,]+)<", document)[1].split(",")]
    assert [(frame, width) for frame, width in zip(frames, widths) if width > frame[1]] == []


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
