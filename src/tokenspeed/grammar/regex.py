"""Whether a regular expression says only what its grammar will hold a text to.

The compiler knows the regular part of the usual syntax. What it would pass over is refused here:
anchors inside, word boundaries, look-around, back references, flags.
"""

from __future__ import annotations

import re

MAX_REPEAT = 10_000

_REPEAT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_NO_GROUPS = {"?=": "look-ahead", "?!": "look-ahead", "?<=": "look-behind", "?<!": "look-behind", "?>": "atomic group"}


def regex_fault(pattern: str) -> str:
    """Why the pattern cannot be served, or ""; what is no pattern at all the compiler finds."""
    at, inside, size = 0, False, len(pattern)
    while at < size:
        sign = pattern[at]
        if sign == "\\":
            if fault := _escape_fault(pattern[at + 1 : at + 2], inside=inside):
                return fault
            at += 2
            continue
        if inside:
            inside = sign != "]"
        elif sign == "[":
            inside = True
            at += 2 if pattern[at + 1 : at + 2] == "^" else 1  # a bracket right behind is a member
            continue
        elif sign == "^" and at > 0 and pattern[at - 1] not in "(|":
            return f"^ at character {at} is not at the beginning, which is not supported"
        elif sign == "$" and at + 1 < size and pattern[at + 1] not in ")|":
            return f"$ at character {at} is not at the end, which is not supported"
        elif sign == "(" and (fault := _group_fault(pattern, at)):
            return fault
        elif sign == "{" and (counts := _REPEAT.match(pattern, at)):
            most = max((int(one) for one in (counts[1], counts[3]) if one), default=0)
            if most > MAX_REPEAT:
                return f"{counts[0]} at character {at} repeats more than {MAX_REPEAT} times"
        at += 1
    return "[ without ]" if inside else ""


def _escape_fault(sign: str, *, inside: bool) -> str:
    if not sign:
        return "ends in a backslash"
    if sign.isdigit() and sign != "0":
        return f"\\{sign}, a back reference, is not supported"
    if sign in "bBAZzGk" and not (inside and sign == "b"):
        return f"\\{sign} is not supported"
    if sign in "pP":
        return f"\\{sign}, a Unicode class, is not supported"
    return ""


def _group_fault(pattern: str, at: int) -> str:
    rest = pattern[at + 1 : at + 4]
    if not rest.startswith("?"):
        return ""
    for opening, name in _NO_GROUPS.items():
        if rest.startswith(opening):
            return f"({opening} at character {at}, a {name}, is not supported"
    if rest.startswith(("?:", "?P<", "?<")):
        return ""
    return f"({rest[:2]} at character {at}: flags and the like are not supported"
