"""A request's life as a finite-state machine, and who is in which state.

The table below is the whole of it. A state owns what `OWNS` says; the machine changes the state and
nothing else: whoever sends an event has taken or given back what the two states differ in.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.results import Sizes
from tokenspeed.plane.table import RequestTable


class State(enum.IntEnum):
    """Values of the table's ``schedule.state`` column. FREE: the scheduler does not hold the row."""

    FREE = 0
    WAITING = 1
    PREFILLING = 2
    DECODING = 3
    DRAINING = 4
    YIELDING = 5
    FINISHING = 6
    ENDED = 7
    IMAGING = 8
    SUSPENDED = 9
    RESTORING = 10
    DISCARDING = 11
    PREPARING = 12
    REMOTE_RECEIVE = 13
    PREFILL_DONE = 14
    HANDOFF = 15
    FENCED = 16


class Event(enum.Enum):
    """What happens to a request.

    SUBMIT: taken. ADMIT: seated, with pages. PROMPT_PLANNED: the last chunk is planned, decodes follow.
    LAST_PLANNED: no forward is left to plan. YIELD: chosen as a victim with forwards in flight.
    RETRACT: pages and seat taken back, nothing in flight. END: finished or aborted, nothing in flight.
    END_IN_FLIGHT: the same with forwards in flight. LANDED: the last of those landed. DROP: forgotten.
    STAY: somebody else gave way instead. SUSPEND: retracted, with an image under way. STORED: the image is
    there. RESTORE: seated, with the image on its way to the device. RESTORED: it has arrived.
    PREPARE: taken, and looked up in storage first. PREPARED: it may be admitted. RECEIVE: its KV comes from
    another node. RECEIVED: it is here. PREFILL_DONE: the last chunk is planned, another node decodes.
    HAND_OFF: its KV goes there. TRANSFERRED: that has provably stopped.
    """

    SUBMIT = "submit"
    ADMIT = "admit"
    PROMPT_PLANNED = "prompt planned"
    LAST_PLANNED = "last planned"
    YIELD = "yield"
    RETRACT = "retract"
    END = "end"
    END_IN_FLIGHT = "end in flight"
    LANDED = "landed"
    DROP = "drop"
    STAY = "stay"
    SUSPEND = "suspend"
    STORED = "stored"
    RESTORE = "restore"
    RESTORED = "restored"
    PREPARE = "prepare"
    PREPARED = "prepared"
    RECEIVE = "receive"
    RECEIVED = "received"
    PREFILL_DONE = "prefill done"
    HAND_OFF = "hand off"
    TRANSFERRED = "transferred"


class Owned(enum.Flag):
    """What a state holds: a place in the waiting queue, a device slot, blocks of the pool, a retraction image,
    a storage transaction, a transfer that reads or writes the blocks."""

    NOTHING = 0
    PLACE = enum.auto()
    SLOT = enum.auto()
    PAGES = enum.auto()
    IMAGE = enum.auto()
    TRANSACTION = enum.auto()
    TRANSFER = enum.auto()


_ENDS: Mapping[Event, State] = {Event.END: State.ENDED, Event.END_IN_FLIGHT: State.FINISHING}
_IN_TRANSFER: Mapping[Event, State] = {Event.TRANSFERRED: State.ENDED, Event.END: State.FENCED}
_RETRACTED: Mapping[Event, State] = {Event.RETRACT: State.WAITING, Event.SUSPEND: State.IMAGING}
_RESIDENT: Mapping[Event, State] = {**_ENDS, **_RETRACTED, Event.YIELD: State.YIELDING}

TRANSITIONS: Mapping[State, Mapping[Event, State]] = MappingProxyType(
    {
        State.FREE: {Event.SUBMIT: State.WAITING, Event.PREPARE: State.PREPARING},
        State.PREPARING: {Event.PREPARED: State.WAITING, Event.END: State.ENDED},
        State.WAITING: {Event.ADMIT: State.PREFILLING, Event.END: State.ENDED},
        State.PREFILLING: {
            Event.PROMPT_PLANNED: State.DECODING,
            Event.LAST_PLANNED: State.DRAINING,
            Event.PREFILL_DONE: State.PREFILL_DONE,
            Event.RECEIVE: State.REMOTE_RECEIVE,
            **_RESIDENT,
        },
        # The transfer reads or writes the pages until it has stopped, whatever happens to the request.
        State.REMOTE_RECEIVE: {Event.RECEIVED: State.PREFILLING, **_IN_TRANSFER},
        State.PREFILL_DONE: {Event.HAND_OFF: State.HANDOFF, **_ENDS},
        State.HANDOFF: _IN_TRANSFER,
        State.FENCED: _IN_TRANSFER,
        State.DECODING: {Event.LAST_PLANNED: State.DRAINING, **_RESIDENT},
        State.DRAINING: _ENDS,
        State.YIELDING: {Event.STAY: State.DECODING, **_RETRACTED, **_ENDS},
        State.IMAGING: {Event.STORED: State.SUSPENDED, Event.END: State.ENDED},
        State.SUSPENDED: {Event.RESTORE: State.RESTORING, Event.END: State.ENDED},
        # The restore writes the slot and the pages until it is acknowledged, whatever happens to the request.
        State.RESTORING: {Event.RESTORED: State.PREFILLING, Event.END: State.DISCARDING},
        State.DISCARDING: {Event.RESTORED: State.ENDED, Event.END: State.DISCARDING},
        # An end may be told twice: by an abort and by the result that was under way.
        State.FINISHING: {Event.LANDED: State.ENDED, Event.END_IN_FLIGHT: State.FINISHING},
        # A slot is kept to the drop: until then the device's release of it may still be queued.
        State.ENDED: {Event.DROP: State.FREE, Event.END: State.ENDED},
    }
)

