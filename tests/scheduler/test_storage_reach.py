"""Which blocks of a prompt are looked for in storage and fetched, over full, window and state groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.scheduler.groups import Group, Kind, groups_of
from tokenspeed.scheduler.storage_reach import StorageReach, StoredBlock

PAGE = 4
CHAIN = [bytes([at]) for at in range(41)]


def reach_of(*specs: CacheGroupSpec) -> StorageReach:
    groups = groups_of(specs, page_tokens=PAGE, chunk_tokens=16, ahead_tokens=0, flights=1)
    return StorageReach(page_tokens=PAGE, groups=groups)


FULL = CacheGroupSpec(block_tokens=4)
WIDE = CacheGroupSpec(name="wide", block_tokens=16)
WINDOW = CacheGroupSpec(name="window", kind="window", block_tokens=4, window_tokens=9)
STATE = CacheGroupSpec(name="state", kind="state", block_tokens=8)
SHAPES = [(FULL,), (FULL, WIDE), (FULL, WINDOW), (FULL, STATE), (WINDOW,), (WIDE, WINDOW, STATE)]


def holder(blocks: Iterable[tuple[int, int]]) -> Callable[[int, bytes], bool]:
    """Of (group, pages of the prefix)."""
    known = {(group, CHAIN[end]) for group, end in blocks}
    return lambda group, name: (group, name) in known


def ends(blocks: Iterable[StoredBlock]) -> list[tuple[int, int]]:
    return [(block.group, block.name[0]) for block in blocks]


def nothing(group: int, name: bytes) -> bool:
    del group, name
    return False


def test_a_full_group_asks_for_what_lies_behind_the_known_prefix() -> None:
    reach = reach_of(FULL)
    assert ends(reach.lacking(CHAIN, 5, nothing)) == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]
    assert ends(reach.lacking(CHAIN, 5, holder([(0, 1), (0, 2), (0, 4)]))) == [(0, 3), (0, 5)]
    assert reach.lacking(CHAIN, 3, holder([(0, 1), (0, 2), (0, 3)])) == []
    assert reach.lacking(CHAIN, 0, nothing) == []


def test_hits_are_fetched_up_to_the_first_gap() -> None:
    reach = reach_of(FULL)
    held = holder([(0, 1), (0, 4)])
    stored = frozenset(StoredBlock(0, CHAIN[at]) for at in (2, 3, 6))
    assert ends(reach.chosen(CHAIN, 6, held, stored)) == [(0, 2), (0, 3)]
    assert reach.chosen(CHAIN, 6, nothing, stored) == []


def test_a_window_group_fetches_the_last_window_only_and_a_state_group_one_state() -> None:
    reach = reach_of(FULL, WINDOW)
    stored = frozenset(StoredBlock(group, CHAIN[at]) for group in (0, 1) for at in range(1, 7))
    # The query at position 24 sees the positions 16 .. 24.
    assert ends(reach.chosen(CHAIN, 6, nothing, stored)) == [*((0, at) for at in range(1, 7)), (1, 5), (1, 6)]
    stored -= {StoredBlock(1, CHAIN[5])}
    assert ends(reach.chosen(CHAIN, 6, nothing, stored)) == [*((0, at) for at in range(1, 5)), (1, 3), (1, 4)]
    reach = reach_of(FULL, STATE)
    stored = frozenset(
        [*(StoredBlock(0, CHAIN[at]) for at in range(1, 8)), *(StoredBlock(1, CHAIN[at]) for at in (2, 4))]
    )
    assert ends(reach.chosen(CHAIN, 7, nothing, stored)) == [*((0, at) for at in range(1, 5)), (1, 4)]


def needed(group: Group, end: int) -> set[int]:
    """By definition: ends of the blocks that a query at position ``end * PAGE`` needs."""
    if group.kind is Kind.STATE:
        return {end}
    first = 0 if group.kind is Kind.FULL else max(0, end * PAGE - group.window + 1)
    return {(position // group.block_tokens + 1) * group.stride for position in range(first, end * PAGE)}


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: "+".join(spec.kind + str(spec.block_tokens) for spec in shape)
)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_longest_prefix_is_the_one_that_the_definition_gives(
    shape: tuple[CacheGroupSpec, ...], data: st.DataObject
) -> None:
    reach = reach_of(*shape)
    pages = data.draw(st.integers(0, 20))
    every = [(group.number, end) for group in reach.groups for end in range(group.stride, pages + 1, group.stride)]
    places = st.lists(st.sampled_from(every), unique=True, max_size=len(every)) if every else st.just([])
    # Most of them are there, or few prefixes would be long.
    held = set(every) - set(data.draw(places))
    local = set(data.draw(places)) & held
    fits = [
        end
        for end in range(reach.step, pages + 1, reach.step)
        if all((group.number, at) in held for group in reach.groups for at in needed(group, end))
    ]
    best = max(fits, default=0)
    assert reach.reach(CHAIN, pages, holder(held)) == best
    known = reach.reach(CHAIN, pages, holder(local))
    asked = set(ends(reach.lacking(CHAIN, pages, holder(local))))
    assert not asked & local
    found = frozenset(StoredBlock(group, CHAIN[end]) for group, end in held & asked)
    chosen = set(ends(reach.chosen(CHAIN, pages, holder(local), found)))
    if best <= known:
        assert chosen == set()
    else:
        want = {(group.number, at) for group in reach.groups for at in needed(group, best)}
        assert chosen == want - local


def test_keys_tell_groups_apart() -> None:
    assert StoredBlock(0, b"x").key != StoredBlock(1, b"x").key
