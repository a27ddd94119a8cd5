"""The waiting queue: order, ageing, and a cost that does not grow with its length."""

from __future__ import annotations

import random

import attrs
import pytest
from scheduler_rig import Rig, build, prompt
from test_scheduler_pool import calls_of

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import Sampling, int32
from tokenspeed.plane.ports import SchedulingPolicy
from tokenspeed.plane.table import request_table
from tokenspeed.scheduler.policy import AgedPriority, Fcfs, LongestPrefixMatch
from tokenspeed.scheduler.waiting import REFRESHED_PER_ROUND, WaitingQueue


def order_of_service(rig: Rig) -> list[int]:
    rig.run()
    return [r.row for r in sorted(rig.requests, key=lambda request: request.first_planned_round)]


def test_first_come_is_first_served() -> None:
    rig = build(max_num_seqs=1)
    rows = [rig.new(prompt(4, seed=seed), max_new=2, priority=-seed).row for seed in range(5)]
    assert order_of_service(rig) == rows


@pytest.mark.parametrize(("keys", "text"), [([None], "no tuple"), ([(1.0,), ("x",)], "cannot be compared")])
def test_a_policys_key_that_orders_nothing_is_named_with_the_policy(keys: list[object], text: str) -> None:
    class Garbage(Fcfs):
        def key(self, *, order: int, **_: int) -> tuple[float, ...]:  # type: ignore[override]
            return keys[order % len(keys)]  # type: ignore[return-value]

    rig = build(max_num_seqs=1, policy=Garbage())
    with pytest.raises(InvariantBroken, match=rf"{text}.*policy='Garbage'"):
        _ = [rig.new(prompt(4, seed=seed), max_new=2) for seed in range(2)]


def test_lower_priority_values_are_served_first_and_equal_ones_in_order() -> None:
    rig = build(max_num_seqs=1, policy=AgedPriority())
    rows = [rig.new(prompt(4, seed=at), max_new=2, priority=level).row for at, level in enumerate((3, 1, 2, 1))]
    assert order_of_service(rig) == [rows[1], rows[3], rows[2], rows[0]]


def test_a_steady_load_of_better_priority_does_not_starve_a_request() -> None:
    for policy in (
        AgedPriority(rounds_per_level=4, patience_rounds=10**6),
        AgedPriority(rounds_per_level=10**6, patience_rounds=40),
    ):
        rig = build(max_num_seqs=1, policy=policy)
        poor = rig.new(prompt(4), max_new=2, priority=9)
        for at in range(100):
            if rig.scheduler.sizes().waiting < 4:
                rig.new(prompt(4, seed=at + 1), max_new=2, priority=0)
            rig.round()
        assert 30 < poor.first_planned_round < 60


def test_a_head_that_does_not_fit_is_not_overtaken() -> None:
    rig = build(num_pages=12, page_tokens=4, chunk_tokens=64, max_num_seqs=4)
    first = rig.new(prompt(16), max_new=12)
    rig.round()
    big = rig.new(prompt(30, seed=1), max_new=2)
    small = rig.new(prompt(2, seed=2), max_new=2)
    rig.round()
    assert small.first_planned_round < 0
    rig.run()
    assert first.first_planned_round < big.first_planned_round <= small.first_planned_round
    rig.check_tokens()


def test_a_blocked_head_is_admitted_as_soon_as_its_pages_are_there_or_another_computed_them() -> None:
    rig = build(num_pages=12, page_tokens=4, chunk_tokens=4, max_num_seqs=4)
    first = rig.new(prompt(24), max_new=12)
    rig.round()
    rig.new(prompt(24), max_new=2)  # the same prompt: it fits once the first has published enough of it
    twin = rig.requests[-1]
    rig.run(until=lambda: twin.first_planned_round >= 0)
    assert first.finish.name == "RUNNING"
    assert rig.table.schedule.cached[twin.row] == 8
    assert twin.first_planned_round == 3
    rig.run()
    rig.check_tokens()


@attrs.define(eq=False)
class CountingPolicy:
    calls: int = 0
    wants_cached_tokens: bool = False

    def key(
        self, *, order: int, priority: int, prompt_len: int, waited_rounds: int, cached_tokens: int
    ) -> tuple[float, ...]:
        del priority, prompt_len, waited_rounds
        self.calls += 1
        return (-cached_tokens, order)


