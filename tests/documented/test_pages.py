"""The pages people read: what they link to exists, and their code compiles without a warning."""

from __future__ import annotations

import pathlib
import re
import subprocess
import warnings

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "examples/**/README.md", "benchmarks/*.md")
    for path in REPOSITORY.glob(pattern)
)
# The list of changes is not read from end to end.
READ = [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "benchmarks"]
MOST_WORDS = 40
# Pages that may be longer than 1,500 words, and why.
LONG = {
    "options_working.md": "generated: a row for each option, looked up by its name",
    "options_recorded.md": "generated: a row for each option, looked up by its name",
}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def links_of(text):
    """Targets in a page, those shown in code left out."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "", CODE.sub("", text)))


def anchors_of(text):
    """Returns a heading's anchor: small letters, hyphens for spaces, the rest left out."""
    headings = re.findall(r"^#+\s+(.*)$", CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links_of(page):
    broken = []
    for target in links_of(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (page.parent / name).resolve() if name else page
        is_here = place.exists() and REPOSITORY in (place, *place.parents)
        if not is_here or (place.suffix == ".md" and anchor and anchor not in anchors_of(place.read_text())):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page):
    assert broken_links_of(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_code_compiles(page):
    pieces = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for language, code in pieces:
            if language == "python":
                compile(code, f"{page.name}, the piece that begins with {code[:40]!r}", "exec")
            elif language in ("sh", "bash"):
                subprocess.run(["sh", "-n"], input=code, text=True, check=True)


def test_every_page_can_be_found():
    """From the README, or from a page that it leads to."""
    reached, waiting = set(), [REPOSITORY / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        waiting += [
            (page.parent / target.partition("#")[0]).resolve()
            for target in links_of(page.read_text())
            if not re.match(r"[a-z]+:|#", target)
        ]
    docs = set((REPOSITORY / "docs").glob("*.md"))
    assert docs - reached == set()


def prose_of(text):
    """Sentences alone, without code blocks, tables, headings and tags; a link is its text, a name in code a word."""
    text = re.sub(r"^#.*$|^\|.*$|!\[[^\]]*\]\([^)]*\)|<[^>\n]+>", "", CODE.sub("", text), flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)\s]*\)", r"\1", text)
    text = re.sub(r"\*|^>", "", re.sub(r"`[^`]*`", "code", text), flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|^\s*(?:-|\d+\.)\s+", text, flags=re.MULTILINE)
    parts = [" ".join(part.split()) for part in parts]
    return [part for part in parts if len(part.split()) > 3 and part[-1] in ".!?:"]


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_it_is_short_and_plain(page):
    """At most 1,500 words, without endless sentences."""
    text = page.read_text()
    assert len(text.split()) <= 1500 or page.name in LONG
    sentences = [sentence for part in prose_of(text) for sentence in re.split(r"(?<=[.!?])\s+", part)]
    assert [sentence for sentence in sentences if len(sentence.split()) > MOST_WORDS] == []


def test_the_check_of_prose_finds_sentences():
    long = "This sentence stands outside of the title, of the table and of the code."
    assert prose_of(f"# Title\n\n| a | b |\n\n```\ncode\n```\n\n{long}\n") == [long]


def test_what_is_found(tmp_path):
    """The check itself."""
    page = tmp_path / "page.md"
    page.write_text("# A title, and more\n[one](#a-title-and-more) [two](#other) ```[three](gone)``` `[four](gone)`\n")
    assert links_of(page.read_text()) == ["#a-title-and-more", "#other"]
    assert anchors_of(page.read_text()) == {"a-title-and-more"}
