"""What is known of a request's course when it ends, for whoever exports traces."""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

import attrs

Attribute: TypeAlias = str | int | float | bool


@attrs.frozen(kw_only=True)
class SpanValue:
    """One span.

    Attributes:
        start_s, end_s: seconds since the epoch.
        parent: index of the span around it in the same entry; -1: none.
    """

    name: str
    start_s: float
    end_s: float
    parent: int = -1
    attributes: tuple[tuple[str, Attribute], ...] = ()


@attrs.frozen(kw_only=True)
class TraceEntry:
    """The spans of one request, outer ones first.

    Attributes:
        trace: what the request belongs to, as a W3C ``traceparent``; "": nothing.
        span_id: of the first span, see `Begun`.
    """

    rid: str
    span_id: str
    spans: tuple[SpanValue, ...]
    trace: str = ""


@attrs.frozen(kw_only=True)
class Begun:
    """A request whose spans are wanted.

    Attributes:
        span_id: its first span's, for `TraceEntry`.
        trace: the ``traceparent`` that puts others' spans below it.
    """

    span_id: str
    trace: str


@runtime_checkable
class Tracer(Protocol):
    """Takes entries on the thread where a request ends; never waits."""

    @property
    def active(self) -> bool:
        """False: entries need not be made."""
        ...

    def begin(self, rid: str, trace: str) -> Begun | None:
        """The identity of a request's first span; None: the request is not among those sampled."""
        ...

    def add(self, entry: TraceEntry) -> None: ...

    def close(self) -> None: ...


@attrs.frozen(kw_only=True, eq=False)
class NoTracer:
    """For an engine that exports no traces."""

    @property
    def active(self) -> bool:
        return False

    def begin(self, rid: str, trace: str) -> Begun | None:
        return None

    def add(self, entry: TraceEntry) -> None:
        pass

    def close(self) -> None:
        pass


__all__ = ["Attribute", "Begun", "NoTracer", "SpanValue", "TraceEntry", "Tracer"]