@pytest.mark.parametrize("fits", [True, False])
def test_a_round_takes_as_many_steps_with_4096_requests_waiting_as_with_16(fits: bool) -> None:
    steps = []
    for waiting in (16, 4096):
        policy = CountingPolicy()
        # Blocked for want of a slot, or of pages.
        rig = build(max_num_seqs=2 if fits else 8, num_pages=40 if fits else 18, policy=policy, chunk_tokens=64)
        rig.audited = False
        for seed in range(2):
            rig.new(prompt(20, seed=seed), max_new=40 if fits else 10)
        rig.round()
        rig.submit(*(rig.add(prompt(40, seed=2 + at), max_new=20) for at in range(waiting)))
        rig.round()
        policy.calls = 0
        rounds = [calls_of(lambda rig=rig: rig.scheduler.next_execution_plan()) for _ in range(1)]
        assert policy.calls <= REFRESHED_PER_ROUND
        steps.append(rounds)
    assert steps[0] == steps[1]


def test_the_queue_stays_small_when_keys_change_and_requests_leave() -> None:
    table = request_table(slots=1, max_len=8)
    queue = WaitingQueue(table=table, policy=AgedPriority(rounds_per_level=1))
    rows = [
        table.add(rid=f"r{at}", tokens=int32([1]), max_new=1, sampling=Sampling(), priority=at % 3) for at in range(50)
    ]
    for row in rows:
        queue.add(row, round_id=0)
    for round_id in range(1, 400):
        queue.refresh(round_id=round_id)
    for row in rows[:45]:
        queue.remove(row)
    for round_id in range(400, 500):
        queue.refresh(round_id=round_id)
    assert len(queue) == 5
    assert len(queue.state.heap) + len(queue.state.old) <= 2 * (2 * 5 + 64)
    assert len(queue.state.turns) <= 2 * 5 + 64
    served = []
    while (head := queue.head()) is not None:
        served.append(head)
        queue.remove(head)
    assert sorted(served) == sorted(rows[45:])
    levels = [int(table.identity.priority[row]) for row in served]
    assert levels == sorted(levels)


@pytest.mark.parametrize(
    "policy", [Fcfs(), AgedPriority(rounds_per_level=3), CountingPolicy()], ids=["fcfs", "aged", "own"]
)
def test_the_head_is_the_smallest_key_whatever_came_and_went(policy: SchedulingPolicy) -> None:
    """Against a list that is sorted by the latest keys."""
    dice = random.Random(1)
    table = request_table(slots=1, max_len=8)
    queue = WaitingQueue(table=table, policy=policy)
    made = 0
    for round_id in range(3000):
        if dice.random() < (0.5 if round_id < 1500 else 0.1):
            made += 1
            row = table.add(
                rid=f"r{made}", tokens=int32([1]), max_new=1, sampling=Sampling(), priority=dice.randrange(-3, 40)
            )
            queue.add(row, round_id=round_id)
        queue.refresh(round_id=round_id)
        live = queue.state.live
        want = min(live, key=lambda row: (live[row].key, table.identity.order[row]), default=None)
        assert queue.head() == want
        if live and dice.random() < 0.3:
            gone = want if dice.random() < 0.5 else dice.choice(list(live))
            queue.remove(gone)
            table.free(gone)
    assert len(queue.state.heap) + len(queue.state.old) <= 6 * len(queue) + 200


def test_retracted_requests_come_back_ahead_of_all_others_the_first_to_be_retracted_first_then_the_elder() -> None:
    table = request_table(slots=1, max_len=8)
    queue = WaitingQueue(table=table, policy=AgedPriority())
    fresh, late, young, old, gone = (
        table.add(rid=f"r{at}", tokens=int32([1]), max_new=1, sampling=Sampling(), priority=-at) for at in range(5)
    )
    queue.add(fresh, round_id=0)
    queue.give_back(late, round_id=8, stamp=1)
    queue.give_back(young, round_id=5, stamp=9)
    queue.give_back(gone, round_id=2, stamp=7)
    queue.give_back(old, round_id=5, stamp=4)
    queue.remove(gone)
    served = []
    while (head := queue.head()) is not None:
        served.append(head)
        queue.remove(head)
    assert served == [old, young, late, fresh]


