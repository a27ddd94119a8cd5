"""The bound on sequences a frontend has in flight."""

from __future__ import annotations

import asyncio
import enum
from collections import deque

import attrs

from tokenspeed.errors import RequestError
from tokenspeed.plane.messages import EngineInfo


class WhenFull(enum.Enum):
    """What happens to a group of sequences that finds no room."""

    REFUSE = "refuse"
    WAIT = "wait"


@attrs.define(eq=False)
class GateState:
    """Writer: SequenceGate. `queue` holds the groups that wait, in order, with their size."""

    live: int = 0
    queue: deque[tuple[int, asyncio.Future[None]]] = attrs.field(factory=deque["tuple[int, asyncio.Future[None]]"])


@attrs.frozen(kw_only=True, eq=False)
class SequenceGate:
    """Lets a group of sequences in as a whole, or not at all. Loop thread only.

    A waiting group is a task of the caller's, so the caller bounds the queue.

    Attributes:
        limit: sequences in flight.
        group_limit: sequences of one group: it goes to one engine, which must be able to queue all of it.
    """

    limit: int
    group_limit: int
    when_full: WhenFull
    state: GateState = attrs.field(factory=GateState)

    @property
    def live(self) -> int:
        return self.state.live

    async def enter(self, count: int) -> None:
        """Take `count` places.

        Raises: RequestError: 400 if they could never fit, 429 if they do not fit now and the gate refuses.
        """
        if count > self.group_limit:
            raise RequestError(
                f"the request asks for {count} sequences (prompts times n); at most {self.group_limit} are possible",
                field="n",
            )
        state = self.state
        if not state.queue and state.live + count <= self.limit:
            state.live += count
            return
        if self.when_full is WhenFull.REFUSE:
            raise RequestError(
                f"{state.live} sequences are in flight and {count} more do not fit (limit {self.limit}); retry later",
                status=429,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (count, turn)
        state.queue.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # let in and cancelled at the same moment
                self.leave(count)
            elif entry in state.queue:
                state.queue.remove(entry)
                self._admit()
            raise

    def leave(self, count: int) -> None:
        self.state.live -= count
        self._admit()

    def _admit(self) -> None:
        state = self.state
        while state.queue and (state.queue[0][1].done() or state.live + state.queue[0][0] <= self.limit):
            count, turn = state.queue.popleft()
            if not turn.done():  # done here means cancelled; its task has yet to run
                state.live += count
                turn.set_result(None)


def refusing_gate(infos: tuple[EngineInfo, ...]) -> SequenceGate:
    """For a server: as many sequences as the engines run and queue; beyond that 429."""
    return SequenceGate(
        limit=sum(info.max_waiting + info.max_num_seqs for info in infos),
        group_limit=min(info.max_waiting for info in infos),
        when_full=WhenFull.REFUSE,
    )


def waiting_gate(infos: tuple[EngineInfo, ...]) -> SequenceGate:
    """For a program that hands over any number of prompts: never more than the engines would queue."""
    return SequenceGate(
        limit=sum(info.max_waiting for info in infos),
        group_limit=min(info.max_waiting for info in infos),
        when_full=WhenFull.WAIT,
    )
