"""The ends of requests: pages return when nothing is in flight, the row is dropped by the next plan."""

from __future__ import annotations

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.table import NO_SLOT, RequestTable
from tokenspeed.scheduler.draft import PlanDraft
from tokenspeed.scheduler.host.images import Images
from tokenspeed.scheduler.kept_states import KeptStates
from tokenspeed.scheduler.prefix import PrefixCache
from tokenspeed.scheduler.residents import Residents
from tokenspeed.scheduler.seniority import Seniority
from tokenspeed.scheduler.states import OWNS, Event, Life, Owned, State
from tokenspeed.scheduler.storage import Storage
from tokenspeed.scheduler.waiting import WaitingQueue


@attrs.frozen(kw_only=True, eq=False)
class Exits:
    table: RequestTable
    life: Life
    cache: PrefixCache
    residents: Residents
    waiting: WaitingQueue
    seniority: Seniority
    states: KeptStates
    images: Images
    storage: Storage

    def end(self, row: int) -> None:
        """`row` is to be planned no more: it finished or was aborted. May be told twice."""
        if self.life.flying(row):
            self.life.move(row, Event.END_IN_FLIGHT)
            return
        state = self.life.of(row)
        owned = OWNS[state]
        if Owned.TRANSACTION in owned:
            self.storage.abort(row)
            return
        self.life.move(row, Event.END)
        if Owned.TRANSFER in owned or state in (State.RESTORING, State.DISCARDING):
            return
        if Owned.IMAGE in owned:
            self.images.discard(row)
        if Owned.PLACE in owned:
            self.waiting.remove(row)
            self.storage.admitted(row)
        self._let_go(row, owned)

    def landed(self) -> None:
        """Take the pages of ended requests whose last forward has landed (SP-54)."""
        for row in self.life.rows(State.FINISHING):
            if not self.life.flying(row):
                self._let_go(row, OWNS[State.FINISHING])
                self.life.move(row, Event.LANDED)

    def restored(self, row: int) -> None:
        """The image of `row` is on the device: it goes on, or, if it was aborted, its pages return."""
        state = self.life.of(row)
        self.life.move(row, Event.RESTORED)
        if state is State.DISCARDING:
            self._let_go(row, OWNS[state])

    def transferred(self, row: int) -> None:
        """The transfer that read or wrote the row's pages has provably stopped, and the request is over."""
        schedule = self.table.schedule
        schedule.scheduled[row] = schedule.landed[row]
        self._let_go(row, OWNS[self.life.of(row)])
        self.life.move(row, Event.TRANSFERRED)

    def check_drained(self) -> None:
        """Raises: InvariantBroken: a request's last token came and nobody ended it; it would stay for ever."""
        for row in self.life.rows(State.DRAINING):
            if not self.life.flying(row):
                raise InvariantBroken("a request produced its last token and was not finished", row=row)

    def drop_all(self, draft: PlanDraft) -> None:
        for row in self.life.rows(State.ENDED):
            self.drop(row, draft)

    def drop(self, row: int, draft: PlanDraft) -> None:
        """Forget an ended request; its slot may be seated again by this very plan."""
        slot = int(self.table.schedule.slot[row])
        if slot != NO_SLOT:
            self.residents.leave(slot)
        self.seniority.forget(row)
        self.life.move(row, Event.DROP)
        draft.retired.append(row)

    def _let_go(self, row: int, owned: Owned) -> None:
        if Owned.PAGES in owned:
            slot = int(self.table.schedule.slot[row])
            self.states.vacated(slot)
            self.residents.release_pages(slot)
        self.cache.forget(row)