def test_a_row_that_is_used_again_does_not_inherit_a_place() -> None:
    table = request_table(slots=1, max_len=8)
    queue = WaitingQueue(table=table, policy=Fcfs())
    first, second = (
        table.add(rid=rid, tokens=int32([1]), max_new=1, sampling=Sampling()) for rid in ("first", "second")
    )
    queue.add(first, round_id=0)
    queue.add(second, round_id=0)
    queue.remove(first)
    table.free(first)
    third = table.add(rid="third", tokens=int32([1]), max_new=1, sampling=Sampling())
    assert third == first
    queue.add(third, round_id=1)
    assert queue.head() == second
    queue.refresh(round_id=2)
    assert sorted(row for row, _ in queue.state.turns) == sorted([second, third])
    queue.remove(second)
    assert queue.head() == third


def test_longest_prefix_match_serves_cached_prompts_first_and_equal_ones_in_order() -> None:
    rig = build(max_num_seqs=1, policy=LongestPrefixMatch())
    rig.new(prompt(24, seed=1), max_new=2)
    rig.run()
    rig.new(prompt(4, seed=9), max_new=8)  # occupies the seat
    rig.round()
    cold, short, long, other = (
        rig.new(ids, max_new=2)
        for ids in (
            prompt(12, seed=3),
            prompt(8, seed=1) + prompt(8, seed=4),
            prompt(16, seed=1) + prompt(8, seed=5),
            prompt(12, seed=6),
        )
    )
    served = order_of_service(rig)
    assert served[2:] == [long.row, short.row, cold.row, other.row]
    rig.check_tokens()


def test_what_a_waiting_prompt_finds_is_looked_up_again_while_it_waits() -> None:
    rig = build(max_num_seqs=1, policy=LongestPrefixMatch())
    running = rig.new(prompt(24, seed=1), max_new=4)
    rig.round()
    first = rig.new(prompt(12, seed=2), max_new=2)
    later = rig.new(prompt(24, seed=1), max_new=2)  # nothing of it was published when it was submitted
    rig.run()
    assert running.first_planned_round < later.first_planned_round < first.first_planned_round


def test_a_steady_load_of_cached_prompts_does_not_starve_a_cold_one() -> None:
    rig = build(max_num_seqs=1, policy=LongestPrefixMatch(patience_rounds=40))
    rig.new(prompt(24, seed=1), max_new=2)
    rig.run()
    rig.new(prompt(24, seed=1), max_new=2)
    cold = rig.new(prompt(12, seed=2), max_new=2)
    for _ in range(100):
        if rig.scheduler.sizes().waiting < 4:
            rig.new(prompt(24, seed=1), max_new=2)
        rig.round()
    assert 40 < cold.first_planned_round < 70


def test_the_cache_is_not_asked_for_a_policy_that_does_not_look_at_it() -> None:
    asked: list[int] = []

    @attrs.frozen(eq=False)
    class Counted:
        def cached_tokens(self, row: int) -> int:
            asked.append(row)
            return 7

    table = request_table(slots=1, max_len=8)
    row = table.add(rid="r", tokens=int32([1]), max_new=1, sampling=Sampling())
    for policy in (Fcfs(), AgedPriority(), CountingPolicy()):
        queue = WaitingQueue(table=table, policy=policy, cached=Counted())
        queue.add(row, round_id=0)
        queue.refresh(round_id=1)
    assert asked == []
    queue = WaitingQueue(table=table, policy=CountingPolicy(wants_cached_tokens=True), cached=Counted())
    queue.add(row, round_id=0)
    assert asked == [row]
    assert queue.state.live[row].key == (-7, 0)


def test_a_prompt_that_is_known_further_than_it_may_be_reused_is_admitted_beside_a_decode() -> None:
    rig = build(policy=LongestPrefixMatch())
    shared = prompt(40)
    first = rig.new(shared, max_new=30)
    rig.run(until=lambda: bool(first.out))
    # The policy names all of the prompt, of which the log-probabilities asked for leave two pages to reuse.
    scored = rig.new(shared, max_new=2, prompt_from=9)
    rig.run()
    rig.check_tokens()
    assert len(scored.out) == 2
    assert scored.computed_tokens == len(shared) - 8 + 1
