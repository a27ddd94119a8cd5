"""Prompt chunks: what the decodes leave of the token budget goes to prompts, in order of admission."""

from __future__ import annotations

import attrs
import numpy as np

from tokenspeed.plane.table import RequestTable
from tokenspeed.scheduler.admission import Admission
from tokenspeed.scheduler.config import Role, SchedulerConfig
from tokenspeed.scheduler.draft import Chunk, PlanDraft
from tokenspeed.scheduler.kept_states import KeptStates
from tokenspeed.scheduler.residents import Residents
from tokenspeed.scheduler.states import Event, Life, State


@attrs.frozen(kw_only=True, eq=False)
class Prefill:
    config: SchedulerConfig
    table: RequestTable
    life: Life
    residents: Residents
    admission: Admission
    states: KeptStates

    def plan(self, draft: PlanDraft) -> None:
        """Chunks of seated prompts, then of newly admitted ones; at most one chunk a request."""
        budget = self.config.max_batched_tokens - len(draft.decodes.rows)
        if self.life.passing:
            for row in self.life.rows(State.PREFILLING):
                if not budget:
                    return
                budget -= self._chunk(row, budget, draft)
        while budget and not draft.pressed:
            admitted = self.admission.admit_next()
            if admitted is None:
                return
            draft.seated.append(admitted)
            budget -= self._chunk(admitted, budget, draft)

    def _chunk(self, row: int, budget: int, draft: PlanDraft) -> int:
        """Plan a chunk of at most `budget` tokens; returns its length, 0 if its blocks cannot be had now."""
        schedule, residents = self.table.schedule, self.residents.state
        slot, start = int(schedule.slot[row]), int(schedule.scheduled[row])
        goal, limit = int(residents.goal[slot]), int(residents.limit[slot])
        end = start + min(goal - start, self.config.chunk_tokens, budget)
        if end < goal:
            end = self.states.align(start, end)
        last = end == goal
        # The first decode may run ahead of this chunk's commit: its page is taken with the chunk's.
        tokens = min(end + self.config.ahead_tokens, limit) if last else end
        if not self.residents.extend(slot, tokens=tokens):
            draft.stuck.append(row)
            return 0
        self.states.before_forward(slot)
        self.states.planned(slot, end, prompt_ends=last)
        ids = np.array(self.table.tokens.seated[slot, start:end])
        draft.chunks.append(Chunk(row=row, slot=slot, start=start, samples=last, ids=ids))
        schedule.scheduled[row] = end
        if last:
            self.life.move(row, self._after_prompt(more=goal < limit))
        return end - start

    def _after_prompt(self, *, more: bool) -> Event:
        if self.config.role is Role.PREFILL:
            return Event.PREFILL_DONE
        return Event.PROMPT_PLANNED if more else Event.LAST_PLANNED
