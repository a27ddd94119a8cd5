"""The waiting queue: retracted requests first, then the rest in the policy's order.

Nothing here costs more with more requests waiting, but for the logarithm of a heap: ages, and what the
prefix cache has of a prompt, are brought up to date for a fixed number of requests a round, in turn.
The length is bounded by ingress, which refuses requests beyond its limit.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from typing import NamedTuple, Protocol, TypeAlias

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.ports import SchedulingPolicy
from tokenspeed.plane.table import RequestTable

REFRESHED_PER_ROUND = 8
DROPPED_AT_ONCE = 64
Key: TypeAlias = tuple[float, ...]


class CachedPrompts(Protocol):
    """What a policy may ask of the prefix cache."""

    def cached_tokens(self, row: int) -> int:
        """Tokens of the waiting `row` that need not be computed, as things stand."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class NothingCached:
    def cached_tokens(self, row: int) -> int:
        del row
        return 0


class Entry(NamedTuple):
    """A waiting request: `serial` names its valid heap item, `heap` its heap, `first` its stay in the queue.

    A plain tuple, since a round may make several.
    """

    serial: int
    heap: int
    first: int
    since_round: int
    key: Key


Item: TypeAlias = tuple[Key, int, int, int]


@attrs.define(eq=False)
class QueueState:
    """Writer: WaitingQueue.

    Heap items are (key, order, serial, row); one whose serial is not the live entry's is stale.

    Attributes:
        heap: gets new items.
        old: while ``behind`` live entries still have their item in it; after that all of it is stale and
            goes piece by piece. So no round ever has to go over all of a heap.
        number: of `heap`; rises with each new one.
        turns: (row, first) in the order in which keys are brought up to date.
        returned: (round of retraction, stamp of admission, row), sorted.
    """

    heap: list[Item] = attrs.field(factory=list[Item])
    old: list[Item] = attrs.field(factory=list[Item])
    behind: int = 0
    number: int = 0
    live: dict[int, Entry] = attrs.field(factory=dict[int, Entry])
    turns: deque[tuple[int, int]] = attrs.field(factory=deque[tuple[int, int]])
    returned: list[tuple[int, int, int]] = attrs.field(factory=list[tuple[int, int, int]])
    serial: int = 0


@attrs.frozen(kw_only=True, eq=False)
class WaitingQueue:
    table: RequestTable
    policy: SchedulingPolicy
    cached: CachedPrompts = attrs.field(factory=NothingCached)
    state: QueueState = attrs.field(factory=QueueState)

    def __len__(self) -> int:
        return len(self.state.live) + len(self.state.returned)

    def add(self, row: int, *, round_id: int) -> None:
        first = self.state.serial + 1
        self._push(row, first=first, since_round=round_id, key=self._key(row, waited=0))
        self.state.turns.append((row, first))

    def give_back(self, row: int, *, round_id: int, stamp: int) -> None:
        """A retracted request: ahead of all that never ran; the earlier retracted first, then the elder (H12)."""
        insort(self.state.returned, (round_id, stamp, row))

    def head(self) -> int | None:
        """The request to admit next."""
        state = self.state
        if state.returned:
            return state.returned[0][2]
        heaps = (state.heap, state.old) if state.behind else (state.heap,)
        items = [heap[0] for heap in heaps if self._drop_stale(heap)]
        return min(items)[3] if items else None

    def remove(self, row: int) -> None:
        entry = self.state.live.pop(row, None)
        if entry is None:
            self.state.returned[:] = [item for item in self.state.returned if item[2] != row]
        elif entry.heap != self.state.number:
            self.state.behind -= 1
        self._renew()

    def refresh(self, *, round_id: int) -> None:
        """Bring the keys of the next few requests up to date."""
        state = self.state
        if not state.turns:
            return
        for _ in range(min(REFRESHED_PER_ROUND, len(state.turns))):
            row, first = state.turns.popleft()
            entry = state.live.get(row)
            if entry is None or entry.first != first:
                continue
            state.turns.append((row, first))
            key = self._key(row, waited=round_id - entry.since_round)
            if key != entry.key or entry.heap != state.number:
                state.behind -= entry.heap != state.number
                self._push(row, first=first, since_round=entry.since_round, key=key)
        self._renew()

    def _key(self, row: int, *, waited: int) -> Key:
        identity = self.table.identity
        return self.policy.key(
            order=int(identity.order[row]),
            priority=int(identity.priority[row]),
            prompt_len=int(identity.prompt_len[row]),
            waited_rounds=waited,
            cached_tokens=self.cached.cached_tokens(row) if self.policy.wants_cached_tokens else 0,
        )

    def _push(self, row: int, *, first: int, since_round: int, key: Key) -> None:
        state = self.state
        if not isinstance(key, tuple):
            raise InvariantBroken("a key that is no tuple", policy=type(self.policy).__name__, row=row, key=key)
        state.serial += 1
        state.live[row] = Entry(state.serial, state.number, first, since_round, key)
        try:
            heapq.heappush(state.heap, (key, int(self.table.identity.order[row]), state.serial, row))
        except TypeError as cause:
            name = type(self.policy).__name__
            raise InvariantBroken("a key that cannot be compared with others", policy=name, row=row, key=key) from cause

    def _drop_stale(self, heap: list[Item]) -> bool:
        """Whether a valid item is left, which is on top then."""
        live = self.state.live
        while heap:
            entry = live.get(heap[0][3])
            if entry is not None and entry.serial == heap[0][2]:
                return True
            heapq.heappop(heap)
        return False

    def _renew(self) -> None:
        """Begin a new heap once stale items outnumber the live ones; the turns move what is live into it."""
        state = self.state
        bound = 2 * len(state.live) + 64
        if state.old and not state.behind:
            del state.old[-DROPPED_AT_ONCE:]
        elif not state.old and len(state.heap) > bound:
            state.old, state.heap, state.behind = state.heap, [], len(state.live)
            state.number += 1
        if len(state.turns) > bound:
            state.turns = deque((row, entry.first) for row, entry in state.live.items())
