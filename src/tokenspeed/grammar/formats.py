"""Formats of JSON Schema that are compiled as patterns, so that what is written also is what it looks like.

The compiler's own forms let dates pass that no calendar has, and numbers with zeros ahead in addresses.
Source: RFC 3339, section 5.6, without leap seconds and years before 1000; RFC 2673, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP = f"(?:[1-9][0-9]{_BY_FOUR}|(?:[2468][048]|[13579][26])00)-02-29"
_DATE = (
    "(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP})"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_CLOCK})"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"

PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "date": f"^{_DATE}$",
        "time": f"^{_TIME}$",
        "date-time": f"^{_DATE}T{_TIME}$",
        "ipv4": rf"^{_BYTE}(?:\.{_BYTE}){{3}}$",
    }
)
