"""Stop strings, found in text that arrives in pieces."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Emitted:
    """What may be sent on.

    Attributes:
        text: never taken back later.
        matched: the stop string that was found; nothing follows.
    """

    text: str
    matched: str | None = None
