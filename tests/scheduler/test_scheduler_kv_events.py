"""KV events: net changes, in an order a subscriber can follow."""

from __future__ import annotations

import pytest
from scheduler_rig import build, prompt

from tokenspeed.plane.results import AllBlocksCleared, BlockRemoved, BlockStored
from tokenspeed.scheduler.kv_log import NetKvLog

A, B, C = b"a", b"b", b"c"
TOKENS = (1).to_bytes(4, "little") + (2).to_bytes(4, "little")


def log() -> NetKvLog:
    return NetKvLog(block_tokens=2)


@pytest.mark.contract("KM-2")
def test_a_block_removed_and_stored_again_between_two_drains_leaves_no_event() -> None:
    changes = log()
    changes.removed(A)
    changes.stored(A, None, TOKENS)
    assert changes.drain() == ()
    changes.stored(B, None, TOKENS)
    changes.removed(B)
    assert changes.drain() == ()


def test_following_blocks_are_one_event_with_the_parent_of_the_first() -> None:
    changes = log()
    changes.stored(A, None, TOKENS)
    changes.stored(B, A, TOKENS)
    changes.stored(C, A, TOKENS)
    assert changes.drain() == (
        BlockStored(hashes=(A, B), parent=None, token_ids=(1, 2, 1, 2), block_tokens=2),
        BlockStored(hashes=(C,), parent=A, token_ids=(1, 2), block_tokens=2),
    )


@pytest.mark.contract("KM-2")
def test_a_block_that_an_equal_one_replaces_is_told_before_what_extends_it() -> None:
    changes = log()
    changes.stored(A, None, TOKENS)
    changes.stored(B, A, TOKENS)
    changes.removed(A)
    changes.stored(A, None, TOKENS)
    (told,) = changes.drain()
    assert told == BlockStored(hashes=(A, B), parent=None, token_ids=(1, 2, 1, 2), block_tokens=2)
    changes.removed(A)
    changes.stored(A, None, TOKENS)
    assert changes.drain() == ()


def test_clearing_is_one_event_and_voids_what_was_said_before() -> None:
    changes = log()
    changes.stored(A, None, TOKENS)
    changes.cleared()
    changes.cleared()
    changes.stored(B, None, TOKENS)
    assert changes.drain() == (
        AllBlocksCleared(),
        BlockStored(hashes=(B,), parent=None, token_ids=(1, 2), block_tokens=2),
    )
    assert changes.drain() == ()


@pytest.mark.contract("SP-15")
def test_a_second_drain_in_a_row_is_empty() -> None:
    rig = build(page_tokens=4, chunk_tokens=64)
    rig.new(prompt(12), max_new=2)
    plan = rig.scheduler.next_execution_plan()
    rig._apply(plan)
    batch, tokens, _ = rig.queue.popleft()
    rig.scheduler.advance([rig._commit(batch, tokens)])
    (event,) = rig.scheduler.drain_kv_events()
    assert isinstance(event, BlockStored)
    assert event.token_ids == tuple(prompt(12))
    assert rig.scheduler.drain_kv_events() == ()


@pytest.mark.contract("SP-50")
def test_changes_accumulate_over_many_calls_until_they_are_drained() -> None:
    drained, late = build(page_tokens=4, chunk_tokens=8), build(page_tokens=4, chunk_tokens=8)
    for rig in (drained, late):
        rig.new(prompt(16), max_new=8)
    for _ in range(6):
        drained.round()
        plan = late.plan()
        batch, tokens, _ = late.queue.popleft()
        assert plan.batch is batch
        late.scheduler.advance([late._commit(batch, tokens)])
    told = [name for event in drained.events for name in event.hashes]
    (event,) = late.scheduler.drain_kv_events()
    assert event.hashes == tuple(told)
    assert len(told) == 5


def test_a_block_is_told_removed_before_its_page_is_used_again() -> None:
    rig = build(page_tokens=4, chunk_tokens=64, num_pages=6, max_num_seqs=1)
    rig.new(prompt(12, seed=1), max_new=1)
    rig.run()
    rig.events.clear()
    rig.new(prompt(16, seed=2), max_new=1)
    rig.plan()
    (removed,) = rig.scheduler.drain_kv_events()
    assert isinstance(removed, BlockRemoved)
    assert len(removed.hashes) == 2


def test_no_events_are_collected_when_nobody_wants_them() -> None:
    rig = build(kv_events=False)
    rig.new(prompt(20), max_new=4)
    rig.run()
    assert rig.events == []
    assert len(rig.scheduler.snapshot().index) == 5


@pytest.mark.contract("SP-14")
def test_asking_whether_the_cache_can_be_cleared_changes_nothing() -> None:
    rig = build()
    rig.new(prompt(9), max_new=3)
    assert rig.scheduler.can_clear_cache()  # waiting requests hold no pages
    rig.round()
    before = rig.scheduler.snapshot()
    assert [rig.scheduler.can_clear_cache() for _ in range(100)] == [False] * 100
    after = rig.scheduler.snapshot()
    assert (after.states, after.tables, after.references) == (before.states, before.tables, before.references)
    assert (after.index, after.idle, after.empty) == (before.index, before.idle, before.empty)
    assert not rig.scheduler.clear_cache()


def test_a_queue_of_waiting_requests_does_not_block_a_clear() -> None:
    rig = build(page_tokens=4)
    rig.new(prompt(16), max_new=1)
    rig.run()
    assert rig.scheduler.snapshot().index
    rig.permit(forward=False)
    rig.new(prompt(16), max_new=1)
    rig.round()
    rig.events.clear()
    assert rig.scheduler.clear_cache()
    assert rig.scheduler.drain_kv_events() == (AllBlocksCleared(),)
    rig.mirror.clear()
    rig.permit(forward=True)
    rig.run()
    assert rig.table.schedule.cached[rig.requests[-1].row] == 0
    rig.check_tokens()
