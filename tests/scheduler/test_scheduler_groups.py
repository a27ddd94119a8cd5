"""Several cache groups: what is shared, copied, given up, kept and zeroed."""

from __future__ import annotations

import attrs
import pytest
from scheduler_rig import Request, Rig, build, config, prompt, zeroed
from scheduler_traces import soak
from toy_groups import some_groups

from tokenspeed.errors import SettingsError
from tokenspeed.plane.messages import Finish
from tokenspeed.plane.plan import ExecutionPlan
from tokenspeed.plane.results import ForwardLanded
from tokenspeed.plane.specs import CacheGroupSpec

PAGE = 4
GROUPS = some_groups(PAGE)


def grouped(name: str, **changes: object) -> Rig:
    return build(groups=GROUPS[name], page_tokens=PAGE, chunk_tokens=64, **changes)


def copies(plans: list[ExecutionPlan]) -> list[tuple[int, int, int]]:
    return [(copy.group, copy.source, copy.destination) for plan in plans for copy in plan.pages_to_copy]


def tables(rig: Rig, request: Request) -> list[tuple[int, ...]]:
    return [part.tables.get(request.row, ()) for part in rig.scheduler.snapshot().groups]


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix", [True, False])
def test_tokens_are_right_with_hits_eviction_and_retraction(name: str, depth: int, prefix: bool) -> None:
    rig = grouped(name, num_pages=14 + 6 * len(GROUPS[name]), overlap_schedule_depth=depth, prefix=prefix)
    stem = prompt(21, seed=1)
    for turn in range(3):
        for tail in range(4):
            rig.new(stem + prompt(3 + tail, seed=2 + tail), max_new=12 + turn)
        rig.run()
    rig.check_tokens()
    rig.check_idle()
    cached = sum(
        len(request.prompt) - len(request.computed & set(range(len(request.prompt)))) for request in rig.requests
    )
    assert (cached > 0) is prefix


@pytest.mark.contract("SP-36", "SP-38")
def test_a_hit_of_one_and_a_half_blocks_copies_one_block() -> None:
    rig = grouped("full")
    stem = prompt(6, seed=1)
    rig.new(stem + prompt(6, seed=2), max_new=1)
    rig.run()
    whole, half = (rig.scheduler.snapshot().index[name] for name in list(rig.scheduler.snapshot().index)[:2])
    second = rig.new(stem + prompt(6, seed=3), max_new=2)
    plan = rig.round()
    assert rig.table.schedule.cached[second.row] == 6
    table = tables(rig, second)[0]
    assert table[0] == whole
    assert copies([plan]) == [(0, half, table[1])]
    assert plan.cache == ()  # no operation id, nothing to acknowledge
    rig.run()
    rig.check_tokens()


@pytest.mark.contract("SP-36")
@pytest.mark.parametrize("depth", [0, 1])
def test_an_owner_moves_off_the_state_it_published_when_its_prompt_ended(depth: int) -> None:
    rig = grouped("full and state", overlap_schedule_depth=depth)
    request = rig.new(prompt(10, seed=1), max_new=6)
    rig.round()
    published = tables(rig, request)[1]
    plan = rig.round()
    moved = tables(rig, request)[1]
    assert moved != published
    assert copies([plan]) == [(1, published[0], moved[0])]
    assert plan.grants[-1].blocks.tolist() == list(moved)
    rig.run()
    # The next turn of the conversation begins with the prompt: it goes on from that state.
    follow_up = rig.new(prompt(10, seed=1) + prompt(5, seed=2), max_new=3)
    plan = rig.round()
    assert rig.table.schedule.cached[follow_up.row] == 10
    assert (1, published[0], tables(rig, follow_up)[1][0]) in copies([plan])
    rig.run()
    rig.check_tokens()
    rig.check_idle()


@pytest.mark.parametrize("name", ["full and state", "state"])
@pytest.mark.parametrize("chunk", [64, 8])
@pytest.mark.parametrize("ahead", [0, 1])
def test_what_a_forward_left_that_was_cut_short_is_not_found(name: str, chunk: int, ahead: int) -> None:
    """The last chunk's logits were no numbers: whoever finds its state or its page in part has no numbers either."""
    rig = build(groups=GROUPS[name], page_tokens=PAGE, chunk_tokens=chunk, overlap_schedule_depth=1)
    request = rig.new(prompt(10, seed=1), max_new=6)
    while not rig.queue or not rig.queue[-1][0].samples.any():
        rig.land()
        rig.plan()
    for _ in range(ahead):
        rig.plan()
    rig._finish(request, Finish.ABORT)
    batch, *_ = rig.queue.popleft()
    rig.scheduler.advance([ForwardLanded(batch=batch, finished=(request.row,))])
    rig.land()
    again = rig.new(prompt(10, seed=1) + prompt(5, seed=2), max_new=3)
    rig.run(until=lambda: again.forwards > 0)
    assert rig.table.schedule.cached[again.row] == (8 if chunk == 8 else 0)
    rig.run()
    rig.check_tokens()
    rig.check_idle()


def test_without_a_spare_block_a_state_is_not_kept_and_the_request_goes_on() -> None:
    rig = build(
        groups=(CacheGroupSpec(kind="state", block_tokens=PAGE, zero_new_blocks=True),),
        page_tokens=PAGE,
        chunk_tokens=64,
        num_pages=2,
    )
    rig.new(prompt(10), max_new=6)
    plans = rig.run()
    assert copies(plans) == []
    rig.check_tokens()
    rig.check_idle()


