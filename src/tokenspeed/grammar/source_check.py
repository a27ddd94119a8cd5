"""What is wrong with a grammar's text, as far as can be told without compiling it."""

from __future__ import annotations

from tokenspeed.plane.grammar import GrammarSource


def source_fault(source: GrammarSource) -> str:
    """Why the text cannot be served, or ""."""
    if "\x00" in source.text:
        return "must not contain a NUL"
    return ""
