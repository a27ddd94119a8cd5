"""Prompts computed on one node and decoded on another: what the scheduler plans and waits for on each side.

A stream of KV needs no batch slot and goes out with whatever else the round does (SP-30, SP-31). Pages in
a transfer, to or from them, are not given to anyone else before the transfer has provably stopped, which
its `TransferDone` says; whoever ended the request before (SP-54, B-36).
"""

from __future__ import annotations

from typing import Protocol

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import GroupBlocks, PlanAbort, RemoteStream
from tokenspeed.plane.results import TransferDone
from tokenspeed.plane.table import RequestTable
from tokenspeed.scheduler.admission import Admission
from tokenspeed.scheduler.draft import PlanDraft
from tokenspeed.scheduler.exits import Exits
from tokenspeed.scheduler.groups import Group
from tokenspeed.scheduler.residents import Residents
from tokenspeed.scheduler.seniority import Seniority
from tokenspeed.scheduler.states import Event, Life, State


@attrs.frozen(kw_only=True, eq=False)
class Streams:
    """What one plan asks of the peer."""

    prefill: tuple[RemoteStream, ...] = ()
    decode: tuple[RemoteStream, ...] = ()


NO_STREAMS = Streams()


class Remote(Protocol):
    """Null: `NoRemote`."""

    def tell(self, draft: PlanDraft) -> None:
        """The ends of requests whose transfer failed; with the plan that drops them."""
        ...

    def plan(self, draft: PlanDraft) -> Streams:
        """Asked before prompts are admitted."""
        ...

    def transferred(self, event: TransferDone) -> bool:
        """A transfer ended. True: the prompt's KV is on the device now and may be published."""
        ...

    def settle(self, event: TransferDone) -> None:
        """The other half of `transferred`, behind the publication: the request goes on or ends."""
        ...


@attrs.frozen(eq=False)
class NoRemote:
    """An engine that prefills and decodes by itself."""

    def tell(self, draft: PlanDraft) -> None:
        return None

    def plan(self, draft: PlanDraft) -> Streams:
        del draft
        return NO_STREAMS

    def transferred(self, event: TransferDone) -> bool:
        raise InvariantBroken("a transfer ended for a scheduler without a peer", row=event.row)

    def settle(self, event: TransferDone) -> None:
        return None


@attrs.define(eq=False)
class FailedTransfers:
    """Writer: Receiver or Sender. Rows whose clients must be told, by the next plan."""

    rows: list[int] = attrs.field(factory=list[int])

    def tell(self, draft: PlanDraft, table: RequestTable, reason: str) -> None:
        """A client that has its end already is told nothing."""
        draft.aborts.extend(PlanAbort(row=row, reason=reason) for row in self.rows if table.output.owned[row])
        self.rows.clear()


