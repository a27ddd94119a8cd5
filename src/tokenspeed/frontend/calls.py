"""The operator's line about each call: which of the engines' sequences answered which client's request."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Protocol

import attrs

log = logging.getLogger("tokenspeed.call")

SHOWN_RIDS = 8
"""Ids in the text of a line; its fields have all of them, which `scheduler.max_waiting` bounds."""
SHOWN_CHARS = 256
_UNSEEN = re.compile(r"[^\x21-\x7e]")


@attrs.frozen(kw_only=True)
class CallName:
    """What one call is called outside the engine.

    Attributes:
        answer: the id in its answer; "": it has none.
        client: what the client calls it (``X-Request-Id``, ``request_id``); "": nothing. Need not be unique.
    """

    answer: str = ""
    client: str = ""

    def means(self, name: str, place: int) -> bool:
        """Whether `name` is this call, or its sequence at `place`."""
        return bool(name) and name in (self.answer, self.client, f"{self.answer}-{place}")


UNNAMED = CallName()


class CallLog(Protocol):
    """Takes note of calls that ended."""

    def ended(self, name: CallName, *, rids: Sequence[str], status: int, seconds: float) -> None:
        """Tell of one call.

        Args:
            rids: the engine's names of its sequences, by prompt and choice; none if no engine saw it.
            status: 200, 499 if the client left, or that of the error that ended it, in mid-stream too.
        """
        ...

    def refused(self, client: str, *, path: str, status: int, code: str, field: str) -> None:
        """Tell of a request that was no call: a field or the body is wrong, or it asks for what is not served.

        Args:
            client: its ``X-Request-Id``, whatever that holds; "": it has none.
            field: the first that is wrong, never its value: prompts are not logged; "": none in particular.
        """
        ...


@attrs.frozen(kw_only=True, eq=False)
class NoCallLog:
    """Says nothing."""

    def ended(self, name: CallName, *, rids: Sequence[str], status: int, seconds: float) -> None:
        """Nobody asked."""

    def refused(self, client: str, *, path: str, status: int, code: str, field: str) -> None:
        """Nor here."""


@attrs.frozen(kw_only=True, eq=False)
class CallLines:
    """One line a call, with `log.requests`."""

    def ended(self, name: CallName, *, rids: Sequence[str], status: int, seconds: float) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        answer, client = shown_id(name.answer), shown_id(name.client)
        more = len(rids) - SHOWN_RIDS
        listed = " ".join(rids[:SHOWN_RIDS]) + (f" and {more} more" if more > 0 else "")
        fields = {
            "answer_id": answer or None,
            "request_id": client or None,
            "rids": [*rids],
            "status": status,
            "total_s": round(seconds, 6),
        }
        log.info(
            "%s: %d, request id %s, rids %s, total %.3f s",
            answer or "-",
            status,
            client or "none",
            listed or "none",
            seconds,
            extra={"fields": fields},
        )

    def refused(self, client: str, *, path: str, status: int, code: str, field: str) -> None:
        client, field = shown_id(client), shown_id(field)
        fields = {
            "path": path,
            "request_id": client or None,
            "status": status,
            "code": code,
            "field": field or None,
        }
        log.info(
            "%s refused: %d %s, field %s, request id %s",
            path,
            status,
            code,
            field or "none",
            client or "none",
            extra={"fields": fields},
        )


def shown_id(given: str) -> str:
    """An id that may be a client's, as it can stand in a line: printable ASCII without spaces, and not endless."""
    return _UNSEEN.sub("?", given[:SHOWN_CHARS])
