"""One pool for several groups: where blocks lie, copies over all groups, zeroing, blocks as bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.device.kernels.registry import REGISTRY, KernelSet
from tokenspeed.device.kv.grouped import GroupedPool, attention_pages, grouped_pool
from tokenspeed.device.kv.layout import FULL, STATE, CacheGroup, cache_layout
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import BlockCopy, GroupBlocks

HEADS, TOKENS, DIM, PARENTS = 2, 4, 8, 7
RUN = TOKENS * DIM * 4
LAYOUT = cache_layout(
    (
        CacheGroup(
            name="full", kind=FULL, block_tokens=TOKENS, layers=(1, 3), layer_bytes=2 * HEADS * RUN, multiple_of=RUN
        ),
        CacheGroup(name="state", kind=STATE, block_tokens=16, layers=(0, 2), layer_bytes=1500),
        CacheGroup(name="small", kind=STATE, block_tokens=16, layers=(4,), layer_bytes=700),
    )
)
FULL_IDS, STATE_IDS, SMALL_IDS = ((k, k * PARENTS) for k in (g.blocks_per_parent for g in LAYOUT.groups))


def filled() -> GroupedPool:
    """A pool of noise, the null parent zeros."""
    pool = grouped_pool(LAYOUT, num_parents=PARENTS)
    noise = torch.randint(1, 256, (pool.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    pool.bytes[LAYOUT.parent_bytes : pool.nbytes] = noise[LAYOUT.parent_bytes :]
    return pool


def span(group: int, block: int) -> slice:
    """Bytes of a block, worked out from its parent."""
    count = LAYOUT.groups[group].blocks_per_parent
    first = block // count * LAYOUT.parent_bytes + block % count * (LAYOUT.parent_bytes // count)
    return slice(first, first + LAYOUT.parent_bytes // count)


def test_groups_of_this_test_pack_differently() -> None:
    assert len({group.blocks_per_parent for group in LAYOUT.groups}) == 3


@pytest.mark.contract("SP-51", "SP-52")
def test_a_block_lies_in_its_parent_and_the_null_parent_belongs_to_nobody() -> None:
    pool = filled()
    for group, spec in enumerate(LAYOUT.groups):
        blocks = pool.blocks(group)
        assert blocks.shape == (PARENTS * spec.blocks_per_parent, spec.bytes_per_block)
        for block in range(len(blocks)):
            assert torch.equal(blocks[block], pool.bytes[span(group, block)])
        assert not blocks[: spec.blocks_per_parent].any()
        for block in (-1, 0, spec.blocks_per_parent - 1, len(blocks)):
            with pytest.raises(InvariantBroken):
                pool.zero_blocks((GroupBlocks(group=group, blocks=(block,)),))
            with pytest.raises(InvariantBroken):
                pool.copy_blocks((BlockCopy(group=group, source=spec.blocks_per_parent, destination=block),))
            with pytest.raises(InvariantBroken):
                pool.copy_blocks((BlockCopy(group=group, source=block, destination=spec.blocks_per_parent),))
    for group in (-1, 3):
        with pytest.raises(InvariantBroken, match="cache group"):
            pool.layer_bytes(group)


def copies_of(group: int) -> st.SearchStrategy[BlockCopy]:
    count = LAYOUT.groups[group].blocks_per_parent
    block = st.integers(count, count * PARENTS - 1)
    return st.builds(BlockCopy, group=st.just(group), source=block, destination=block)


@st.composite
def any_copies(draw: st.DrawFn) -> tuple[BlockCopy, ...]:
    """Copies whose destinations do not overlap; sources overlap whatever they like."""
    drawn = draw(st.lists(st.one_of(*(copies_of(group) for group in range(3))), max_size=10))
    taken, kept = set[int](), []
    for copy in drawn:
        place = span(copy.group, copy.destination)
        if taken.isdisjoint(range(place.start, place.stop)):
            taken.update(range(place.start, place.stop))
            kept.append(copy)
    return tuple(kept)


@pytest.mark.contract("RA-33", "SP-37")
@settings(max_examples=150, deadline=None)
@given(any_copies())
def test_copies_equal_reading_every_source_of_every_group_first(copies: tuple[BlockCopy, ...]) -> None:
    pool = filled()
    wanted = pool.bytes.clone()
    for copy in copies:
        wanted[span(copy.group, copy.destination)] = pool.bytes[span(copy.group, copy.source)]
    pool.copy_blocks(copies)
    assert torch.equal(pool.bytes, wanted)


@pytest.mark.contract("RA-33")
def test_a_source_is_read_before_another_groups_copy_overwrites_its_parent() -> None:
    full, state, _ = (group.blocks_per_parent for group in LAYOUT.groups)
    pool = filled()
    wanted = pool.bytes[span(0, 2 * full)].clone()
    # Parent 2 goes from the full group to the state group, in the plan that moves its first block to parent 3.
    pool.copy_blocks(
        (BlockCopy(group=1, source=state, destination=2 * state), BlockCopy(source=2 * full, destination=3 * full))
    )
    assert torch.equal(pool.bytes[span(0, 3 * full)], wanted)


def test_two_copies_to_one_place_are_refused_also_across_groups() -> None:
    full, state, _ = (group.blocks_per_parent for group in LAYOUT.groups)
    for other in (
        BlockCopy(source=full, destination=2 * full),
        BlockCopy(group=1, source=state, destination=2 * state),
    ):
        with pytest.raises(InvariantBroken, match="one place"):
            filled().copy_blocks((BlockCopy(source=3 * full, destination=2 * full), other))


@pytest.mark.contract("RA-34", "SP-39")
def test_a_zeroed_block_is_clean_and_all_others_untouched() -> None:
    pool = filled()
    wanted = pool.bytes.clone()
    state, small = LAYOUT.groups[1].blocks_per_parent, LAYOUT.groups[2].blocks_per_parent
    for group, block in ((1, 3 * state), (1, 3 * state + 1), (2, 5 * small + 2)):
        wanted[span(group, block)] = 0
    pool.zero_blocks(
        (
            GroupBlocks(group=1, blocks=(3 * state, 3 * state + 1)),
            GroupBlocks(group=2, blocks=(5 * small + 2,)),
        )
    )
    assert torch.equal(pool.bytes, wanted)


def test_a_layer_of_a_block_is_one_run_of_bytes_behind_the_layer_before() -> None:
    pool = filled()
    for group, spec in enumerate(LAYOUT.groups):
        view, each = pool.layer_bytes(group), LAYOUT.layer_bytes[group]
        assert view.shape == (PARENTS * spec.blocks_per_parent, spec.layers, each)
        block, first = len(view) - 2, span(group, len(view) - 2).start
        for layer in range(spec.layers):
            at = first + layer * each
            assert torch.equal(view[block, layer], pool.bytes[at : at + each])
        view[block, 0] = 7
        assert (pool.bytes[first : first + each] == 7).all()


def test_pages_of_an_attention_group_address_heads_and_tokens_as_in_a_pool_of_their_own() -> None:
    pool = filled()
    pages = attention_pages(
        pool, 0, kv_heads=HEADS, page_tokens=TOKENS, head_dim=DIM, kernels=REGISTRY[KernelSet.TORCH]
    )
    first = span(0, 9).start
    assert pages.pages[9].data_ptr() == pool.bytes.data_ptr() + first
    for page, layer, kind, head, offset in ((9, 0, 0, 1, 3), (13, 1, 1, 0, 2), (pages.num_pages - 1, 1, 1, 1, 3)):
        run = page * pages.run_stride + kind * HEADS + head
        content = pages.pages[page, layer, kind, head].contiguous().view(torch.uint8)
        assert torch.equal(pages.runs(layer)[run].contiguous().view(torch.uint8).view(-1), content.view(-1))
        vector = pages.vectors(layer)[run * TOKENS + offset]
        assert torch.equal(vector.contiguous().view(torch.uint8), content[offset])
    with pytest.raises(InvariantBroken, match="not such pages"):
        attention_pages(pool, 1, kv_heads=HEADS, page_tokens=TOKENS, head_dim=DIM, kernels=REGISTRY[KernelSet.TORCH])


def test_a_pool_without_a_usable_parent_is_refused() -> None:
    with pytest.raises(InvariantBroken):
        grouped_pool(LAYOUT, num_parents=1)
