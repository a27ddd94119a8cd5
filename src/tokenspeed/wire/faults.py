"""What is wrong with a frame."""

from __future__ import annotations

import re

from tokenspeed.errors import TokenspeedError

_AT = re.compile(r"^(?P<text>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")


class WireError(TokenspeedError):
    """A frame cannot be read, or a value cannot be put into one. Stays within this room.

    Attributes:
        field: the path of the offending field, or of the part of the frame.
    """

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}")
        self.field = field


def from_validation(struct: str, exc: Exception) -> WireError:
    """Turn a decoder's complaint, which ends in a path like ``$.sampling_params.top_p``, into ours."""
    text = str(exc)
    at = _AT.match(text)
    path = (at["path"] or "" if at else "").removeprefix("$").removeprefix(".")
    said = at["text"] if at else text
    if missing := _MISSING.search(said):
        path, said = f"{path}.{missing['name']}".removeprefix("."), "missing"
    said = said[:1].lower() + said[1:]
    return WireError(path or struct, said)
