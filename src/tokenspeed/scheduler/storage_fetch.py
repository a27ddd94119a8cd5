"""Before admission: one QUERY for what device and host tier lack of a prompt, one GET of what it found.

A request passes through the steps of `Step` while it is PREPARING, and is WAITING after that. It holds
no slot and no device block meanwhile; the destinations of its GET are host blocks. An operation outlives
its request: host blocks return when the executor has retired it, whoever ended before (SP-55).
"""

from __future__ import annotations

import enum
import itertools
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

import attrs

from tokenspeed.plane.plan import StorageOp, StorageVerb
from tokenspeed.scheduler.names import NAMED_PER_ROUND, Chains
from tokenspeed.scheduler.states import Event, Life, State
from tokenspeed.scheduler.storage import Known, OpIds, Shelf
from tokenspeed.scheduler.storage_reach import StorageReach, StoredBlock
from tokenspeed.scheduler.waiting import WaitingQueue

T = TypeVar("T")
NO_OP = -1
NO_ROW = -1


class Step(enum.Enum):
    """NAMING: the prompt's blocks get their names, then a QUERY is planned. ASKED: until its outcome.
    FOUND: a GET is to be planned. FETCHING: until its outcome."""

    NAMING = "naming"
    ASKED = "asked"
    FOUND = "found"
    FETCHING = "fetching"


@attrs.define(eq=False)
class Preparation:
    """Of one request; `pages` may be covered by a hit, of which `named` have their names; `blocks` were found."""

    pages: int
    step: Step = Step.NAMING
    named: int = 0
    op_id: int = NO_OP
    since_s: float = 0.0
    blocks: tuple[StoredBlock, ...] = ()
    aborted: bool = False


@attrs.frozen
class OpenFetch:
    """A QUERY (without host blocks) or GET in the executor's hands; NO_ROW: its request has ended or gone on."""

    row: int
    blocks: tuple[StoredBlock, ...]
    host_blocks: tuple[int, ...] = ()


@attrs.define(eq=False)
class FetchState:
    """Writer: Fetch.

    ``preparing``: by row, in order of submission. ``due``: rows with something to plan. ``cancels``:
    open operations to be given up. ``fetching``: open GETs by what they fetch. ``followers``: by open GET,
    rows that need what it fetches. ``held``: by row, fetched blocks kept until its admission.
    """

    preparing: dict[int, Preparation] = attrs.field(factory=dict[int, Preparation])
    due: deque[int] = attrs.field(factory=deque[int])
    open: dict[int, OpenFetch] = attrs.field(factory=dict[int, OpenFetch])
    cancels: list[int] = attrs.field(factory=list[int])
    fetching: dict[StoredBlock, int] = attrs.field(factory=dict[StoredBlock, int])
    followers: dict[int, list[int]] = attrs.field(factory=dict[int, list[int]])
    aborted: list[int] = attrs.field(factory=list[int])
    held: dict[int, list[tuple[int, int]]] = attrs.field(factory=dict[int, list[tuple[int, int]]])


