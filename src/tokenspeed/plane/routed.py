"""What `control_ops` makes of a round's messages."""

from __future__ import annotations

import attrs

from tokenspeed.plane.messages import GenerateRequest, Refusal
from tokenspeed.plane.operations import ProfileOp


@attrs.frozen(kw_only=True)
class Routed:
    """A round's messages, sorted.

    Attributes:
        requests: to be admitted now, in order of arrival.
        aborts: ids whose clients went away.
        prefixes: likewise, all ids that begin so.
        refusals: requests that found no room, no weights, or were given up while they were held back.
        abort_ahead: how many of `requests` stood ahead of the last message that ends everything
            before it; -1: there was none.
        abort_why: told to those.
        profiles: starts and stops of recordings.
    """

    requests: tuple[GenerateRequest, ...]
    aborts: tuple[str, ...]
    refusals: tuple[Refusal, ...]
    prefixes: tuple[str, ...] = ()
    abort_ahead: int = -1
    abort_why: str = ""
    profiles: tuple[ProfileOp, ...] = ()


NOTHING_SAID = Routed(requests=(), aborts=(), refusals=())


@attrs.define(eq=False)
class Sorting:
    """One round's messages while they are read. Writer: ControlOps, within one `route`."""

    requests: list[GenerateRequest] = attrs.field(factory=list[GenerateRequest])
    aborts: list[str] = attrs.field(factory=list[str])
    prefixes: list[str] = attrs.field(factory=list[str])
    refusals: list[Refusal] = attrs.field(factory=list[Refusal])
    profiles: list[ProfileOp] = attrs.field(factory=list[ProfileOp])
    abort_ahead: int = -1
    abort_why: str = ""

    def end_all_ahead(self, why: str) -> None:
        self.abort_ahead, self.abort_why = len(self.requests), why

    def sorted(self) -> Routed:
        return Routed(
            requests=tuple(self.requests),
            aborts=tuple(self.aborts),
            refusals=tuple(self.refusals),
            prefixes=tuple(self.prefixes),
            abort_ahead=self.abort_ahead,
            abort_why=self.abort_why,
            profiles=tuple(self.profiles),
        )
