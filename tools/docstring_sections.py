"""For the reference: sections of docstrings, which stand one below the other without empty lines, set apart."""

from __future__ import annotations

import re

import griffe

SECTIONS = re.compile(r"\n+(Attributes|Args|Returns|Yields|Raises|Graph|Ranks|Source|Example):")
# Sections of ours, which are plain sentences.
SENTENCES = re.compile(r"^(Graph|Ranks|Source): (?=\S)", re.MULTILINE)


class DocstringSections(griffe.Extension):
    """Gives every section an empty line before it, as the reader of Google's form wants it."""

    def on_instance(self, *, obj, **_):
        """Called for each module, class, function and attribute that has been read."""
        if obj.docstring:
            obj.docstring.value = SENTENCES.sub(r"**\1:** ", SECTIONS.sub(r"\n\n\1:", obj.docstring.value))