@attrs.frozen(kw_only=True, eq=False)
class Fetch:
    """Meets `storage.Fetching`.

    Attributes:
        min_tokens, wait_s: see `SchedulerConfig`.
    """

    min_tokens: int
    wait_s: float
    life: Life
    waiting: WaitingQueue
    chains: Chains
    reach: StorageReach
    known: Known
    shelf: Shelf
    ids: OpIds
    state: FetchState = attrs.field(factory=FetchState)

    @property
    def busy(self) -> bool:
        return any(op.host_blocks for op in self.state.open.values())

    def takes(self, row: int, *, most: int) -> bool:
        pages = most // self.reach.page_tokens
        if pages < self.reach.step or most < self.min_tokens:
            return False
        self.life.move(row, Event.PREPARE)
        self.state.preparing[row] = Preparation(pages=pages)
        self.state.due.append(row)
        return True

    def abort(self, row: int) -> None:
        preparation = self.state.preparing[row]
        if not preparation.aborted:
            preparation.aborted = True
            self.state.aborted.append(row)

    def admitted(self, row: int) -> None:
        for group, blocks in _by_group(self.state.held.pop(row, ())):
            self.shelf.let_go(group, blocks)

    def settle_aborts(self) -> None:
        """One without an operation is over; any other is detached, and its operation given up."""
        for row in self.state.aborted:
            self._detach(row)
            self.life.move(row, Event.END)
            self.chains.forget(row)
        self.state.aborted.clear()

    def ended(self, op_id: int, outcomes: tuple[bool, ...], *, round_id: int) -> bool:
        op = self.state.open.pop(op_id, None)
        if op is None:
            return False
        if op_id in self.state.cancels:
            self.state.cancels.remove(op_id)
        successes = outcomes or (False,) * len(op.blocks)
        if op.host_blocks:
            self._fetched(op_id, op, successes)
            if op.row != NO_ROW:
                self._go_on(op.row, round_id=round_id)
        elif op.row != NO_ROW:
            self._found(op, successes, round_id=round_id)
        return True

    def expire(self, *, now_s: float, round_id: int) -> None:
        while self.state.preparing:
            row, first = next(iter(self.state.preparing.items()))
            if first.op_id == NO_OP or now_s - first.since_s < self.wait_s:
                return
            self._detach(row)
            self._go_on(row, round_id=round_id)

    def plan(self, *, allowed: bool, now_s: float, round_id: int) -> list[StorageOp]:
        state = self.state
        ops = [StorageOp(op_id=op_id, verb=StorageVerb.CANCEL, keys=()) for op_id in state.cancels]
        state.cancels.clear()
        if not allowed:
            return ops
        # Nobody waits for this round if nothing runs; and then no other round might come.
        budget = NAMED_PER_ROUND if self._others_run else 1 << 30
        while state.due and budget > 0:
            row = state.due[0]
            preparation = state.preparing.get(row)
            if preparation is None or preparation.aborted or preparation.step not in (Step.NAMING, Step.FOUND):
                state.due.popleft()
            elif preparation.step is Step.FOUND:
                state.due.popleft()
                ops.extend(self._get(row, preparation, round_id=round_id))
            else:
                budget -= self._name(row, preparation, budget)
                if preparation.named == preparation.pages:
                    state.due.popleft()
                    preparation.since_s = now_s
                    ops.extend(self._query(row, preparation, round_id=round_id))
        return ops

    def clear(self) -> None:
        """What was fetched for waiting requests is forgotten with the rest of the host tier."""
        for row in tuple(self.state.held):
            self.admitted(row)

    def pins(self) -> list[tuple[int, int]]:
        pins = [pin for held in self.state.held.values() for pin in held]
        for op in self.state.open.values():
            # A QUERY has no host blocks.
            pins += [(block.group, host) for block, host in zip(op.blocks, op.host_blocks, strict=False)]
        return pins

    @property
    def _others_run(self) -> bool:
        return bool(self.life.count(State.DECODING) or self.life.count(State.PREFILLING))

    def _name(self, row: int, preparation: Preparation, budget: int) -> int:
        """Hash the next pages; names are remembered, so that none is made twice (SP-49)."""
        count = min(budget, preparation.pages - preparation.named)
        preparation.named += count
        self.chains.upto(row, preparation.named)
        return count

    def _query(self, row: int, preparation: Preparation, *, round_id: int) -> list[StorageOp]:
        chain = self.chains.upto(row, preparation.pages)
        blocks = self.reach.lacking(chain, preparation.pages, self._has)
        if not blocks:
            self._go_on(row, round_id=round_id)
            return []
        preparation.step = Step.ASKED
        return [self._start(row, preparation, StorageVerb.QUERY, tuple(blocks))]

    def _found(self, op: OpenFetch, successes: tuple[bool, ...], *, round_id: int) -> None:
        if not any(successes):
            self._go_on(op.row, round_id=round_id)
            return
        preparation = self.state.preparing[op.row]
        preparation.step = Step.FOUND
        preparation.blocks = tuple(block for block, ok in zip(op.blocks, successes, strict=True) if ok)
        self.state.due.append(op.row)

    def _get(self, row: int, preparation: Preparation, *, round_id: int) -> list[StorageOp]:
        """A GET of what the longest prefix lacks; of half of that if the host tier has no room for it, and so on.

        What another request is fetching is waited for first.
        """
        leader = next(filter(None, map(self.state.fetching.get, preparation.blocks)), None)
        if leader is not None:
            self.state.followers.setdefault(leader, []).append(row)
            return []
        chain = self.chains.upto(row, preparation.pages)
        stored, pages = frozenset(preparation.blocks), preparation.pages
        while pages >= self.reach.step:
            blocks = self.reach.chosen(chain, pages, self._holds, stored)
            if not blocks:
                break
            if self.shelf.fits(self._want(blocks)):
                preparation.step = Step.FETCHING
                return [self._start(row, preparation, StorageVerb.GET, tuple(blocks), self._room_for(blocks))]
            pages //= 2
        self._go_on(row, round_id=round_id)
        return []

    def _want(self, blocks: list[StoredBlock]) -> tuple[int, ...]:
        """Blocks of each group."""
        counts = [0] * len(self.reach.groups)
        for block in blocks:
            counts[block.group] += 1
        return tuple(counts)

    def _room_for(self, blocks: list[StoredBlock]) -> tuple[int, ...]:
        """Host blocks, one for each of `blocks`, which are in the order of their groups."""
        return self.shelf.reserve(list(_by_group(blocks)))

    def _start(
        self,
        row: int,
        preparation: Preparation,
        verb: StorageVerb,
        blocks: tuple[StoredBlock, ...],
        host_blocks: tuple[int, ...] = (),
    ) -> StorageOp:
        preparation.op_id = op_id = self.ids.next()
        self.state.open[op_id] = OpenFetch(row, blocks, host_blocks)
        if host_blocks:
            self.state.fetching.update(dict.fromkeys(blocks, op_id))
        return StorageOp(op_id=op_id, verb=verb, keys=tuple(block.key for block in blocks), host_blocks=host_blocks)

    def _fetched(self, op_id: int, op: OpenFetch, successes: tuple[bool, ...]) -> None:
        """Filled host blocks can be found, and stay for the request that wanted them; the others are empty again."""
        held: list[tuple[int, int]] = []
        for block, host_block, ok in zip(op.blocks, op.host_blocks, successes, strict=True):
            del self.state.fetching[block]
            if ok:
                self.shelf.wrote(block.group, host_block)
            else:
                self.shelf.void(block.group, host_block)
            if ok and op.row != NO_ROW:
                held.append((block.group, host_block))
            else:
                self.shelf.let_go(block.group, (host_block,))
        if held:
            self.state.held[op.row] = held
        self.state.due.extend(self.state.followers.pop(op_id, ()))

    def _detach(self, row: int) -> None:
        """The request has nothing to do with its operation any more, which is to be given up."""
        preparation = self.state.preparing.pop(row)
        op = self.state.open.get(preparation.op_id)
        if op is not None:
            self.state.open[preparation.op_id] = attrs.evolve(op, row=NO_ROW)
            self.state.cancels.append(preparation.op_id)

    def _go_on(self, row: int, *, round_id: int) -> None:
        self.state.preparing.pop(row, None)
        self.life.move(row, Event.PREPARED)
        self.waiting.add(row, round_id=round_id)

    def _has(self, group: int, name: bytes) -> bool:
        return self.known(group, name) or self.shelf.find(group, name) is not None

    def _holds(self, group: int, name: bytes) -> bool:
        """Has it, or is getting it."""
        return self.known(group, name) or self.shelf.holds(group, name) is not None


def _by_group(blocks: Iterable[tuple[int, T]]) -> Iterator[tuple[int, list[T]]]:
    """Of (group, what): runs of one group."""
    for group, run in itertools.groupby(blocks, key=operator.itemgetter(0)):
        yield group, [what for _, what in run]
