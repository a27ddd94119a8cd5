"""What the frontend asks of its surroundings, beside the ports of the plane."""

from __future__ import annotations

import time
from typing import Protocol

import attrs

from tokenspeed.frontend.generation import ChoiceDelta
from tokenspeed.plane.messages import LoadReport


class LoadMeter(Protocol):
    """Shows an engine's load reports; loop thread only."""

    def show(self, load: LoadReport) -> None: ...


class RequestMeter(Protocol):
    """Takes the moments of requests; loop thread only, must not block.

    What is about a prompt or about waiting is told once a request, what is about generated tokens
    once a choice.
    """

    def admitted(self, *, choices: int, max_tokens: int | None) -> None: ...

    def first_token(self, *, seconds: float, prompt_tokens: int, cached_tokens: int) -> None: ...

    def tokens(self, count: int, gap_s: float | None) -> None:
        """`count` new tokens of one choice; `gap_s` since its previous ones, None for the first."""
        ...

    def choice_ended(self, *, reason: str, tokens: int, decode_s: float) -> None:
        """`reason` is stop, length, abort or error."""
        ...

    def request_ended(self, *, seconds: float, most_tokens: int) -> None:
        """`most_tokens`: of the longest of its choices."""
        ...


class DeltaSink(Protocol):
    """Sends deltas on at once, where their consumer would be woken for nothing else. Loop thread only."""

    def takes(self) -> bool:
        """Whether what is put now is sent without waiting."""
        ...

    def put(self, delta: ChoiceDelta) -> None: ...


@attrs.frozen(kw_only=True, eq=False)
class NoSink:
    """Of a consumer that wants to be woken."""

    def takes(self) -> bool:
        return False

    def put(self, delta: ChoiceDelta) -> None:
        """Never called."""


@attrs.frozen(kw_only=True, eq=False)
class QuietMeter:
    """Records nothing; both a `LoadMeter` and a `RequestMeter`."""

    def show(self, load: LoadReport) -> None:
        pass

    def admitted(self, *, choices: int, max_tokens: int | None) -> None:
        pass

    def first_token(self, *, seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        pass

    def tokens(self, count: int, gap_s: float | None) -> None:
        pass

    def choice_ended(self, *, reason: str, tokens: int, decode_s: float) -> None:
        pass

    def request_ended(self, *, seconds: float, most_tokens: int) -> None:
        pass


@attrs.frozen(kw_only=True, eq=False)
class SteadyClock:
    """The system's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()
