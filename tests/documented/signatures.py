"""Signatures as documentation shows them."""

from __future__ import annotations

import inspect


def signature_of(function, has_keyword_only=True):
    """The signature as text, without annotations; on request without arguments that are given by keyword only."""
    found = inspect.signature(function)
    kept = [
        parameter.replace(annotation=parameter.empty)
        for parameter in found.parameters.values()
        if has_keyword_only or parameter.kind is not parameter.KEYWORD_ONLY
    ]
    return str(found.replace(parameters=kept, return_annotation=found.empty))
