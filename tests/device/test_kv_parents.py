"""How parents are formed of blocks of different sizes, and what a layout says of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.device.kv.layout import FULL, STATE, WINDOW, CacheGroup, cache_layout
from tokenspeed.device.kv.parents import MOST_BLOCKS, MOST_WASTE, BlockSize, form_parents
from tokenspeed.errors import SettingsError

KIB = 1024


def sizes(*natural: int, multiple_of: int = 1) -> tuple[BlockSize, ...]:
    return tuple(BlockSize(name=f"g{i}", nbytes=n, multiple_of=multiple_of) for i, n in enumerate(natural))


@pytest.mark.contract("SP-51")
@pytest.mark.parametrize(
    ("natural", "parent", "counts"),
    [
        ((96 * KIB,), 96 * KIB, (1,)),  # one group: a parent is a block
        ((100, 100), 100, (1, 1)),
        ((480 * KIB, 96 * KIB), 480 * KIB, (1, 5)),
        ((95, 100), 100, (1, 1)),  # 5 % of waste is bearable
        ((89, 100), 540, (6, 5)),  # 11 % is not: the first sizes that go together better
        ((60, 100), 300, (5, 3)),
        ((100, 7), 105, (1, 15)),
        ((16 * 10, 10), 160, (1, 16)),
        ((100, 50, 25), 100, (1, 2, 4)),
    ],
)
def test_the_smallest_parent_within_the_limits_is_chosen(
    natural: tuple[int, ...], parent: int, counts: tuple[int, ...]
) -> None:
    made = form_parents(sizes(*natural))
    assert (made.parent_bytes, made.blocks_per_parent) == (parent, counts)
    assert made.block_bytes == tuple(parent // count for count in counts)


def test_padded_blocks_begin_where_the_model_needs_them() -> None:
    made = form_parents((BlockSize(name="full", nbytes=1000, multiple_of=64), BlockSize(name="state", nbytes=4000)))
    assert made.parent_bytes % (64 * made.blocks_per_parent[0]) == 0
    assert all(size % 64 == 0 for size in made.block_bytes[:1])
    assert made.waste((BlockSize(name="full", nbytes=1000), BlockSize(name="state", nbytes=4000))) <= MOST_WASTE


@pytest.mark.parametrize("natural", [(1000, 10), (20 * 16, 10), (5, 1 << 30)])
def test_blocks_that_do_not_go_together_are_refused_with_the_figures(natural: tuple[int, int]) -> None:
    with pytest.raises(SettingsError) as caught:
        form_parents(sizes(*natural))
    text = str(caught.value)
    for figure in (f"g0 {natural[0]:,} bytes", f"g1 {natural[1]:,} bytes", "at most 16 blocks", "10% is allowed"):
        assert figure in text
    assert "wastes at least" in text


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.sampled_from([1, 4, 64])), min_size=2, max_size=2),
)
def test_what_is_formed_keeps_the_limits(natural: list[tuple[int, int]]) -> None:
    given_sizes = tuple(BlockSize(name=f"g{i}", nbytes=n, multiple_of=m) for i, (n, m) in enumerate(natural))
    try:
        made = form_parents(given_sizes)
    except SettingsError:
        return
    assert made.waste(given_sizes) <= MOST_WASTE
    for size, padded, count in zip(given_sizes, made.block_bytes, made.blocks_per_parent, strict=True):
        assert 1 <= count <= MOST_BLOCKS
        assert padded * count == made.parent_bytes
        assert padded >= size.nbytes
        assert padded % size.multiple_of == 0


GROUPS = (
    CacheGroup(name="full", kind=FULL, block_tokens=16, layers=(1, 3), layer_bytes=1024),
    CacheGroup(name="window", kind=WINDOW, block_tokens=16, layers=(0,), layer_bytes=1024, window_tokens=40),
    CacheGroup(name="state", kind=STATE, block_tokens=64, layers=(2, 4), layer_bytes=2048),
)


@pytest.mark.contract("SP-39", "SP-51")
def test_a_layout_tells_planning_what_each_group_is() -> None:
    layout = cache_layout(GROUPS)
    assert (layout.parent_bytes, layout.page_tokens) == (4096, 16)
    full, window, state = layout.groups
    assert [(g.name, g.kind, g.block_tokens, g.layers) for g in layout.groups] == [
        ("full", "full", 16, 2),
        ("window", "window", 16, 1),
        ("state", "state", 64, 2),
    ]
    assert [(g.bytes_per_block, g.blocks_per_parent) for g in layout.groups] == [(2048, 2), (1024, 4), (4096, 1)]
    assert (full.window_tokens, window.window_tokens, state.window_tokens) == (0, 40, 0)
    assert [g.zero_new_blocks for g in layout.groups] == [False, False, True]


@pytest.mark.parametrize(
    ("tokens", "requests", "parents"),
    [
        (1, 1, 1 + 1 + 2),
        (32, 1, 1 + 1 + 2),
        (33, 1, 2 + 1 + 2),
        (1600, 1, 50 + 2 + 2),  # the window's blocks stay few: 40 + 24 tokens and one block more
        (1600, 8, 50 + 10 + 16),
    ],
)
def test_parents_are_counted_group_by_group(tokens: int, requests: int, parents: int) -> None:
    assert cache_layout(GROUPS).parents_for(tokens, flying=25, requests=requests) == parents
