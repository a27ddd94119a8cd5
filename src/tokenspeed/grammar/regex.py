"""Whether a regular expression says only what its grammar will hold a text to.

The compiler knows the regular part of the usual syntax. What it would pass over, or reads otherwise than
ECMA-262 and Python's re do, is refused here: anchors inside, word boundaries, look-around, back references,
flags. Classes such as ``\\w`` are those of ASCII.
"""

from __future__ import annotations

import re

import attrs

from tokenspeed.grammar.char_class import DOT, ESCAPED_BY_JSON, SHORT, Chars, class_text, complement, union, without

MAX_REPEAT = 10_000

_REPEAT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_NO_GROUPS = {"?=": "look-ahead", "?!": "look-ahead", "?<=": "look-behind", "?<!": "look-behind", "?>": "atomic group"}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_REPEATS = ("*", "+", "?", "{")


class RegexFault(Exception):
    """Where in the pattern, and what is wrong there."""


@attrs.define(eq=False)
class Group:
    """One that is open, or the pattern as a whole.

    Attributes:
        first: nothing can stand before it.
        begins: it has a ^ inside, which holds only if nothing stands before.
        ends: likewise a $.
        empty: nothing of the current alternative was read yet.
    """

    first: bool
    begins: bool = False
    ends: bool = False
    empty: bool = True


@attrs.define(eq=False)
class Scan:
    """One pattern under inspection.

    Attributes:
        quoted: the text stands between the quotes of JSON, and its grammar writes no escapes.
        groups: open ones, the whole pattern first.
        sets: begin and end of what stands for one of several characters, and these.
        named: begin and end of what opens a group with a name.
    """

    pattern: str
    quoted: bool
    groups: list[Group] = attrs.field(factory=lambda: [Group(first=True)])
    sets: list[tuple[int, int, Chars]] = attrs.field(factory=list[tuple[int, int, Chars]])
    named: list[tuple[int, int]] = attrs.field(factory=list[tuple[int, int]])

    def run(self) -> None:
        """Raises: RegexFault."""
        at, size = 0, len(self.pattern)
        while at < size:
            at = self._one(at, self.pattern[at])

    def _one(self, at: int, sign: str) -> int:
        """Look at what begins at `at`; returns where the next begins."""
        group = self.groups[-1]
        match sign:
            case "(":
                self._no_odd_group(at)
                self.groups.append(Group(first=group.first and group.empty))
                group.empty = False
                size = self._opening(at)
                if size > len("(?:"):
                    self.named.append((at, at + size))
                return at + size
            case ")" if len(self.groups) > 1:
                self._close(at)
                return at + 1
            case "|":
                group.empty = True
                return at + 1
            case "^":
                if not (group.first and group.empty) or self.pattern[at + 1 : at + 2] in _REPEATS:
                    raise RegexFault(f"^ at character {at} is not at the beginning, which is not supported")
                group.begins = True
                return at + 1
            case "$":
                if self.pattern[at + 1 : at + 2] not in ("", ")", "|"):
                    raise RegexFault(f"$ at character {at} is not at the end, which is not supported")
                group.ends = True
            case "*" | "+" | "?":
                return self._repeated(at, 1)
            case "{" if counts := _REPEAT.match(self.pattern, at):
                most = max((int(one) for one in (counts[1], counts[3]) if one), default=0)
                if most > MAX_REPEAT:
                    raise RegexFault(f"{counts[0]} at character {at} repeats more than {MAX_REPEAT} times")
                return self._repeated(at, len(counts[0]))
            case "[":
                group.empty = False
                return self._class(at)
            case "\\":
                code, length = self._escape(at)
                if code < 0:
                    self._chars(at, at + length, SHORT[self.pattern[at + 1]])
                self._literal(code, at)
                group.empty = False
                return at + length
            case ".":
                self._chars(at, at + 1, DOT)
            case _:
                self._literal(ord(sign), at)
        group.empty = False
        return at + 1

    def _repeated(self, at: int, size: int) -> int:
        """Behind a repetition, lazy or not: which one makes no difference to what matches as a whole."""
        size += self.pattern[at + size : at + size + 1] == "?"
        if self.pattern[at + size : at + size + 1] in ("*", "+", "{"):
            raise RegexFault(f"the repetition at character {at} is itself repeated, which is not supported")
        return at + size

    def _close(self, at: int) -> None:
        closed, behind = self.groups.pop(), self.pattern[at + 1 : at + 2]
        if closed.begins and behind in _REPEATS:
            raise RegexFault(f"^ in the group that ends at character {at} and repeats is not supported")
        if closed.ends and behind not in ("", ")", "|"):
            raise RegexFault(f"$ in the group that ends at character {at} is not at the end, which is not supported")
        outer = self.groups[-1]
        outer.begins, outer.ends = outer.begins or closed.begins, outer.ends or closed.ends

    def _no_odd_group(self, at: int) -> None:
        rest = self.pattern[at + 1 : at + 4]
        for opening, name in _NO_GROUPS.items():
            if rest.startswith(opening):
                raise RegexFault(f"({opening} at character {at}, a {name}, is not supported")
        if rest.startswith("?") and not rest.startswith(("?:", "?P<", "?<")):
            raise RegexFault(f"({rest[:2]} at character {at}: flags and the like are not supported")

    def _opening(self, at: int) -> int:
        """Characters of what opens a group: ``(``, ``(?:`` or ``(?P<name>``."""
        if self.pattern[at + 1 : at + 2] != "?":
            return 1
        if self.pattern[at + 2] == ":":
            return 3
        end = self.pattern.find(">", at)
        if end < 0:
            raise RegexFault(f"(? at character {at}: its name does not end")
        return end + 1 - at

    def _escape(self, at: int) -> tuple[int, int]:
        """The character's code, -1 for one of several, and the length of the escape."""
        sign = self.pattern[at + 1 : at + 2]
        if not sign:
            raise RegexFault("ends in a backslash")
        if sign in SHORT:
            return -1, 2
        if sign in _CONTROLS:
            return _CONTROLS[sign], 2
        if sign == "u":
            digits = self.pattern[at + 2 : at + 6]
            if not re.fullmatch("[0-9A-Fa-f]{4}", digits):
                raise RegexFault(f"\\u at character {at} needs four hexadecimal digits")
            return int(digits, 16), 6
        if sign == "x":  # the compiler reads on while there are hexadecimal digits
            raise RegexFault(f"\\x at character {at} is not supported; write \\u and four hexadecimal digits")
        if sign.isdigit() and sign != "0":
            raise RegexFault(f"\\{sign}, a back reference, is not supported")
        if sign in "pP":
            raise RegexFault(f"\\{sign}, a Unicode class, is not supported")
        if sign.isascii() and sign.isalnum():
            raise RegexFault(f"\\{sign} is not supported")
        return ord(sign), 2

    def _class(self, at: int) -> int:
        """A bracketed class; one with ] right behind its opening bracket is read in two ways, and refused."""
        pattern, start, found = self.pattern, at, list[tuple[int, int]]()
        negated = pattern[at + 1 : at + 2] == "^"
        at += 2 if negated else 1
        if pattern[at : at + 1] == "]":
            raise RegexFault(f"] at character {at} stands right behind [, which is not supported; write \\]")
        while pattern[at : at + 1] != "]":
            low, at = self._member(at)
            if pattern[at : at + 1] == "-" and pattern[at + 1 : at + 2] != "]":
                high, at = self._member(at + 1)
                if not (len(low) == len(high) == 1 and low[0][0] == low[0][1] <= high[0][0] == high[0][1]):
                    raise RegexFault(f"[ at character {start} has a range that does not rise, or of a class")
                low = ((low[0][0], high[0][0]),)
            found += low
        chars = union(found)
        self._chars(start, at + 1, complement(chars) if negated else chars)
        return at + 1

    def _member(self, at: int) -> tuple[Chars, int]:
        """What one member of a class stands for, and where the next begins."""
        if at >= len(self.pattern):
            raise RegexFault("[ without ]")
        if self.pattern[at] != "\\":
            return ((ord(self.pattern[at]),) * 2,), at + 1
        code, size = self._escape(at)
        return (SHORT[self.pattern[at + 1]] if code < 0 else ((code, code),)), at + size

    def _chars(self, start: int, end: int, chars: Chars) -> None:
        if not without(chars, ESCAPED_BY_JSON if self.quoted else ()):
            why = "only characters that JSON escapes" if chars else "no characters"
            raise RegexFault(f"[ at character {start} has {why}, which is not supported")
        self.sets.append((start, end, chars))

    def _literal(self, code: int, at: int) -> None:
        if self.quoted and code >= 0 and _needs_escape(code):
            raise RegexFault(f"U+{code:04X} at character {at}, which JSON escapes, is not supported")


