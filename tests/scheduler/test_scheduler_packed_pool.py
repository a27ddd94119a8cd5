"""Blocks of several groups in common parents, against a model that counts everything anew each time."""

from __future__ import annotations

import copy
import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import int32
from tokenspeed.scheduler.packed import make_pool
from tokenspeed.scheduler.pool import Pool

Block = tuple[int, int]  # group, number


def gauges(pool: Pool) -> tuple[int, int, int]:
    return pool.active, pool.cached, pool.empty


def take(pool: Pool, group: int, count: int) -> list[int]:
    blocks, evicted = pool.take(group, count)
    assert not evicted
    return blocks.tolist()


@pytest.mark.contract("SP-51", "SP-53", "KM-16")
def test_four_small_blocks_share_one_parent_and_a_parent_serves_one_group() -> None:
    pool = make_pool(4, (1, 4))
    assert take(pool, 1, 4) == [4, 5, 6, 7]
    assert gauges(pool) == (1, 0, 2)
    assert take(pool, 0, 1) == [2]
    assert take(pool, 1, 1) == [12]
    assert gauges(pool) == (3, 0, 0)
    assert take(pool, 1, 3) == [13, 14, 15]
    with pytest.raises(InvariantBroken, match="more blocks taken"):
        pool.take(0, 1)


@pytest.mark.contract("SP-52")
def test_the_null_parent_is_never_granted_nor_counted() -> None:
    pool = make_pool(5, (2, 3))
    assert (pool.usable, pool.blocks_in(0), pool.blocks_in(1)) == (4, 10, 15)
    assert min(take(pool, 0, 4)) == 2
    assert min(take(pool, 1, 6)) == 9
    assert gauges(pool) == (4, 0, 0)


@pytest.mark.contract("SP-53")
def test_a_parent_with_one_active_block_is_active_whatever_else_it_holds() -> None:
    pool = make_pool(3, (2, 2))
    pair = take(pool, 0, 2)
    pool.mark_findable(0, pair)
    pool.release(0, int32(pair[:1]))
    assert gauges(pool) == (1, 0, 1)
    pool.release(0, int32(pair[1:]))
    assert gauges(pool) == (0, 1, 1)
    pool.share(0, int32(pair[:1]))
    assert gauges(pool) == (1, 0, 1)


def test_an_idle_block_in_an_active_parent_is_room_for_its_own_group_only() -> None:
    pool = make_pool(2, (2, 2))
    pair = take(pool, 0, 2)
    pool.mark_findable(0, pair)
    pool.release(0, int32(pair[:1]))
    assert pool.fits((1, 0))
    assert not pool.fits((0, 1))
    blocks, evicted = pool.take(0, 1)
    assert (blocks.tolist(), [(one.group, one.blocks) for one in evicted]) == (pair[:1], [(0, tuple(pair[:1]))])


def test_gaps_in_cached_parents_are_filled_before_an_empty_parent_is_opened() -> None:
    pool = make_pool(4, (3, 1))
    for _ in range(3):
        one = take(pool, 0, 1)
        pool.mark_findable(0, one)
        pool.release(0, int32(one))
    assert gauges(pool) == (0, 1, 2)
    pool.forget(0, 4)
    assert take(pool, 0, 1) == [4]


def test_another_group_takes_a_cached_parent_with_all_its_blocks() -> None:
    pool = make_pool(2, (3, 2))
    held = take(pool, 0, 3)
    pool.mark_findable(0, held)
    pool.release(0, int32(held[::-1]))
    blocks, evicted = pool.take(1, 1)
    assert blocks.tolist() == [2]
    assert [(one.group, one.blocks) for one in evicted] == [(0, tuple(held[::-1]))]


def test_the_parent_unused_for_longest_goes_before_an_idle_block_of_ones_own_that_is_younger() -> None:
    pool = make_pool(3, (1, 2))
    theirs, ours = take(pool, 1, 1), take(pool, 0, 1)
    pool.mark_findable(1, theirs)
    pool.mark_findable(0, ours)
    pool.release(1, int32(theirs))
    pool.release(0, int32(ours))
    _, evicted = pool.take(0, 1)
    assert [(one.group, one.blocks) for one in evicted] == [(1, tuple(theirs))]


