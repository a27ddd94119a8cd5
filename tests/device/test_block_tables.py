"""Block tables by cache group: what a batch gets of them, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from device_doubles import NO_LOGPROBS, batch, seat

from tokenspeed.device.executors.prepare import prepare
from tokenspeed.device.executors.slots import SlotState, slot_state
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import BlockGrants, ForwardBatch, int32
from tokenspeed.plane.specs import CacheGroupSpec

PARENTS, MAX_LEN = 20, 64
GROUPS = (
    CacheGroupSpec(name="full", block_tokens=4, blocks_per_parent=2),
    CacheGroupSpec(name="window", kind="window", block_tokens=8, window_tokens=10, blocks_per_parent=4),
    CacheGroupSpec(name="state", kind="state", block_tokens=16, zero_new_blocks=True),
)


def grants(group: int, *entries: tuple[int, int, int]) -> BlockGrants:
    """Of (slot, index, block)."""
    slots, indices, blocks = zip(*entries, strict=True)
    return BlockGrants(group=group, slots=int32(slots), indices=int32(indices), blocks=int32(blocks))


def seated() -> SlotState:
    """Slot 1 with blocks of every group for 24 tokens."""
    state = slot_state(slots=3, max_model_len=MAX_LEN, num_pages=PARENTS, groups=GROUPS)
    state.seat(seat(1))
    state.grant(grants(0, *((1, i, 2 + i) for i in range(6))))
    state.grant(grants(1, *((1, i, 16 + i) for i in range(3))))
    state.grant(grants(2, (1, 0, 9)))
    return state


def tables(state: SlotState, work: ForwardBatch) -> list[list[list[int]]]:
    made = prepare(work, NO_LOGPROBS, state)
    return [table.tolist() for table in (made.tables, *made.more_tables)]


def test_a_batch_gets_the_table_of_every_group() -> None:
    full, window, state = tables(seated(), batch((1, 0, [5] * 9)))
    assert full == [[2, 3, 4]]
    assert window == [[16, 17]]
    assert state == [[9]]


@pytest.mark.parametrize(
    ("start", "seen"),
    [(8, [16, 17]), (9, [16, 17]), (16, [16, 17, 18]), (17, [0, 17, 18]), (23, [0, 17, 18])],
)
def test_a_window_groups_table_has_what_a_query_of_the_batch_sees_and_0_behind(start: int, seen: list[int]) -> None:
    # The window is 10 tokens: the query at `start` sees from start - 9 on.
    _, window, _ = tables(seated(), batch((1, start, [5])))
    assert window == [seen]


def test_blocks_behind_the_window_need_not_be_there_and_those_in_it_must() -> None:
    state = seated()
    state.grant(grants(1, (1, 0, 7)))  # stale by now: whatever is there is not looked at
    state.tables[1].entries[1, 0] = 0
    _, window, _ = tables(state, batch((1, 17, [5])))
    assert window == [[0, 17, 18]]
    with pytest.raises(InvariantBroken, match="without blocks"):
        tables(state, batch((1, 16, [5])))


def test_a_chunk_sees_from_the_window_of_its_first_query_on() -> None:
    state = seated()
    state.grant(grants(1, (1, 3, 19)))
    state.grant(grants(0, (1, 6, 8), (1, 7, 10)))
    _, window, _ = tables(state, batch((1, 16, [5] * 16)))
    assert window == [[16, 17, 18, 19]]
    _, window, _ = tables(state, batch((1, 17, [5] * 15)))
    assert window == [[0, 17, 18, 19]]


def test_a_row_without_a_state_is_refused() -> None:
    state = seated()
    state.seat(seat(2))
    state.grant(grants(0, (2, 0, 12)))
    state.grant(grants(1, (2, 0, 24)))
    with pytest.raises(InvariantBroken, match="without a state"):
        tables(state, batch((1, 0, [5]), (2, 0, [5])))


def test_a_new_owner_starts_with_no_block_of_any_group() -> None:
    state = seated()
    state.seat(seat(1, row=7))
    assert all(not table.entries[1].any() for table in state.tables)


@pytest.mark.contract("SP-52")
@pytest.mark.parametrize("group", [0, 1, 2])
def test_the_null_parents_blocks_and_blocks_outside_are_never_granted(group: int) -> None:
    state, count = seated(), GROUPS[group].blocks_per_parent
    for block in (-1, 0, count - 1, count * PARENTS):
        with pytest.raises(InvariantBroken, match="outside the pool"):
            state.grant(grants(group, (1, 0, block)))
    state.grant(grants(group, (1, 0, count)))
    state.grant(grants(group, (1, 0, count * PARENTS - 1)))
    with pytest.raises(InvariantBroken, match="cache group"):
        state.grant(grants(3, (1, 0, 5)))


def test_a_forward_in_flight_keeps_its_tables_when_blocks_change_hands() -> None:
    state = seated()
    made = prepare(batch((1, 0, [5] * 9)), NO_LOGPROBS, state)
    state.grant(grants(2, (1, 0, 11)))
    state.seat(seat(1, row=7))
    assert [table.tolist() for table in (made.tables, *made.more_tables)] == [[[2, 3, 4]], [[16, 17]], [[9]]]
    assert all(table.dtype == np.int32 for table in (made.tables, *made.more_tables))
