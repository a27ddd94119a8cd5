"""The prefix cache: what is found, when it becomes findable, and what never is."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from scheduler_rig import Rig, build, oracle, prompt

from tokenspeed.plane.messages import Finish
from tokenspeed.plane.results import BlockStored, ForwardLanded
from tokenspeed.plane.table import MediaItem
from tokenspeed.scheduler.names import page_name, root_name


def computed(rig: Rig) -> int:
    """Tokens of the latest plan."""
    batch = rig.round().batch
    assert batch is not None
    return batch.num_tokens


def names(tokens: list[int], *, page: int = 4) -> list[bytes]:
    """Names of the full blocks of an unsalted prompt."""
    raw, chain = np.array(tokens, dtype="<i4").tobytes(), [root_name(salt=b"")]
    for at in range(0, len(raw), 4 * page):
        chain.append(page_name(chain[-1], raw[at : at + 4 * page]))
    return chain[1:]


@pytest.mark.contract("SP-48")
def test_a_prompt_sent_twice_computes_only_what_is_not_in_full_blocks() -> None:
    rig = build(chunk_tokens=64, page_tokens=4)
    first = rig.new(prompt(18), max_new=5)
    rig.run()
    second = rig.new(prompt(18), max_new=5)
    assert computed(rig) == 18 - 16
    assert rig.table.schedule.cached[second.row] == 16
    rig.run()
    assert second.out == first.out
    rig.check_tokens()


@pytest.mark.parametrize("pages", [1, 2, 3])
@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("together", [False, True])
def test_a_prompt_that_ends_at_a_page_border_still_computes_a_token(pages: int, off: int, together: bool) -> None:
    rig = build(page_tokens=4, chunk_tokens=64)
    length = 4 * pages + off
    for _ in range(3):
        request = rig.new(prompt(length), max_new=3)
        if not together:
            rig.run()
            assert request.computed & set(range(length))
    rig.run()
    rig.check_tokens()
    assert all(request.finish is Finish.LENGTH for request in rig.requests)
    rig.check_idle()


def test_another_salt_is_another_prefix() -> None:
    rig = build(chunk_tokens=64)
    rig.new(prompt(20), max_new=2, salt=b"a")
    rig.run()
    other = rig.new(prompt(20), max_new=2, salt=b"b")
    same = rig.new(prompt(20), max_new=2, salt=b"a")
    rig.round()
    assert rig.table.schedule.cached[other.row] == 0
    # Four whole blocks, and three of the four tokens of the last one by a private copy.
    assert rig.table.schedule.cached[same.row] == 19


def image(first: int, tokens: int, digest: bytes) -> tuple[MediaItem, ...]:
    return (MediaItem(first=first, tokens=tokens, digest=digest),)


def test_another_image_is_another_prefix_from_the_block_it_falls_in() -> None:
    rig = build(chunk_tokens=64)
    cat = image(9, 6, b"cat")  # in blocks 2 and 3 of 4 tokens
    rig.new(prompt(24), max_new=2, media=cat)
    rig.run()
    found = {}
    others = {
        "the same": cat,
        "another": image(9, 6, b"dog"),
        "elsewhere": image(10, 5, b"cat"),
        "none": (),
        "later": image(17, 3, b"cat"),
    }
    for what, media in others.items():
        request = rig.new(prompt(24), max_new=2, media=media)
        rig.round()
        found[what] = int(rig.table.schedule.cached[request.row])
        rig.run()
    # Whole blocks before the image are the same for all; prompts with an image are found by whole blocks only.
    assert found == {"the same": 20, "another": 8, "elsewhere": 8, "none": 8, "later": 16}
    rig.check_tokens()


def test_names_are_chained_over_root_and_tokens() -> None:
    def blake(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16).digest()

    tokens = prompt(8)
    raw = np.array(tokens, dtype="<i4").tobytes()
    root = blake(b"\0\0\0\0pepper")
    assert root_name(salt=b"pepper") == root
    assert root_name(salt=b"salt") != root
    rig = build(page_tokens=4)
    rig.new(tokens, max_new=2, salt=b"pepper")
    rig.run()
    first = blake(root + raw[:16])
    assert list(rig.scheduler.snapshot().index) == [first, blake(first + raw[16:])]
    assert page_name(root, raw[:16]) == first


@pytest.mark.parametrize("prompt_from", [0, 1, 5, 9, 18])
def test_positions_whose_prompt_logprobs_are_wanted_are_computed(prompt_from: int) -> None:
    rig = build(page_tokens=4, chunk_tokens=64)
    rig.new(prompt(20), max_new=2)
    rig.run()
    request = rig.new(prompt(20), max_new=2, prompt_from=prompt_from)
    rig.run()
    # The log-probability of position p is read from the logits of position p - 1.
    assert set(range(max(prompt_from - 1, 0), 20)) <= request.computed
    rig.check_tokens()


def test_nothing_is_found_or_kept_with_the_prefix_cache_off() -> None:
    rig = build(prefix=False, chunk_tokens=64)
    for _ in range(2):
        rig.new(prompt(20), max_new=3)
        assert computed(rig) == 20
        rig.run()
    assert rig.scheduler.empty_lcm_blocks() == rig.scheduler.num_usable_pages
    assert rig.events == []
    rig.check_idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_block_is_findable_once_its_forward_has_landed_and_not_before(depth: int) -> None:
    rig = build(overlap_schedule_depth=depth, page_tokens=4, chunk_tokens=8)
    rig.new(prompt(16), max_new=4)
    rig.plan()
    assert rig.scheduler.snapshot().index == {}
    rig.land()
    assert len(rig.scheduler.snapshot().index) == 2
    rig.plan()
    rig.land()
    assert len(rig.scheduler.snapshot().index) == 4


def test_decoding_publishes_each_block_it_fills() -> None:
    rig = build(page_tokens=4, chunk_tokens=64)
    request = rig.new(prompt(6), max_new=12)
    rig.run()
    assert len(rig.scheduler.snapshot().index) == (6 + 11) // 4
    follow_up = rig.new(prompt(6) + request.out, max_new=2)
    rig.round()
    assert rig.table.schedule.cached[follow_up.row] == 16
    rig.run()
    rig.check_tokens()


def test_equal_prompts_admitted_together_end_up_on_the_same_blocks() -> None:
    rig = build(page_tokens=4, chunk_tokens=64, overlap_schedule_depth=1)
    twins = [rig.new(prompt(17), max_new=6) for _ in range(3)]
    rig.plan()
    apart = {block for twin in twins for block in rig.blocks(twin)}
    assert len(apart) == 15
    rig.round()
    rig.land()
    tables = [rig.blocks(twin) for twin in twins]
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    assert rig.scheduler.active_lcm_blocks() == 4 + 3
    rig.run()
    rig.check_tokens()
    rig.check_idle()


def test_a_block_given_up_for_its_twin_returns_when_the_forwards_that_read_it_have_landed() -> None:
    rig = build(page_tokens=4, chunk_tokens=64, overlap_schedule_depth=1)
    rig.new(prompt(9), max_new=6)
    twin = rig.new(prompt(9), max_new=6)
    rig.plan()
    own = rig.blocks(twin)[:2]
    rig.plan()
    rig.land(down_to=1)
    snapshot = rig.scheduler.snapshot()
    assert set(own) == set(snapshot.displaced)
    assert rig.blocks(twin)[:2] != own
    rig.land()
    assert rig.scheduler.snapshot().displaced == ()
    assert set(own) <= set(rig.scheduler.snapshot().empty)


def test_an_idle_copy_makes_room_for_the_copy_in_use() -> None:
    rig = build(page_tokens=4, chunk_tokens=64, num_pages=20)
    first = rig.new(prompt(9), max_new=8)
    second = rig.new(prompt(9), max_new=8, prompt_from=0)
    rig.run(until=lambda: len(rig.scheduler.snapshot().index) >= 2)
    rig.abort(first)
    rig.abort(second)
    rig.run()
    # Both copies' content is idle now; a request that must compute its prompt again fills the blocks anew.
    third = rig.new(prompt(9), max_new=8, prompt_from=0)
    rig.round()
    index = rig.scheduler.snapshot().index
    assert set(rig.blocks(third)[:2]) <= set(index.values())
    rig.run()
    rig.check_tokens()
    rig.check_idle()


def test_the_least_recently_released_prefix_is_evicted_first_and_its_leaves_before_it() -> None:
    rig = build(page_tokens=4, chunk_tokens=64, num_pages=8, max_num_seqs=2)
    rig.new(prompt(9, seed=1), max_new=1)
    rig.run()
    rig.new(prompt(9, seed=2), max_new=1)
    rig.run()
    rig.new(prompt(9, seed=1), max_new=1)  # touched again: seed 2 is now the older one
    rig.run()
    rig.new(prompt(16, seed=3), max_new=1)  # 3 empty blocks are there, one is evicted
    rig.run()
    left = set(rig.scheduler.snapshot().index)
    assert left >= set(names(prompt(8, seed=1)))
    assert [name in left for name in names(prompt(8, seed=2))] == [True, False]


def test_kv_of_a_request_that_was_cut_short_is_not_published() -> None:
    rig = build(page_tokens=4, chunk_tokens=64)
    request = rig.new(prompt(12), max_new=4)
    rig.plan()
    # The output side found that the logits were not numbers: it ends the request with this result.
    batch, _, _ = rig.queue.popleft()
    rig._finish(request, Finish.ABORT)
    rig.scheduler.advance([ForwardLanded(batch=batch, finished=(request.row,))])
    assert rig.scheduler.snapshot().index == {}
    assert rig.scheduler.empty_lcm_blocks() == rig.scheduler.num_usable_pages


@pytest.mark.parametrize("said", [2, 3, 4])
def test_surplus_forwards_publish_no_token_that_was_not_committed(said: int) -> None:
    rig = build(page_tokens=2, chunk_tokens=64, overlap_schedule_depth=1)
    # A prompt after which the toy model stops by itself.
    tokens = next(p for s in range(900) if len(oracle(p := prompt(5, seed=s), 9, eos_ends=True)) == said)
    request = rig.new(tokens, max_new=9, eos_ends=True)
    while request.finish is Finish.RUNNING:
        rig.plan()
        rig.land(down_to=2)
    rig.run()
    assert request.finish is Finish.STOP
    assert request.decodes == said - 1 + 2  # two forwards were under way when the stop was known
    told = [token for event in rig.events if isinstance(event, BlockStored) for token in event.token_ids]
    whole = tokens + request.out
    assert told == whole[: len(whole) // 2 * 2]


def test_matched_blocks_are_neither_published_nor_granted_again() -> None:
    rig = build(page_tokens=4, chunk_tokens=64)
    rig.new(prompt(18), max_new=3)
    rig.run()
    rig.events.clear()
    again = rig.new(prompt(18), max_new=3)
    assert rig.round().grants[0].indices.tolist() == [0, 1, 2, 3, 4]
    assert rig.round().grants == ()
    assert rig.events == []
    assert rig.scheduler.snapshot().references == dict.fromkeys(rig.blocks(again), 1)
