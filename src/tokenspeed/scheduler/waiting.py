"""The waiting queue: retracted requests first, then the rest in the policy's order.

Nothing here costs more with more requests waiting, but for the logarithm of a heap: ages, and what the
prefix cache has of a prompt, are brought up to date for a fixed number of requests a round, in turn.
The length is bounded by ingress, which refuses requests beyond its limit.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from typing import Protocol, TypeAlias

import attrs

from tokenspeed.plane.ports import SchedulingPolicy
from tokenspeed.plane.table import RequestTable

REFRESHED_PER_ROUND = 8
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


@attrs.frozen
class Entry:
    """A request in the heap: `serial` names its valid heap item, `first` its stay in the queue."""

    serial: int
    first: int
    since_round: int
    key: Key


@attrs.define(eq=False)
class QueueState:
    """Writer: WaitingQueue.

    ``heap`` items are (key, order, serial, row); one whose serial is not the live entry's is stale.
    ``turns``: (row, first) in the order in which ages are brought up to date.
    ``returned``: (round of retraction, stamp of admission, row), sorted.
    """

    heap: list[tuple[Key, int, int, int]] = attrs.field(factory=list[tuple[Key, int, int, int]])
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
        state = self.state
        state.serial += 1
        key = self._key(row, waited=0)
        state.live[row] = Entry(state.serial, state.serial, round_id, key)
        state.turns.append((row, state.serial))
        self._push(row, key, state.serial)

    def give_back(self, row: int, *, round_id: int, stamp: int) -> None:
        """A retracted request: ahead of all that never ran; the earlier retracted first, then the elder (H12)."""
        insort(self.state.returned, (round_id, stamp, row))

    def head(self) -> int | None:
        """The request to admit next."""
        state = self.state
        if state.returned:
            return state.returned[0][2]
        while state.heap:
            _, _, serial, row = state.heap[0]
            entry = state.live.get(row)
            if entry is not None and entry.serial == serial:
                return row
            heapq.heappop(state.heap)
        return None

    def remove(self, row: int) -> None:
        if self.state.live.pop(row, None) is None:
            self.state.returned[:] = [item for item in self.state.returned if item[2] != row]
        self._compact()

    def refresh(self, *, round_id: int) -> None:
        """Bring the keys of the next few requests up to date."""
        state = self.state
        for _ in range(min(REFRESHED_PER_ROUND, len(state.turns))):
            row, first = state.turns.popleft()
            entry = state.live.get(row)
            if entry is None or entry.first != first:
                continue
            state.turns.append((row, first))
            key = self._key(row, waited=round_id - entry.since_round)
            if key != entry.key:
                state.serial += 1
                state.live[row] = Entry(state.serial, first, entry.since_round, key)
                self._push(row, key, state.serial)
        self._compact()

    def _key(self, row: int, *, waited: int) -> Key:
        identity = self.table.identity
        return self.policy.key(
            order=int(identity.order[row]),
            priority=int(identity.priority[row]),
            prompt_len=int(identity.prompt_len[row]),
            waited_rounds=waited,
            cached_tokens=self.cached.cached_tokens(row) if self.policy.wants_cached_tokens else 0,
        )

    def _push(self, row: int, key: Key, serial: int) -> None:
        heapq.heappush(self.state.heap, (key, int(self.table.identity.order[row]), serial, row))

    def _compact(self) -> None:
        """Drop stale items once they outnumber the live ones; constant work a change, on average."""
        state = self.state
        bound = 2 * len(state.live) + 64
        if len(state.heap) > bound:
            order = self.table.identity.order
            state.heap = [(entry.key, int(order[row]), entry.serial, row) for row, entry in state.live.items()]
            heapq.heapify(state.heap)
        if len(state.turns) > bound:
            state.turns = deque((row, entry.first) for row, entry in state.live.items())