@attrs.frozen(kw_only=True, eq=False)
class Receiver:
    """The decode role: an admitted prompt gets all its pages and a stream into them instead of chunks.

    The first input after that is the bootstrap token, which came with the KV: a chunk of one token.
    """

    table: RequestTable
    life: Life
    groups: tuple[Group, ...]
    residents: Residents
    admission: Admission
    seniority: Seniority
    exits: Exits
    failed: FailedTransfers = attrs.field(factory=FailedTransfers)

    def tell(self, draft: PlanDraft) -> None:
        self.failed.tell(draft, self.table, "the KV of the prompt did not arrive from its prefill node")

    def plan(self, draft: PlanDraft) -> Streams:
        while not draft.pressed:
            row = self.admission.admit_next()
            if row is None:
                break
            draft.seated.append(row)
        # One that comes back after a retraction is recomputed here: its prefill node has forgotten it.
        rows = [
            row
            for row in self.life.rows(State.PREFILLING)
            if self._awaits(row) and not self.seniority.was_retracted(row)
        ]
        return Streams(prefill=tuple(self._receive(row) for row in rows)) if rows else NO_STREAMS

    def transferred(self, event: TransferDone) -> bool:
        row = event.row
        state = self.life.of(row)
        if state not in (State.REMOTE_RECEIVE, State.FENCED):
            raise InvariantBroken("a transfer ended that was not open", row=row, state=state.name)
        if not event.ok or state is State.FENCED:
            return False
        self.table.schedule.landed[row] = self.table.identity.prompt_len[row]
        return True

    def settle(self, event: TransferDone) -> None:
        row = event.row
        if self.life.of(row) is State.REMOTE_RECEIVE and event.ok and not event.finished:
            self._go_on(row)
            return
        if self.life.of(row) is State.REMOTE_RECEIVE and not event.ok:
            self.failed.rows.append(row)
        self.exits.transferred(row)

    def _awaits(self, row: int) -> bool:
        """Whether the prompt's KV has yet to come; not so for the bootstrap token's chunk."""
        return bool(self.table.tokens.known[row] == self.table.identity.prompt_len[row])

    def _receive(self, row: int) -> RemoteStream:
        schedule = self.table.schedule
        slot, start = int(schedule.slot[row]), int(schedule.scheduled[row])
        prompt = int(self.table.identity.prompt_len[row])
        if not self.residents.extend(slot, tokens=prompt):
            raise InvariantBroken("a prompt admitted without its landing blocks", row=row)
        for group in self.groups:
            # The other node has given up what no query will see again, and does not send it.
            self.residents.cache.skip(group.number, slot, group.first_seen(prompt))
        schedule.scheduled[row] = prompt
        self.life.move(row, Event.RECEIVE)
        pages = _pages(self.groups, self.residents, slot, start=start, seen_from=prompt)
        return RemoteStream(row=row, rid=self.table.identity.rid[row], slot=slot, pages=pages, start=start)

    def _go_on(self, row: int) -> None:
        known, prompt = int(self.table.tokens.known[row]), int(self.table.identity.prompt_len[row])
        if known != prompt + 1:
            raise InvariantBroken("KV arrived without its bootstrap token", row=row, known=known, prompt=prompt)
        self.residents.state.goal[int(self.table.schedule.slot[row])] = known
        self.life.move(row, Event.RECEIVED)


@attrs.frozen(kw_only=True, eq=False)
class Sender:
    """The prefill role: once the result of a prompt's last chunk is in, its KV goes out (SP-34)."""

    table: RequestTable
    life: Life
    groups: tuple[Group, ...]
    residents: Residents
    exits: Exits
    failed: FailedTransfers = attrs.field(factory=FailedTransfers)

    def tell(self, draft: PlanDraft) -> None:
        self.failed.tell(draft, self.table, "the KV of the prompt could not be handed to its decode node")

    def plan(self, draft: PlanDraft) -> Streams:
        del draft
        if not self.life.count(State.PREFILL_DONE):
            return NO_STREAMS
        rows = [row for row in self.life.rows(State.PREFILL_DONE) if not self.life.flying(row)]
        return Streams(decode=tuple(self._hand_off(row) for row in rows)) if rows else NO_STREAMS

    def transferred(self, event: TransferDone) -> bool:
        state = self.life.of(event.row)
        if state not in (State.HANDOFF, State.FENCED):
            raise InvariantBroken("a transfer ended that was not open", row=event.row, state=state.name)
        return False

    def settle(self, event: TransferDone) -> None:
        if self.life.of(event.row) is State.HANDOFF and not event.ok:
            self.failed.rows.append(event.row)
        self.exits.transferred(event.row)

    def _hand_off(self, row: int) -> RemoteStream:
        self.life.move(row, Event.HAND_OFF)
        slot = int(self.table.schedule.slot[row])
        prompt = int(self.table.identity.prompt_len[row])
        pages = _pages(self.groups, self.residents, slot, start=0, seen_from=prompt)
        return RemoteStream(row=row, rid=self.table.identity.rid[row], slot=slot, pages=pages)


def _pages(
    groups: tuple[Group, ...], residents: Residents, slot: int, *, start: int, seen_from: int
) -> tuple[GroupBlocks, ...]:
    """Blocks of the slot with positions from `start` on that a query at `seen_from` needs; ends with the prompt."""
    pages = []
    for group, tables in zip(groups, residents.state.groups, strict=True):
        first = int(tables.first[slot])
        if group.by_position:
            first = max(first, start // group.block_tokens, group.first_seen(seen_from))
        blocks = tables.blocks[slot, first : int(tables.held[slot])]
        pages.append(GroupBlocks(group=group.number, blocks=tuple(blocks.tolist())))
    return tuple(pages)
