"""Separates the sections of docstrings, which have no empty lines between them, for the reference."""

from __future__ import annotations

import re

import griffe

SECTIONS = re.compile(r"\n+(Attributes|Args|Returns|Yields|Raises|Graph|Ranks|Source|Example):")
# Sections of this project, which are plain sentences.
SENTENCES = re.compile(r"^(Graph|Ranks|Source): (?=\S)", re.MULTILINE)


class DocstringSections(griffe.Extension):
    """Puts an empty line before every section, as the reader of Google's form requires."""

    def on_instance(self, *, obj, **_):
        """Changes the docstring of a module, class, function or attribute that griffe has read."""
        if obj.docstring:
            obj.docstring.value = SENTENCES.sub(r"**\1:** ", SECTIONS.sub(r"\n\n\1:", obj.docstring.value))
