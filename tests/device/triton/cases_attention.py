"""Attention in Triton equals torch's; run by `test_triton_kernels.py`."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.device.attention.batch import KvGeometry, attention_batch
from tokenspeed.device.kernels.paged import PagedBatch, PagedLayout, token_places
from tokenspeed.device.kernels.registry import KernelSet, kernel_set
from tokenspeed.device.step import RaggedRows

TORCH, TRITON = kernel_set(KernelSet.TORCH), kernel_set(KernelSet.TRITON)
PAGE, STRIDE_PAD = 4, 3


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


def paged(counts: list[int], contexts: list[int], *, kv_heads: int, window: int = 0) -> tuple[PagedBatch, int]:
    """A batch whose rows' blocks are strewn over the pool, and the number of the pool's runs.

    Entries that no query may look at lead to page 0.
    """
    blocks = [-(-context // PAGE) for context in contexts]
    ids = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(3)).int() + 1
    tables, at = torch.zeros(len(counts), max(blocks), dtype=torch.int32), 0
    for row, count in enumerate(blocks):
        behind = max(contexts[row] - counts[row] - window + 1, 0) // PAGE if window else 0
        tables[row, behind:count] = ids[at + behind : at + count]
        at += count
    offsets = torch.tensor([0, *counts]).cumsum(0)
    layout = PagedLayout(page_tokens=PAGE, kv_heads=kv_heads, run_stride=2 * kv_heads + STRIDE_PAD, window=window)
    batch = PagedBatch(tables=tables, offsets=offsets, contexts=torch.tensor(contexts), layout=layout)
    return batch, (sum(blocks) + 1) * layout.run_stride


def pool(runs: int, dim: int) -> torch.Tensor:
    """A pool whose null page would poison whoever reads it with a weight."""
    vectors = drawn(runs * PAGE, dim, seed=5)
    vectors[:PAGE] = 1e30
    return vectors


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 3, 12), (6, 1, 24)])
@pytest.mark.parametrize("window", [0, 7])
def test_decode_equals_the_reference(heads: int, kv_heads: int, dim: int, window: int) -> None:
    batch, runs = paged([1] * 4, [1, 9, 40, 33], kv_heads=kv_heads, window=window)
    q = drawn(4, heads + 2, dim)[:, :heads]
    vectors = pool(runs, dim)
    near(TRITON.paged_decode(q, vectors, batch), TORCH.paged_decode(q, vectors, batch))


@pytest.mark.parametrize("window", [0, 600])
def test_decode_of_contexts_that_several_programs_share_equals_the_reference(window: int) -> None:
    batch, runs = paged([1, 1], [1100, 3], kv_heads=1, window=window)
    q, vectors = drawn(2, 2, 16), pool(runs, 16)
    near(TRITON.paged_decode(q, vectors, batch), TORCH.paged_decode(q, vectors, batch))


@pytest.mark.parametrize("window", [0, 5])
def test_prefill_of_chunks_and_decodes_mixed_equals_the_reference(window: int) -> None:
    counts, contexts = [5, 1, 17, 1, 33], [5, 30, 40, 1, 33]
    batch, runs = paged(counts, contexts, kv_heads=2, window=window)
    q, vectors = drawn(sum(counts), 4, 12), pool(runs, 12)
    near(TRITON.paged_prefill(q, vectors, batch), TORCH.paged_prefill(q, vectors, batch))


def test_decode_and_prefill_agree_on_decodes() -> None:
    batch, runs = paged([1] * 3, [2, 50, 16], kv_heads=1)
    q, vectors = drawn(3, 2, 16), pool(runs, 16)
    near(TRITON.paged_prefill(q, vectors, batch), TRITON.paged_decode(q, vectors, batch))


def test_a_padded_row_gets_zeros_and_has_no_places() -> None:
    batch, runs = paged([1, 1], [6, 9], kv_heads=1)
    padded = PagedBatch(
        tables=torch.cat((batch.tables, torch.zeros(1, batch.tables.shape[1], dtype=torch.int32))),
        offsets=torch.arange(4),
        contexts=torch.tensor([6, 9, 0]),
        layout=batch.layout,
    )
    q, vectors = drawn(3, 2, 16), pool(runs, 16)
    for kernels in (TORCH, TRITON):
        got = kernels.paged_decode(q, vectors, padded)
        near(got[:2], TORCH.paged_decode(q[:2], vectors, batch))
        assert not got[2].any()
    assert token_places(padded, torch.tensor([5, 8, 0])).view(3, 2).lt(0).tolist() == [[False] * 2] * 2 + [[True] * 2]


@pytest.mark.parametrize("window", [0, 6])
def test_kernels_over_gathered_pages_equal_torch(window: int) -> None:
    counts, contexts = [1, 1, 3, 18], [5, 14, 11, 40]
    batch, runs = paged(counts, contexts, kv_heads=2, window=window)
    starts = [context - count for context, count in zip(contexts, counts, strict=True)]
    rows = RaggedRows(
        token_ids=torch.zeros(sum(counts), dtype=torch.int64),
        positions=torch.cat([torch.arange(*ends) for ends in zip(starts, contexts, strict=True)]),
        offsets=batch.offsets,
        contexts=batch.contexts,
        block_tables=batch.tables,
        logit_tokens=torch.zeros(0, dtype=torch.int64),
    )
    geometry = KvGeometry(page_tokens=PAGE, kv_heads=2, head_dim=12, run_stride=batch.layout.run_stride, window=window)
    plan = attention_batch(rows, geometry, batch.tables)
    assert torch.equal(plan.places, token_places(batch, rows.positions))
    q, by_run = drawn(sum(counts), 4, 12), drawn(runs, PAGE * 12, seed=5)
    for group in plan.paged:
        chosen = q if group.tokens is None else q[group.tokens]
        by_row = chosen.view(group.rows, -1, 4, 12).transpose(1, 2)
        arguments = (by_row, by_run, group.pages, group.mask, group.space)
        near(TRITON.decode_attention(*arguments), TORCH.decode_attention(*arguments))


def test_a_first_chunk_equals_torch() -> None:
    wide = drawn(1, 8, 21, 12)
    q, k, v = wide[:, :4], wide[:, 4:6], wide[:, 6:]
    near(TRITON.fresh_attention(q, k, v), TORCH.fresh_attention(q, k, v))