_AT_REST = (State.FREE, State.WAITING, State.DECODING)
_LEAVING = (State.FINISHING, State.ENDED, State.DISCARDING, State.HANDOFF, State.FENCED)

OWNS: Mapping[State, Owned] = MappingProxyType(
    {
        State.FREE: Owned.NOTHING,
        State.PREPARING: Owned.TRANSACTION,
        State.WAITING: Owned.PLACE,
        State.PREFILLING: Owned.SLOT | Owned.PAGES,
        State.DECODING: Owned.SLOT | Owned.PAGES,
        State.DRAINING: Owned.SLOT | Owned.PAGES,
        State.YIELDING: Owned.SLOT | Owned.PAGES,
        State.FINISHING: Owned.SLOT | Owned.PAGES,
        State.REMOTE_RECEIVE: Owned.SLOT | Owned.PAGES | Owned.TRANSFER,
        State.PREFILL_DONE: Owned.SLOT | Owned.PAGES,
        State.HANDOFF: Owned.SLOT | Owned.PAGES | Owned.TRANSFER,
        State.FENCED: Owned.SLOT | Owned.PAGES | Owned.TRANSFER,
        State.IMAGING: Owned.IMAGE,
        State.SUSPENDED: Owned.IMAGE,
        State.RESTORING: Owned.SLOT | Owned.PAGES | Owned.IMAGE,
        State.DISCARDING: Owned.SLOT | Owned.PAGES | Owned.IMAGE,
        State.ENDED: Owned.SLOT,  # or nothing, if it ended while it was waiting
    }
)


def _no_members() -> dict[State, dict[int, None]]:
    return {state: {} for state in State if state is not State.FREE}


@attrs.define(eq=False)
class LifeState:
    """Writer: Life.

    ``members``: rows by state, in the order they entered it; ``passing``: rows in a state that they
    leave by themselves; ``sizes``: None after a move.
    """

    members: dict[State, dict[int, None]] = attrs.field(factory=_no_members)
    passing: int = 0
    decoding_epoch: int = 0
    sizes: Sizes | None = None


@attrs.frozen(kw_only=True, eq=False)
class Life:
    """Writes ``schedule.state``; steady decoding never calls it."""

    table: RequestTable
    state: LifeState = attrs.field(factory=LifeState)

    def move(self, row: int, event: Event) -> None:
        """Raises: InvariantBroken: the row's state does not know this event."""
        column = self.table.schedule.state
        old = State(int(column[row]))
        new = TRANSITIONS[old].get(event)
        if new is None:
            rid = self.table.identity.rid[row]
            raise InvariantBroken("illegal event for a request", rid=rid, row=row, state=old.name, event=event.value)
        if new is old:
            return
        column[row] = new
        self.state.sizes = None
        self.state.passing += (old in _AT_REST) - (new in _AT_REST)
        members = self.state.members
        if old is not State.FREE:
            del members[old][row]
        if new is not State.FREE:
            members[new][row] = None
        if State.DECODING in (old, new):
            self.state.decoding_epoch += 1

    def of(self, row: int) -> State:
        return State(int(self.table.schedule.state[row]))

    def holds(self, row: int) -> bool:
        return 0 <= row < self.table.capacity and self.table.schedule.state[row] != State.FREE

    def flying(self, row: int) -> bool:
        """Whether a forward with the row has not landed: computed tokens are behind the scheduled ones.

        (In a transfer they are, too, but no forward runs.)
        """
        schedule = self.table.schedule
        return bool(schedule.landed[row] < schedule.scheduled[row]) and Owned.TRANSFER not in OWNS[self.of(row)]

    def rows(self, state: State) -> tuple[int, ...]:
        """In the order they entered `state`."""
        return tuple(self.state.members[state])

    def count(self, state: State) -> int:
        return len(self.state.members[state])

    @property
    def passing(self) -> int:
        """Rows in other states than WAITING and DECODING; while there are none, nothing else need be counted."""
        return self.state.passing

    @property
    def decoding_epoch(self) -> int:
        """Changes whenever a row enters or leaves DECODING."""
        return self.state.decoding_epoch

    def sizes(self) -> Sizes:
        """The same object until a request moves: rounds ask twice, and compare."""
        if self.state.sizes is None:
            self.state.sizes = self._counted()
        return self.state.sizes

    def _counted(self) -> Sizes:
        count = self.count
        return Sizes(
            waiting=count(State.WAITING) + count(State.PREPARING),
            prefilling=count(State.PREFILLING) + count(State.REMOTE_RECEIVE) + count(State.PREFILL_DONE),
            decoding=count(State.DECODING) + count(State.DRAINING) + count(State.YIELDING),
            suspended=count(State.IMAGING) + count(State.SUSPENDED) + count(State.RESTORING),
            finishing=sum(map(count, _LEAVING)),
        )
