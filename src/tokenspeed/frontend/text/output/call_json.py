"""A tool call written as a JSON object, read character by character: the name as soon as it is known, then the
arguments as they come."""

from __future__ import annotations

import enum
import json

import attrs

NAMES = ("name", "function")
ARGUMENTS = ("arguments", "parameters")


class ScanStatus(enum.Enum):
    """How far an object is read."""

    OPEN = "open"
    DONE = "done"
    BROKEN = "broken"


class _At(enum.Enum):
    START = "start"
    KEY = "key"
    IN_KEY = "in key"
    COLON = "colon"
    VALUE = "value"
    IN_VALUE = "in value"
    NEXT = "next"


@attrs.define(eq=False)
class CallScanner:
    """Reads one object ``{"name": …, "arguments": {…}}``, the keys in any order. One writer: its parser.

    Attributes:
        raw: everything read.
        name: the function; None: not known yet.
        fresh: argument text that nobody took yet; stays here until the name is known.
    """

    status: ScanStatus = ScanStatus.OPEN
    raw: str = ""
    name: str | None = None
    fresh: str = ""
    at: _At = _At.START
    key: str = ""
    value: list[str] = attrs.field(factory=list[str])
    depth: int = 0
    in_string: bool = False
    escaped: bool = False
    has_arguments: bool = False

    def feed(self, text: str) -> int:
        """Read `text` up to the object's end; how many characters were read."""
        for place, sign in enumerate(text):
            self._step(sign)
            if self.status is not ScanStatus.OPEN:
                self.raw += text[: place + 1]
                return place + 1
        self.raw += text
        return len(text)

    def take(self) -> str:
        """The arguments' JSON that came since the last call; "" as long as the name is not known."""
        if self.name is None:
            return ""
        taken, self.fresh = self.fresh, ""
        return taken

    def _step(self, sign: str) -> None:
        match self.at:
            case _At.IN_KEY | _At.IN_VALUE:
                self._inside(sign)
            case _ if sign.isspace():
                pass
            case _At.START:
                self._expect(sign == "{", _At.KEY)
            case _At.KEY:
                self.value = []
                if sign == "}":
                    self._end()
                else:
                    self._expect(sign == '"', _At.IN_KEY)
            case _At.COLON:
                self._expect(sign == ":", _At.VALUE)
            case _At.VALUE:
                self._begin(sign)
            case _At.NEXT if sign == "}":
                self._end()
            case _At.NEXT:
                self._expect(sign == ",", _At.KEY)

    def _expect(self, right: bool, then: _At) -> None:
        if right:
            self.at = then
        else:
            self.status = ScanStatus.BROKEN

    def _begin(self, sign: str) -> None:
        self.at, self.value = _At.IN_VALUE, [sign]
        self.in_string = sign == '"'
        self.depth = int(sign in "{[")
        if self._streams(sign):
            self.fresh += sign
        if not (self.in_string or self.depth or sign.isalnum() or sign == "-"):
            self.status = ScanStatus.BROKEN

    def _streams(self, sign: str) -> bool:
        """The arguments are an object, whose text is passed on as it is."""
        return self.key in ARGUMENTS and bool(self.value) and self.value[0] == "{" and bool(sign)

    def _inside(self, sign: str) -> None:
        if self.at is _At.IN_KEY:
            if sign == '"' and not self.escaped:
                self.key, self.at = "".join(self.value), _At.COLON
            self.escaped = sign == "\\" and not self.escaped
            self.value.append(sign)
            return
        bare = not self.in_string and not self.depth
        if bare and (sign in ",}" or sign.isspace()):  # the end of a number or a word
            self._value()
            self.at = _At.NEXT
            if not sign.isspace():
                self._step(sign)
            return
        self.value.append(sign)
        if self._streams(sign):
            self.fresh += sign
        self._nest(sign)

    def _nest(self, sign: str) -> None:
        if self.in_string:
            if sign == '"' and not self.escaped:
                self.in_string = False
            self.escaped = sign == "\\" and not self.escaped
        elif sign == '"':
            self.in_string = True
        elif sign in "{[":
            self.depth += 1
        elif sign in "}]":
            self.depth -= 1
        if not self.in_string and self.depth == 0 and sign in '"}]':
            self._value()
            if self.status is ScanStatus.OPEN:
                self.at = _At.NEXT

    def _value(self) -> None:
        """A value is complete."""
        raw = "".join(self.value)
        if self.key in ARGUMENTS:
            self.has_arguments = True
            if not raw.startswith("{"):
                self.fresh += _object_text(raw)
        elif self.key in NAMES and self.name is None and raw.startswith('"'):
            try:
                self.name = json.loads(raw)
            except ValueError:
                self.status = ScanStatus.BROKEN

    def _end(self) -> None:
        self.status = ScanStatus.DONE if self.name else ScanStatus.BROKEN
        if self.name and not self.has_arguments:
            self.fresh += "{}"


def _object_text(raw: str) -> str:
    """Arguments that are not an object: a text may hold one, anything else is none."""
    try:
        value = json.loads(raw)
    except ValueError:
        return "{}"
    if not isinstance(value, str):
        return "{}"
    return value if value.lstrip().startswith("{") else "{}"
