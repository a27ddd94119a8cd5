"""How a ragged batch is split into calls of attention."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tokenspeed.device.attention.batch import SPACE_BYTES, AttentionBatch, KvGeometry, attention_batch
from tokenspeed.device.step import RaggedRows

SMALL = KvGeometry(page_tokens=8, kv_heads=2, head_dim=16, run_stride=8)
LARGE = KvGeometry(page_tokens=64, kv_heads=8, head_dim=128, run_stride=32)


def planned(work: Sequence[tuple[int, int]], kv: KvGeometry = SMALL) -> AttentionBatch:
    """`work`: context and count of each row; row i has pages ``1 + 100 * i, 2 + 100 * i, …``."""
    contexts, counts = zip(*work, strict=True)
    width = -(-max(contexts) // kv.page_tokens)
    tables = torch.zeros(len(work), width, dtype=torch.int32)
    positions: list[int] = []
    for row, (context, count) in enumerate(work):
        blocks = -(-context // kv.page_tokens)
        tables[row, :blocks] = torch.arange(blocks, dtype=torch.int32) + 1 + 100 * row
        positions += range(context - count, context)
    return attention_batch(
        RaggedRows(
            token_ids=torch.zeros(len(positions), dtype=torch.int64),
            positions=torch.tensor(positions),
            offsets=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]),
            contexts=torch.tensor(contexts),
            block_tables=tables,
            logit_tokens=torch.zeros(0, dtype=torch.int64),
        ),
        kv,
        tables,
    )


def tokens(batch: AttentionBatch) -> list[list[int] | None]:
    return [None if group.tokens is None else group.tokens.tolist() for group in batch.paged]


def test_decodes_of_like_context_are_one_call_over_all_tokens_in_order() -> None:
    assert tokens(planned([(9, 1), (100, 1), (40, 1)])) == [None]


def test_decodes_of_unlike_context_are_padded_to_their_like_only() -> None:
    batch = planned([(900, 1), (9, 1), (800, 1), (300, 1), (20, 1)])
    assert tokens(batch) == [[1, 4], [3], [2, 0]]
    assert [group.mask.shape[-1] for group in batch.paged] == [24, 304, 904]


def test_chunks_with_cached_context_and_first_chunks_are_kept_apart() -> None:
    batch = planned([(30, 12), (7, 7), (31, 1), (16, 16)])
    assert tokens(batch) == [[19], list(range(12))]
    assert [group.decode for group in batch.paged] == [True, False]
    assert [(row.first, row.last) for row in batch.fresh] == [(12, 19), (20, 36)]


def test_a_prompt_of_one_token_is_a_decode() -> None:
    batch = planned([(1, 1)])
    assert (tokens(batch), batch.fresh) == ([None], ())


def test_no_call_of_several_rows_needs_more_scratch_than_the_limit() -> None:
    batch = planned([(120, 1)] * 7 + [(2000, 1)], LARGE)
    assert sorted(token for group in tokens(batch) for token in group or []) == list(range(8))
    for group in batch.paged:
        assert group.rows == 1 or group.space.nbytes <= SPACE_BYTES
    assert max(group.rows for group in batch.paged) > 1


def test_calls_share_their_scratch() -> None:
    batch = planned([(300, 1)] * 4, LARGE)
    assert len(batch.paged) > 2
    assert len({group.space.data_ptr() for group in batch.paged}) == 1


@pytest.mark.parametrize(
    ("work", "opened"),
    [
        ((16, 16), ()),  # ends with a full page
        ((17, 17), (3,)),
        ((17, 1), (3,)),  # a decode begins a page
        ((18, 1), ()),  # a decode goes on in a page
        ((18, 3), (3,)),
        ((24, 1), ()),
    ],
)
def test_a_page_is_opened_when_its_first_token_is_written_and_not_its_last(
    work: tuple[int, int], opened: tuple[int, ...]
) -> None:
    assert planned([work]).opened == opened


def test_every_token_has_its_own_place() -> None:
    batch = planned([(30, 12), (7, 7), (31, 1)])
    places = batch.places.tolist()
    assert len(places) == 20 * 2 * SMALL.kv_heads
    assert len(set(places)) == len(places)
    # Row 2's token at position 30: page 204, offset 6, head 3 of the page's runs.
    assert places[-1] == (204 * SMALL.run_stride + 3) * SMALL.page_tokens + 6


WINDOW = KvGeometry(page_tokens=8, kv_heads=2, head_dim=16, run_stride=8, window=20)


def first_pages(batch: AttentionBatch, group: int = 0) -> list[int]:
    """The pages whose keys of head 0 are gathered for the group's first row."""
    paged = batch.paged[group]
    keys = paged.pages.view(2, paged.rows, WINDOW.kv_heads, -1)[0, 0, 0]
    return [int(run) // WINDOW.run_stride for run in keys]


def test_a_decode_with_a_window_gathers_the_blocks_it_sees_and_no_other() -> None:
    batch = planned([(100, 1)], WINDOW)
    assert first_pages(batch) == [1 + block for block in range(80 // 8, 13)]
    seen = batch.paged[0].mask.isfinite().flatten()
    assert seen.nonzero().flatten().tolist() == list(range(20))
    batch = planned([(99, 1)], WINDOW)
    assert first_pages(batch) == [1 + block for block in range(79 // 8, 13)]
    assert batch.paged[0].mask.isfinite().flatten().nonzero().flatten().tolist() == list(range(7, 27))


def test_a_chunk_with_a_window_gathers_from_what_its_first_query_sees() -> None:
    batch = planned([(60, 12)], WINDOW)
    assert first_pages(batch) == [1 + block for block in range(29 // 8, 8)]
    mask = batch.paged[0].mask[0, 0].isfinite()
    for query in range(12):
        own = 48 + query - 24  # the first gathered block begins at position 24
        assert mask[query].nonzero().flatten().tolist() == list(range(own - 19, own + 1))


def test_a_first_chunk_longer_than_the_window_is_masked() -> None:
    batch = planned([(21, 21), (20, 20)], WINDOW)
    assert [(row.first, row.last) for row in batch.fresh] == [(21, 41)]
    assert tokens(batch) == [list(range(21))]
    assert not batch.paged[0].mask[0, 0, 20, 0].isfinite()
    assert batch.paged[0].mask[0, 0, 19, 0].isfinite()


def test_decodes_with_a_window_are_one_call_however_long_their_contexts_are() -> None:
    assert tokens(planned([(900, 1), (25, 1), (300, 1)], WINDOW)) == [None]
    assert len(planned([(900, 1), (25, 1), (300, 1)]).paged) == 3