def test_a_state_that_is_written_over_is_not_stored_in_the_host_tier_under_its_name() -> None:
    rig = build(
        groups=(CacheGroupSpec(kind="state", block_tokens=PAGE, zero_new_blocks=True),),
        page_tokens=PAGE,
        chunk_tokens=64,
        num_pages=2,
        host_parents=9,
    )
    rig.new(prompt(2 * PAGE), max_new=6)
    rig.run()
    while rig.plan().cache or rig.host.pending:
        pass
    again = rig.new([*prompt(2 * PAGE), 3, 4], max_new=3)
    rig.run()
    rig.check_tokens()
    assert rig.table.schedule.cached[again.row] == 0
    rig.check_idle()


def test_a_fresh_state_is_zeroed_and_a_copied_one_is_not() -> None:
    rig = grouped("full and state")
    first = rig.new(prompt(8, seed=1), max_new=1)
    plan = rig.round()
    assert {block for group, block in zeroed(plan) if group == 1} == set(tables(rig, first)[1]) or plan.pages_to_zero
    assert {group for group, _ in zeroed(plan)} == {1}
    rig.run()
    rig.new([*prompt(8, seed=1), 3], max_new=1)
    plan = rig.round()
    assert plan.pages_to_copy
    assert zeroed(plan) == set()
    rig.run()
    rig.check_tokens()


def test_a_window_group_gives_up_the_blocks_that_no_query_will_see() -> None:
    rig = grouped("full and window", num_pages=60)
    request = rig.new(prompt(20), max_new=30)
    held = []
    while request.decodes < 29:
        rig.plan()
        held.append(len(tables(rig, request)[1]))
        assert len(tables(rig, request)[0]) == -(-int(rig.table.schedule.scheduled[request.row]) // PAGE)
        rig.land()
    # The prompt at once, and from then on the window of 6 tokens and what is being filled.
    assert held[0] == 5
    assert max(held[1:]) == 3
    rig.run()
    rig.check_tokens()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_long_prompt_in_chunks_needs_a_window_only_not_the_prompt(depth: int) -> None:
    rig = build(
        groups=(CacheGroupSpec(name="window", kind="window", window_tokens=5, block_tokens=PAGE),),
        page_tokens=PAGE,
        chunk_tokens=8,
        num_pages=10,
        max_num_seqs=1,
        overlap_schedule_depth=depth,
    )
    rig.new(prompt(100), max_new=9)
    rig.run()
    rig.check_tokens()
    rig.check_idle()


def test_a_window_is_found_again_where_its_last_tokens_are_kept() -> None:
    rig = grouped("window", num_pages=9)
    stem = prompt(24, seed=1)
    rig.new(stem, max_new=1)
    rig.run()
    second = rig.new(stem + prompt(4, seed=2), max_new=2)
    rig.round()
    # What lies before the window need not be there any more.
    assert rig.table.schedule.cached[second.row] == 24
    assert len(tables(rig, second)[0]) <= 3
    rig.run()
    rig.check_tokens()
    rig.check_idle()


@pytest.mark.contract("SP-51", "SP-53")
def test_small_blocks_share_a_parent_and_pages_are_counted_in_parents() -> None:
    wide = CacheGroupSpec(name="wide", block_tokens=64)
    narrow = CacheGroupSpec(name="narrow", block_tokens=16, blocks_per_parent=4)
    rig = build(groups=(narrow, wide), page_tokens=16, chunk_tokens=64, num_pages=9, max_model_len=128)
    request = rig.new(prompt(63), max_new=1)
    rig.plan()
    small, large = tables(rig, request)
    assert len(small) == 4
    assert len({block // 4 for block in small}) == 1
    assert len(large) == 1
    assert small[0] // 4 != large[0]
    rig.land()
    rig.run()
    assert rig.scheduler.empty_lcm_blocks() == 8 - 1  # three full small blocks stay findable in one parent


@pytest.mark.contract("SP-37")
@pytest.mark.parametrize("seed", range(700, 712))
def test_random_lives_with_every_combination_of_groups(seed: int) -> None:
    """The rig checks on every plan that copies' destinations and zeroed blocks are disjoint, and audits all."""
    _, seen = soak(seed, steps=120)
    assert seen.rounds > 100


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (CacheGroupSpec(kind="ring"), "kind is 'ring', must be one of full, window, state"),
        (CacheGroupSpec(block_tokens=6), "block_tokens is 6, must be a multiple of the page's 4 tokens"),
        (CacheGroupSpec(kind="window", block_tokens=4), "window_tokens is 0, must be above 0 exactly for a window"),
        (CacheGroupSpec(block_tokens=4, window_tokens=8), "window_tokens is 8, must be above 0 exactly for a window"),
        (CacheGroupSpec(block_tokens=4, blocks_per_parent=0), "blocks_per_parent is 0, must be at least 1"),
    ],
)
def test_groups_that_cannot_be_are_refused(spec: CacheGroupSpec, said: str) -> None:
    with pytest.raises(SettingsError, match="scheduler: cache group") as caught:
        build(attrs.evolve(config(), groups=(spec,)))
    assert said in str(caught.value)
