"""Finds phrases that readers have to read twice: in docstrings, comments and texts of code, and with --pages in pages.

python tools/check_words.py [--pages] [FILE ...]
"""

from __future__ import annotations

import argparse
import ast
import os
import pathlib
import re
import sys
from collections.abc import Iterator

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
ROOMS = ("npu_bridge", "npu_run", "hccl", "npu_device", "tensorflow1_compat", "tools", "benchmarks", "examples")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md")
_NO_QUESTION = r"\b(?![^.:;]*\?)"
# Beginnings of sentences, and phrases anywhere -> what to write instead.
BEGINNINGS = {
    rf"What(?! to\b){_NO_QUESTION}": "the noun, or a verb",
    rf"(?:Who|Whom|Whose){_NO_QUESTION}": "the reader, the rank, the job",
    r"(?:That|Those) (?:of|in|with|for|on|from)\b": "the noun again",
    r"Has (?!no\b)": "Makes",
    r"(?:Printed|Checked|Counted|Kept|Listed|Named|Shown) (?:is|are)\b": "the verb: Prints, Checks",
}
PHRASES = {
    r"(?<!there )\b(?:is|are|was|were) (?-i:none)\b": "is not one, there are no ...",
    r"\bwhat is no\b": "anything but a ...",
    r"\b(?:is|are|was|were) told\b(?! apart)": "is logged, is reported, gets",
    r"\b(?:tells?|told|telling) of\b": "reports, names",
    r"\b(?:go|goes|going|went|gone) on\b(?! (?:the|a|rank)\b)": "continue, resume",
    r"\b(?:comes?|came) of\b": "the result",
    r"\bas far as\b": "if, where, up to",
    r"\bas good as\b": "almost, or the effect",
    r"\bas it stands\b": "unchanged",
    r"\bas ever\b": "as usual",
    r"\ball the same\b": "anyway, nevertheless",
    r"\bonce more\b": "again",
    r"\bof one's own\b": "your own ..., a separate ...",
    r"\b(?:some that|such a one|the other way a?round)\b": "the thing itself",
    r"\bnext to nothing\b": "almost nothing, or a number",
    r"\b(?:(?:no|some|any|every)body|whoever)\b": "no one, or the person, rank or job",
    r"\bmend(?:s|ed|ing)?\b": "fix, repair",
}
# Texts in which a phrase is right, and why.
RIGHT = {"times as far as A": "compares two distances"}
_FAULTS = [
    *((re.compile(rf"(?:^|(?<=[.:;?!] )){words}"), advice) for words, advice in BEGINNINGS.items()),
    *((re.compile(words, re.IGNORECASE), advice) for words, advice in PHRASES.items()),
]


def texts_of_code(source: str) -> Iterator[tuple[int, str]]:
    """Yields comments, docstrings and other texts of code, each with its line."""
    for comment in re.finditer(r"(?:^ *#.*\n?)+|  # .*$", source, re.MULTILINE):
        yield source[: comment.start()].count("\n") + 1, re.sub(r"^ *# ?", "", comment[0], flags=re.MULTILINE)
    parts: set[int] = set()  # of texts with values in them
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
            yield node.lineno, "".join(each.value if isinstance(each, ast.Constant) else "X" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value


def prose_of_page(source: str) -> Iterator[tuple[int, str]]:
    """Yields the paragraphs of a page without headings and code, each with its line."""
    blocks = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
    source = re.sub(r"`[^`\n]*`", "X", blocks.sub(lambda block: "\n" * block[0].count("\n"), source))
    for paragraph in re.finditer(r"(?:^(?!#).*\S.*\n?)+", source, re.MULTILINE):
        yield source[: paragraph.start()].count("\n") + 1, paragraph[0]


def faults_in(path: pathlib.Path) -> Iterator[str]:
    """Yields a line for each phrase in a file, with the advice."""
    source = path.read_text(encoding="utf-8")
    for line, text in texts_of_code(source) if path.suffix == ".py" else prose_of_page(source):
        for part in text.split("\n\n"):
            words = " ".join(part.split())
            if words.count(" ") < 2 or any(right in words for right in RIGHT):
                continue
            for phrase, advice in _FAULTS:
                for found in phrase.finditer(words):
                    excerpt = words[max(0, found.start() - 40) : found.end() + 40]
                    yield f"{os.path.relpath(path)}:{line}: {found[0]!r} (write: {advice}) in ...{excerpt}..."


def main() -> int:
    """Checks all code outside of tests, or the given files; returns 1 if there are faults."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--pages", action="store_true", help="check pages, too")
    given = parser.parse_args()
    modules = [path for room in ROOMS for path in sorted((REPOSITORY / room).rglob("*.py"))]
    pages = [path for pattern in PAGES if given.pages for path in sorted(REPOSITORY.glob(pattern))]
    files = given.files or [path for path in [*modules, *pages] if path.name != pathlib.Path(__file__).name]
    faults = [fault for path in files for fault in faults_in(path)]
    print(*faults, sep="\n", end="\n" if faults else "")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
