"""The state machine of a request's life."""

from __future__ import annotations

import itertools

import pytest
from scheduler_rig import build, prompt

from tokenspeed.errors import InvariantBroken, SettingsError
from tokenspeed.plane.plan import Sampling, int32
from tokenspeed.plane.table import request_table
from tokenspeed.scheduler.build import build_scheduler
from tokenspeed.scheduler.config import Retraction, SchedulerConfig
from tokenspeed.scheduler.policy import Fcfs
from tokenspeed.scheduler.states import OWNS, TRANSITIONS, Event, Life, Owned, State

PATHS = {
    State.FREE: (),
    State.WAITING: (Event.SUBMIT,),
    State.PREFILLING: (Event.SUBMIT, Event.ADMIT),
    State.DECODING: (Event.SUBMIT, Event.ADMIT, Event.PROMPT_PLANNED),
    State.DRAINING: (Event.SUBMIT, Event.ADMIT, Event.LAST_PLANNED),
    State.YIELDING: (Event.SUBMIT, Event.ADMIT, Event.PROMPT_PLANNED, Event.YIELD),
    State.FINISHING: (Event.SUBMIT, Event.ADMIT, Event.END_IN_FLIGHT),
    State.ENDED: (Event.SUBMIT, Event.END),
    State.PREPARING: (Event.PREPARE,),
    State.REMOTE_RECEIVE: (Event.SUBMIT, Event.ADMIT, Event.RECEIVE),
    State.PREFILL_DONE: (Event.SUBMIT, Event.ADMIT, Event.PREFILL_DONE),
    State.HANDOFF: (Event.SUBMIT, Event.ADMIT, Event.PREFILL_DONE, Event.HAND_OFF),
    State.FENCED: (Event.SUBMIT, Event.ADMIT, Event.RECEIVE, Event.END),
    State.IMAGING: (Event.SUBMIT, Event.ADMIT, Event.SUSPEND),
    State.SUSPENDED: (Event.SUBMIT, Event.ADMIT, Event.SUSPEND, Event.STORED),
    State.RESTORING: (Event.SUBMIT, Event.ADMIT, Event.SUSPEND, Event.STORED, Event.RESTORE),
    State.DISCARDING: (Event.SUBMIT, Event.ADMIT, Event.SUSPEND, Event.STORED, Event.RESTORE, Event.END),
}


def life_in(state: State) -> tuple[Life, int]:
    table = request_table(slots=1, max_len=8)
    row = table.add(rid="req-7", tokens=int32([1]), max_new=1, sampling=Sampling())
    life = Life(table=table)
    for event in PATHS[state]:
        life.move(row, event)
    return life, row


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)), ids=lambda value: value.name)
def test_an_event_moves_a_request_as_the_table_says_or_breaks_an_invariant_that_names_it(
    state: State, event: Event
) -> None:
    life, row = life_in(state)
    assert life.of(row) is state
    if (after := TRANSITIONS[state].get(event)) is not None:
        life.move(row, event)
        assert life.of(row) is after
        return
    with pytest.raises(InvariantBroken) as broken:
        life.move(row, event)
    assert broken.value.facts == {"rid": "req-7", "row": row, "state": state.name, "event": event.value}
    assert life.of(row) is state


def test_every_state_is_reached_and_every_state_but_free_has_a_way_out() -> None:
    reached = {after for events in TRANSITIONS.values() for after in events.values()}
    assert reached == set(State)
    assert set(OWNS) == set(TRANSITIONS) == set(State)
    for state in State:
        assert any(after is not state for after in TRANSITIONS[state].values())


def test_only_a_submission_creates_a_place_and_only_pages_outlive_a_forward() -> None:
    into_waiting = {
        (state, event)
        for state, events in TRANSITIONS.items()
        for event, after in events.items()
        if after is State.WAITING
    }
    assert {event for _, event in into_waiting} == {Event.SUBMIT, Event.PREPARED, Event.RETRACT}
    assert Owned.PAGES in OWNS[State.FINISHING]
    assert Owned.PAGES not in OWNS[State.ENDED]


@pytest.mark.contract("SP-9")
def test_sizes_count_each_request_in_exactly_one_state() -> None:
    rig = build(max_num_seqs=2, overlap_schedule_depth=1)
    for seed in range(4):
        rig.new(prompt(20, seed=seed), max_new=3)
    assert rig.scheduler.sizes().waiting == 4
    rig.plan()
    sizes = rig.scheduler.sizes()
    assert (sizes.waiting, sizes.prefilling, sizes.decoding) == (2, 2, 0)
    rig.plan()
    sizes = rig.scheduler.sizes()
    assert (sizes.prefilling, sizes.decoding, sizes.running) == (0, 2, 2)
    rig.abort(rig.requests[0], rig.requests[2])
    sizes = rig.scheduler.sizes()
    assert (sizes.waiting, sizes.decoding, sizes.finishing) == (1, 1, 2)
    assert sizes.held == 4
    rig.run()
    assert rig.scheduler.sizes().held == 0


def test_a_configuration_that_cannot_work_is_refused_with_all_its_faults() -> None:
    with pytest.raises(SettingsError) as fault:
        SchedulerConfig(
            max_num_seqs=0,
            max_batched_tokens=1,
            chunk_tokens=0,
            page_tokens=1,
            num_pages=1,
            max_model_len=8,
            overlap_schedule_depth=1,
            retraction=(Retraction.SNAPSHOT,),
        )
    lines = str(fault.value).splitlines()
    assert len(lines) == 5
    assert "scheduler: max_num_seqs is 0, must be at least 1" in lines
    assert "scheduler: page_tokens is 1, must be at least 2" in lines


def test_a_table_that_is_too_small_for_the_configuration_is_refused() -> None:
    settings = SchedulerConfig(
        max_num_seqs=4, max_batched_tokens=4, chunk_tokens=4, page_tokens=4, num_pages=8, max_model_len=64
    )
    with pytest.raises(SettingsError, match="2 slots of 64 tokens, needed are 4 of 64"):
        build_scheduler(settings, request_table(slots=2, max_len=64), Fcfs())
