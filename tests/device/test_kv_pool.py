"""Pages of the KV pool: copies, zeroing, layout, limits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.checkpoint.random_models import RANDOM_MODELS
from tokenspeed.device.kernels.registry import REGISTRY, KernelSet
from tokenspeed.device.kv.layout import attention_group
from tokenspeed.device.kv.pool import KvPool, kv_pool
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import BlockCopy, GroupBlocks

CONFIG = RANDOM_MODELS["tiny-llama"]
PAGES = 9
PAGE_BYTES = attention_group(CONFIG, 8)[0].block_bytes


def numbered(pages: int = PAGES) -> KvPool:
    """A pool whose page i holds the number i, the null page zeros."""
    pool = kv_pool(CONFIG, num_pages=pages, page_tokens=8, kernels=REGISTRY[KernelSet.TORCH])
    pool.pages[:] = torch.arange(float(pages)).view(-1, 1, 1, 1, 1, 1)
    return pool


def copies(*pairs: tuple[int, int]) -> tuple[BlockCopy, ...]:
    return tuple(BlockCopy(source=source, destination=destination) for source, destination in pairs)


def contents(pool: KvPool) -> list[float]:
    """The number in each page, which must be the same all over the page."""
    flat = pool.pages.view(pool.num_pages, -1)
    assert torch.equal(flat.amin(1), flat.amax(1))
    return flat[:, 0].tolist()


def test_the_size_is_what_a_page_costs_times_the_pages() -> None:
    pool = numbered()
    assert pool.nbytes == PAGES * PAGE_BYTES
    assert PAGE_BYTES == 2 * 2 * 2 * 8 * 16 * 4  # layers, k and v, heads, tokens, dim, float32
    assert (pool.num_pages, pool.page_tokens) == (PAGES, 8)


@pytest.mark.contract("RA-33")
def test_a_chain_of_copies_reads_every_source_before_it_is_overwritten() -> None:
    pool = numbered()
    pool.copy_blocks(copies((1, 2), (2, 3), (3, 4)))
    assert contents(pool) == [0, 1, 1, 2, 3, 5, 6, 7, 8]


@pytest.mark.contract("RA-33")
def test_pages_can_be_exchanged_and_fanned_out_in_one_call() -> None:
    pool = numbered()
    pool.copy_blocks(copies((5, 6), (6, 5), (5, 7), (8, 8)))
    assert contents(pool) == [0, 1, 2, 3, 4, 6, 5, 5, 8]


@pytest.mark.contract("RA-33")
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, PAGES - 1), st.integers(1, PAGES - 1)), max_size=8, unique_by=lambda p: p[1]))
def test_any_set_of_copies_equals_reading_all_sources_first(pairs: list[tuple[int, int]]) -> None:
    pool = numbered()
    wanted = contents(pool)
    for source, destination in pairs:
        wanted[destination] = source
    pool.copy_blocks(copies(*pairs))
    assert contents(pool) == wanted


@pytest.mark.contract("RA-34")
def test_zeroed_pages_are_clean_over_all_layers_and_their_neighbours_untouched() -> None:
    pool = numbered()
    pool.zero_blocks((GroupBlocks(blocks=(2, 7)),))
    assert contents(pool) == [0, 1, 0, 3, 4, 5, 6, 0, 8]


def test_the_null_page_and_pages_outside_are_refused() -> None:
    pool = numbered()
    for pairs in (((1, 0),), ((0, 1),), ((1, PAGES),), ((-1, 1),), ((1, 2), (3, 2))):
        with pytest.raises(InvariantBroken):
            pool.copy_blocks(copies(*pairs))
    for block in (0, PAGES, -1):
        with pytest.raises(InvariantBroken):
            pool.zero_blocks((GroupBlocks(blocks=(1, block)),))
    with pytest.raises(InvariantBroken, match="cache group"):
        pool.copy_blocks((BlockCopy(group=1, source=1, destination=2),))
    with pytest.raises(InvariantBroken, match="cache group"):
        pool.zero_blocks((GroupBlocks(group=1, blocks=(1,)),))
    assert contents(pool) == list(range(PAGES))


def test_a_block_can_be_moved_as_bytes_layer_by_layer() -> None:
    pool = numbered()
    view = pool.layer_bytes(0)
    assert view.shape == (PAGES, CONFIG.num_layers, PAGE_BYTES // CONFIG.num_layers)
    view[3, 1] = view[5, 1]
    assert torch.equal(pool.pages[3, 1], pool.pages[5, 1])
    assert torch.equal(pool.pages[3, 0], torch.full_like(pool.pages[3, 0], 3.0))
    with pytest.raises(InvariantBroken, match="cache group"):
        pool.layer_bytes(1)


def test_a_pool_without_a_usable_page_is_refused() -> None:
    for pages, tokens in ((1, 8), (0, 8), (4, 0)):
        with pytest.raises(InvariantBroken):
            kv_pool(CONFIG, num_pages=pages, page_tokens=tokens, kernels=REGISTRY[KernelSet.TORCH])


def test_the_views_of_a_layer_address_heads_and_tokens_as_documented() -> None:
    pool = numbered()
    pages, layers, two, heads, tokens, dim = pool.pages.shape
    pool.pages.copy_(torch.arange(float(pool.pages.numel())).view(pool.pages.shape))
    for page, layer, kind, head, offset in ((3, 0, 0, 1, 5), (8, 1, 1, 0, 7), (1, 1, 0, 0, 0)):
        run = page * pool.run_stride + kind * heads + head
        assert torch.equal(pool.runs(layer)[run].view(tokens, dim), pool.pages[page, layer, kind, head])
        assert torch.equal(pool.vectors(layer)[run * tokens + offset], pool.pages[page, layer, kind, head, offset])
    assert pool.run_stride == layers * two * heads
    assert pages == PAGES
