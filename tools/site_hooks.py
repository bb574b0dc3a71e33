"""Adds pages to docs/ for `make docs`: those elsewhere in the repository, and the reference.

Links between pages work in the repository, so a page of docs/ can link to a page outside of it. Such pages (the README,
those of the examples) become pages below project/ of the site, as do the pictures and files that they link to, and
links are changed to fit. A page of the reference shows the docstrings of the modules that mkdocs.yml lists for it.
"""

from __future__ import annotations

import os
import pathlib
import posixpath
import re

from mkdocs.structure.files import File

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
OUTSIDE = "project"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
# The parts of a heading beside its words: tags, and the link to itself.
TEXT = re.compile(r'<a class="headerlink".*?</a>|<[^>]+>', re.DOTALL)
# Code, fenced or inline, which is not changed.
CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


def on_files(files, config):
    """Adds the pages of the reference, and the pages that docs/ and the navigation link to outside of docs/."""
    for name, modules in config["extra"]["reference"].items():
        title = name.replace("_", " ").capitalize() if name != "npu_device" else name
        text = "\n\n".join([f"# {title}", *(f"::: {module}" for module in modules)])
        files.append(File.generated(config, f"reference/{name}.md", content=text + "\n"))
    waiting = [REPOSITORY / "docs" / file.src_uri for file in files.documentation_pages() if file.abs_src_path]
    waiting += [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    seen = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        if (REPOSITORY / "docs") not in path.parents:
            files.append(File.generated(config, site_path(path), abs_src_path=str(path)))
        if path.suffix == ".md":
            waiting += [
                target for target, _ in map(_link_splitter(path), _links(path.read_text(encoding="utf-8"))) if target
            ]
    return files


def on_page_markdown(markdown, page, config, files):
    """Returns the text of a page with links that work on the site."""
    here = page.file.src_uri
    if here.startswith(("options", "README")):
        page.meta["hide"] = ["navigation", "toc"]  # their tables and cards need the whole width
    if here.startswith("reference/"):
        return markdown
    prefix = f"{OUTSIDE}/"
    path = REPOSITORY / here[len(prefix) :] if here.startswith(prefix) else REPOSITORY / "docs" / here
    split = _link_splitter(path)

    def moved(link: re.Match) -> str:
        target, anchor = split(link.group(2))
        if target is None:
            return link.group()
        way = posixpath.relpath(site_path(target), posixpath.dirname(here) or ".")
        return f"{link.group(1)}{way}{anchor}{link.group(3)}"

    pieces = CODE.split(markdown)
    return "".join(piece if number % 2 else LINK.sub(moved, piece) for number, piece in enumerate(pieces))


def on_post_build(config):
    """Adds the tables of `options_*.html` to `options.html`, hidden until a reader uses the search field there.

    The added tables are not in the search index, which has them from their own pages.
    """
    site = pathlib.Path(config["site_dir"])
    options = site / "options.html"
    text = options.read_text(encoding="utf-8")
    sections = []
    for name in dict.fromkeys(re.findall(r'href="(options_\w+\.html)["#]', text.partition("<article")[2])):
        page = (site / name).read_text(encoding="utf-8").partition("<article")[2]
        title = TEXT.sub("", re.search(r"<h1[^>]*>(.*?)</h1>", page, re.DOTALL)[1])
        for subject, table in re.findall(r"<h2[^>]*>(.*?)</h2>\s*(<table>.*?</table>)", page, re.DOTALL):
            heading = f'<a href="{name}">{title}</a>: {TEXT.sub("", subject).lower()}'
            sections.append(f"<section><h4>{heading}</h4>{table}</section>")
    place = text.index("<table>", text.index("<article"))
    everything = f'<div id="all-options" hidden>{"".join(sections)}</div>'
    options.write_text(text[:place] + everything + text[place:], encoding="utf-8")


def site_path(path: pathlib.Path) -> str:
    """Returns the place of a repository file on the site."""
    inside = path.relative_to(REPOSITORY).as_posix()
    return inside[len("docs/") :] if inside.startswith("docs/") else f"{OUTSIDE}/{inside}"


def _links(text: str) -> list[str]:
    return [target for _, target, _ in LINK.findall("".join(CODE.split(text)[::2]))]


def _link_splitter(page: pathlib.Path):
    """Returns a function that maps a link on `page` to (file in the repository, or None; anchor)."""

    def split(link: str):
        name, hash_sign, anchor = link.partition("#")
        if not name or re.match(r"[a-z]+:", link):
            return None, ""
        return pathlib.Path(os.path.normpath(page.parent / name)), hash_sign + anchor

    return split