def _needs_escape(code: int) -> bool:
    return code < 0x20 or code in (0x22, 0x5C)


def regex_fault(pattern: str, *, quoted: bool = False) -> str:
    """Why the pattern cannot be served, or ""; what is no pattern at all the compiler finds.

    Args:
        quoted: it holds the text of a JSON string.
    """
    try:
        Scan(pattern=pattern, quoted=quoted).run()
    except RegexFault as no:
        return str(no)
    return ""


def spelled_out(pattern: str, *, quoted: bool = False) -> str:
    """The pattern as it is compiled: what the compiler would read in another way as classes of single characters.

    That is a dot; and in a text of JSON, whose grammar writes no escapes, each set of characters, since the
    compiler does not keep to that for every pattern. Groups lose their names. A pattern that cannot be served
    is returned as it is.
    """
    scan = Scan(pattern=pattern, quoted=quoted)
    try:
        scan.run()
    except RegexFault:
        return pattern
    changes = [(start, end, "(?:") for start, end in scan.named]
    for start, end, chars in scan.sets:
        if quoted:
            changes.append((start, end, class_text(without(chars, ESCAPED_BY_JSON))))
        elif pattern[start] == ".":
            changes.append((start, end, class_text(chars)))
    pieces, at = list[str](), 0
    for start, end, text in sorted(changes):
        pieces += [pattern[at:start], text]
        at = end
    return "".join([*pieces, pattern[at:]])
