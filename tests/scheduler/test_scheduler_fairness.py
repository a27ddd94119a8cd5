"""Who waits how long: decodes under long prompts, and requests that the order of the queue does not favour."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from scheduler_rig import Request, Rig, build, prompt

from tokenspeed.plane.messages import Finish
from tokenspeed.plane.ports import SchedulingPolicy
from tokenspeed.scheduler.names import FOUND_PER_HASH, NAMED_PER_ROUND
from tokenspeed.scheduler.policy import AgedPriority, Fcfs, LongestPrefixMatch

PATIENCE = 40


def hot(at: int) -> dict[str, object]:
    """A prompt that shares most of its tokens with all of its kind, and goes first under priority."""
    return {"prompt": prompt(40, seed=1) + prompt(4 + at % 3, seed=at), "max_new": 2, "priority": 0}


def long(at: int) -> dict[str, object]:
    return {"prompt": prompt(100, seed=100 + at), "max_new": 2, "priority": 0}


def cold(at: int) -> dict[str, object]:
    return {"prompt": prompt(24, seed=1000 + at), "max_new": 6, "priority": 9}


def large(at: int) -> dict[str, object]:
    """Needs most of the pool."""
    return {"prompt": prompt(100, seed=2000 + at), "max_new": 20, "priority": 9}


def waits(rig: Rig, born: dict[int, int]) -> Iterator[tuple[Request, int]]:
    """Rounds from submission to the first forward."""
    for request in rig.requests:
        if id(request) in born:
            yield request, request.first_planned_round - born[id(request)]


@pytest.mark.parametrize("load", [hot, long], ids=["hot", "long"])
@pytest.mark.parametrize(
    "policy",
    [
        Fcfs(),
        AgedPriority(rounds_per_level=1000, patience_rounds=PATIENCE),
        LongestPrefixMatch(patience_rounds=PATIENCE),
    ],
    ids=["fcfs", "priority", "lpm"],
)
@pytest.mark.parametrize("depth", [0, 1])
def test_no_request_starves_under_a_load_that_the_policy_prefers(
    policy: SchedulingPolicy, load: object, depth: int
) -> None:
    rig = build(
        policy=policy,
        max_num_seqs=3,
        max_batched_tokens=40,
        chunk_tokens=20,
        num_pages=40,
        max_model_len=128,
        overlap_schedule_depth=depth,
    )
    rig.audited = False
    born: dict[int, int] = {}
    made = 0
    for at in range(300):
        while rig.scheduler.sizes().waiting < 6:
            made += 1
            rig.new(**load(made))  # type: ignore[operator]
        if at < 150 and at % 30 == 10:
            for kind in (cold, large):
                request = rig.new(**kind(at))  # type: ignore[arg-type]
                born[id(request)] = at
        rig.round()
    for request, rounds in waits(rig, born):
        # Patience, a turn of the refresh, and those of equal patience that came before.
        assert 0 <= rounds < PATIENCE + 60, (request, rounds)
        assert request.finish is Finish.LENGTH
    rig.run(rounds=1000)
    rig.check_tokens()


@pytest.mark.parametrize("policy", [Fcfs(), AgedPriority(), LongestPrefixMatch()], ids=["fcfs", "priority", "lpm"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_decode_never_waits_for_more_than_one_chunk(policy: SchedulingPolicy, depth: int) -> None:
    rig = build(
        policy=policy,
        chunk_tokens=16,
        max_batched_tokens=40,
        max_model_len=128,
        num_pages=200,
        overlap_schedule_depth=depth,
    )
    talkers = [rig.new(prompt(4, seed=seed), max_new=90, priority=seed) for seed in range(3)]
    rig.round()
    for at in range(80):
        while rig.scheduler.sizes().waiting < 3:
            rig.new(prompt(100, seed=len(rig.requests)), max_new=2)
        said = [talker.forwards for talker in talkers]
        plan = rig.round()
        assert [talker.forwards for talker in talkers] == [count + 1 for count in said], at
        assert plan.batch is not None
        assert plan.batch.counts.max() <= 16
        assert plan.batch.num_tokens <= 40


def test_a_long_prompt_that_is_known_gets_its_names_in_slices_while_decodes_run() -> None:
    rig = build(page_tokens=2, num_pages=16000, max_model_len=16384, max_batched_tokens=4096, chunk_tokens=4096)
    rig.audited = False
    each = FOUND_PER_HASH * NAMED_PER_ROUND
    ids = prompt(2 * (2 * each + 100) + 1, seed=1)
    rig.new(ids, max_new=1)
    rig.run()
    talker = rig.new(prompt(4, seed=3), max_new=30)
    rig.round()
    again = rig.new(ids, max_new=2)
    names = [1]
    while again.first_planned_round < 0:
        said = talker.forwards
        rig.round()
        assert talker.forwards == said + 1
        names.append(len(rig.scheduler.cache.chains.of(again.row)))  # type: ignore[attr-defined]
    gained = [later - before for before, later in itertools.pairwise(names)]
    assert sum(gained) == 2 * each + 100
    assert len(gained) == 3
    assert max(gained) <= each
    rig.run()
    assert min(again.computed) == len(ids) - 1
    rig.check_tokens()


def test_a_prompt_is_found_to_its_end_where_the_latest_entry_leads_elsewhere() -> None:
    """The index leads along what was stored last; where that is not the prompt's, its page is hashed."""
    rig = build(page_tokens=2, num_pages=4000, max_model_len=4096, max_batched_tokens=4096, chunk_tokens=4096)
    ids = prompt(601, seed=1)
    for known in (ids, ids[:100] + prompt(300, seed=2), ids[:400] + prompt(100, seed=3)):
        rig.new(known, max_new=1)
        rig.run()
    rig.new(prompt(4, seed=4), max_new=30)
    rig.round()
    again = rig.new(ids, max_new=2)
    rig.run()
    assert min(again.computed) == 600
    rig.check_tokens()


def test_a_prompt_that_is_not_known_is_not_named_beyond_its_first_pages() -> None:
    rig = build(page_tokens=2, num_pages=4000, max_model_len=4096, max_batched_tokens=64, chunk_tokens=32)
    rig.audited = False
    rig.new(prompt(4), max_new=30)
    rig.round()
    cold = rig.new(prompt(2000, seed=1), max_new=2)
    rig.round()
    assert cold.first_planned_round > 0
    assert len(rig.scheduler.cache.chains.of(cold.row)) < 20  # type: ignore[attr-defined]