def test_a_group_leaves_the_last_closed_parent_to_whom_it_is_promised() -> None:
    """The oldest idle block lies in a closed parent; taking it would break the other group's promise."""
    pool = make_pool(3, (2, 2))
    held = take(pool, 0, 4)
    pool.mark_findable(0, held)
    pool.release(0, int32(held[:3]))  # parent 1 is cached, parent 2 active with one idle block
    pool.promise(1, 1)
    assert pool.fits((1, 0))
    assert not pool.fits((2, 0))
    blocks, _ = pool.take(0, 1)
    assert blocks.tolist() == held[2:3]
    pool.redeem(1, 1)
    assert len(pool.take(1, 1)[0]) == 1


def test_hits_count_as_room_lost_before_anything_is_taken() -> None:
    pool = make_pool(3, (2, 2))
    held = take(pool, 0, 4)
    pool.mark_findable(0, held)
    pool.release(0, int32(held))
    none = int32([])
    assert pool.fits((0, 4))
    assert pool.fits((1, 2), (int32(held[:1]), none))
    assert not pool.fits((0, 4), (int32(held[:1]), none))
    assert not pool.fits((0, 2), (int32([held[0], held[2]]), none))


def test_a_parent_is_as_old_as_the_last_of_its_blocks_to_become_idle() -> None:
    pool = make_pool(4, (2, 2))
    first, second = take(pool, 0, 2), take(pool, 0, 2)
    pool.mark_findable(0, first + second)
    pool.release(0, int32([first[0], second[0], second[1], first[1]]))
    take(pool, 1, 2)
    _, evicted = pool.take(1, 3)
    assert [one.blocks for one in evicted] == [tuple(second), tuple(first)]


