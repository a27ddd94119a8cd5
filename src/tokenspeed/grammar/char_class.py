"""Sets of characters as a regular expression's classes have them, and such a class for a set.

Source: ECMA-262, pattern semantics, CharacterClassEscape and WhiteSpace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypeAlias

Chars: TypeAlias = tuple[tuple[int, int], ...]
"""Code points, first and last of each range; rising and apart."""

LAST = 0x10FFFF
BMP = 0xFFFF

ESCAPED_BY_JSON: Chars = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
LINE_ENDS: Chars = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_DIGITS: Chars = ((0x30, 0x39),)
_WORDS: Chars = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES: Chars = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)


def union(ranges: Iterable[tuple[int, int]]) -> Chars:
    made: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if made and first <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(made[-1][1], last))
        else:
            made.append((first, last))
    return tuple(made)


def complement(chars: Chars) -> Chars:
    firsts = [0, *(last + 1 for _, last in chars)]
    lasts = [*(first - 1 for first, _ in chars), LAST]
    return tuple((first, last) for first, last in zip(firsts, lasts, strict=True) if first <= last)


def without(chars: Chars, others: Chars) -> Chars:
    return complement(union((*complement(chars), *others)))


SHORT: Mapping[str, Chars] = MappingProxyType(
    {
        "d": _DIGITS,
        "w": _WORDS,
        "s": _SPACES,
        "D": complement(_DIGITS),
        "W": complement(_WORDS),
        "S": complement(_SPACES),
    }
)
"""By the letter behind a backslash."""

DOT: Chars = complement(LINE_ENDS)


def class_text(chars: Chars) -> str:
    """The set, which is not empty and not everything, between brackets."""
    beyond = chars[-1][1] == LAST
    ranges = complement(chars) if beyond else chars
    return f"[{'^' * beyond}{''.join(_range_text(*one) for one in ranges)}]"


def _range_text(first: int, last: int) -> str:
    return _char_text(first) if first == last else f"{_char_text(first)}-{_char_text(last)}"


def _char_text(code: int) -> str:
    return f"\\u{code:04x}" if code <= BMP else chr(code)