class PoolMachine(RuleBasedStateMachine):
    """`refs` and `idle` are the model: idle blocks in the order of their last release."""

    def __init__(self) -> None:
        super().__init__()
        self.refs: dict[Block, int] = {}
        self.idle: list[Block] = []
        self.findable: set[Block] = set()

    @initialize(parents=st.integers(2, 7), ks=st.lists(st.integers(1, 4), min_size=1, max_size=3))
    def begin(self, parents: int, ks: list[int]) -> None:
        self.ks, self.parents = tuple(ks), parents
        self.pool = make_pool(parents, self.ks)
        self.promised = [0] * len(ks)

    def parent(self, block: Block) -> tuple[int, int]:
        return block[0], block[1] // self.ks[block[0]]

    def active_parents(self, refs: dict[Block, int]) -> set[tuple[int, int]]:
        return {self.parent(block) for block in refs}

    def can_meet(self, demand: list[int], refs: dict[Block, int]) -> bool:
        active = self.active_parents(refs)
        closed = self.parents - 1 - len(active)
        for group, k in enumerate(self.ks):
            slack = k * sum(owner == group for owner, _ in active) - sum(owner == group for owner, _ in refs)
            closed -= max(0, -(-(demand[group] - slack) // k))
        return closed >= 0

    def of(self, group: int, blocks: object) -> list[int]:
        return [number for owner, number in blocks if owner == group]  # type: ignore[attr-defined]

    @rule(data=st.data(), count=st.integers(0, 9))
    def take(self, data, count) -> None:
        group = data.draw(st.integers(0, len(self.ks) - 1))
        want = [count if g == group else 0 for g in range(len(self.ks))]
        can = self.can_meet([w + p for w, p in zip(want, self.promised, strict=True)], self.refs)
        assert self.pool.fits(want) == can
        if not can:
            with pytest.raises(InvariantBroken):
                self.pool.take(group, count)
            return
        blocks, evicted = self.pool.take(group, count)
        gone = [(one.group, number) for one in evicted for number in one.blocks]
        assert len(set(gone)) == len(gone)
        if len(self.ks) == 1:
            assert gone == self.idle[: len(gone)], "not the least recently used"
        for block in gone:
            self.idle.remove(block)
            self.findable.discard(block)
        assert len(set(blocks.tolist())) == len(blocks) == count
        for number in blocks.tolist():
            block = (group, number)
            assert block not in self.refs
            assert block not in self.idle
            self.refs[block] = 1

    def some(self, data, source) -> tuple[int, list[int]]:
        group = data.draw(st.integers(0, len(self.ks) - 1))
        numbers = sorted(set(self.of(group, source)))
        chosen = data.draw(st.lists(st.sampled_from(numbers), unique=True)) if numbers else []
        return group, chosen

    @rule(data=st.data())
    def share(self, data) -> None:
        hits = []
        for group in range(len(self.ks)):
            numbers = sorted(number for owner, number in self.findable if owner == group)
            hits.append(data.draw(st.lists(st.sampled_from(numbers), unique=True)) if numbers else [])
        want = data.draw(st.tuples(*(st.integers(0, 4) for _ in self.ks)))
        refs = dict(self.refs)
        for group, numbers in enumerate(hits):
            for number in numbers:
                refs[group, number] = refs.get((group, number), 0) + 1
        can = self.can_meet([w + p for w, p in zip(want, self.promised, strict=True)], refs)
        assert self.pool.fits(want, [int32(numbers) for numbers in hits]) == can
        if not can:
            return
        for group, numbers in enumerate(hits):
            self.pool.share(group, int32(numbers))
            self.pool.promise(group, want[group])
            self.promised[group] += want[group]
        self.refs = refs
        self.idle = [block for block in self.idle if block not in refs]

    @rule(data=st.data())
    def release(self, data) -> None:
        group, numbers = self.some(data, self.refs)
        self.pool.release(group, int32(numbers))
        for number in numbers:
            block = (group, number)
            self.refs[block] -= 1
            if not self.refs[block]:
                del self.refs[block]
                if block in self.findable:
                    self.idle.append(block)

    @rule(data=st.data())
    def mark(self, data) -> None:
        group, numbers = self.some(data, self.refs)
        self.pool.mark_findable(group, numbers)
        self.findable.update((group, number) for number in numbers)

    @rule(data=st.data())
    def forget(self, data) -> None:
        group, numbers = self.some(data, self.findable)
        for number in numbers[:2]:
            self.pool.forget(group, number)
            self.findable.discard((group, number))
            if (group, number) in self.idle:
                self.idle.remove((group, number))

    @rule(data=st.data())
    def redeem(self, data) -> None:
        group = data.draw(st.integers(0, len(self.ks) - 1))
        count = data.draw(st.integers(0, self.promised[group]))
        self.pool.redeem(group, count)
        self.promised[group] -= count
        self.take_exactly(group, count)

    def take_exactly(self, group: int, count: int) -> None:
        blocks, evicted = self.pool.take(group, count)
        for one in evicted:
            for number in one.blocks:
                self.idle.remove((one.group, number))
                self.findable.discard((one.group, number))
        self.refs.update({(group, number): 1 for number in blocks.tolist()})

    @rule()
    def discard_all(self) -> None:
        self.pool.discard_all_idle()
        self.findable.difference_update(self.idle)
        self.idle.clear()

    @invariant()
    def classes_are_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        active = {parent for _, parent in self.active_parents(self.refs)}
        cached = {self.parent(block)[1] for block in self.idle} - active
        assert gauges(self.pool) == (len(active), len(cached), self.parents - 1 - len(active) - len(cached))
        assert 0 not in active | cached
        owners = {self.parent(block) for block in itertools.chain(self.refs, self.idle)}
        assert len({parent for _, parent in owners}) == len(owners), "two groups in one parent"
        contents = self.pool.contents()
        for group in range(len(self.ks)):
            assert contents.references[group] == {n: count for (g, n), count in self.refs.items() if g == group}
            assert list(contents.idle[group]) == self.of(group, self.idle)
        assert sorted(contents.empty) == sorted(set(range(1, self.parents)) - active - cached)
        assert contents.promised == tuple(self.promised)

    @rule(data=st.data())
    def every_promise_can_be_redeemed(self, data) -> None:
        pool = copy.deepcopy(self.pool)
        turns = [group for group, count in enumerate(self.promised) for _ in range(count)]
        for group in data.draw(st.permutations(turns)):
            pool.redeem(group, 1)
            pool.take(group, 1)


PoolMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestPoolMachine = pytest.mark.contract("SP-10", "SP-11", "SP-13", "SP-51", "SP-52", "SP-53", "KM-15", "KM-16")(
    PoolMachine.TestCase
)
