"""Every kernel of the registry against a plain computation in float64."""

from __future__ import annotations

import math

import attrs
import pytest
import torch

from tokenspeed.device.attention.batch import KvGeometry, attention_batch
from tokenspeed.device.kernels.linear import DenseLinear
from tokenspeed.device.kernels.registry import REGISTRY, Kernels
from tokenspeed.device.step import RaggedRows

SETS = list(REGISTRY.values())
IDS = [kind.value for kind in REGISTRY]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(got: torch.Tensor, wanted: torch.Tensor, within: float = 2e-5) -> None:
    torch.testing.assert_close(got.double(), wanted.double(), rtol=within, atol=within)


def test_every_kernel_set_has_every_kernel() -> None:
    for kernels in SETS:
        names = [field.name for field in attrs.fields(Kernels) if field.type != "bool"]
        assert all(callable(getattr(kernels, name)) for name in names)


@pytest.mark.parametrize("kernels", SETS, ids=IDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 32, 70])
def test_linear_is_a_matrix_product_and_a_bias(kernels: Kernels, bias: bool, tokens: int) -> None:
    weight, x = drawn(24, 40, seed=1), drawn(tokens, 40, seed=2)
    shift = drawn(24, seed=3) if bias else None
    wanted = x.double() @ weight.double().T + (0 if shift is None else shift.double())
    with torch.inference_mode():
        near(kernels.linear(weight, shift)(x), wanted)
        near(DenseLinear(weight, shift)(x), wanted)


@pytest.mark.parametrize("kernels", SETS, ids=IDS)
def test_rms_norm_divides_by_the_root_of_the_mean_square(kernels: Kernels) -> None:
    x, weight = drawn(5, 12) * 0.01, drawn(12, seed=1)
    wanted = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    near(kernels.rms_norm(x, weight, 1e-3), wanted)


@pytest.mark.parametrize("kernels", SETS, ids=IDS)
def test_rotary_turns_pairs_of_a_view_in_place_and_touches_nothing_else(kernels: Kernels) -> None:
    wide, angles = drawn(4, 5, 8), drawn(4, 4, seed=1)
    before = wide.clone()
    kernels.rotary(wide[:, :3], torch.polar(torch.ones_like(angles), angles)[:, None])
    pairs = before.double().view(4, 5, 4, 2)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    turned = torch.stack((pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin), -1)
    near(wide[:, :3], turned.view(4, 5, 8)[:, :3])
    assert torch.equal(wide[:, 3:], before[:, 3:])


@pytest.mark.parametrize("kernels", SETS, ids=IDS)
def test_silu_mul_gates_the_second_half_by_the_first(kernels: Kernels) -> None:
    both = drawn(6, 20) * 3
    gate, up = both[:, :10].double(), both[:, 10:].double()
    near(kernels.silu_mul(both), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("kernels", SETS, ids=IDS)
def test_kv_write_puts_each_vector_where_it_is_told(kernels: Kernels) -> None:
    vectors, wide = torch.zeros(30, 4), drawn(3, 5, 4)
    places = torch.tensor([7, 3, 29, 0, 11, 12])
    kernels.kv_write(vectors, places, wide[:, 3:])
    assert torch.equal(vectors[places], wide[:, 3:].reshape(6, 4))
    assert vectors.abs().sum(1).count_nonzero() == 6


@pytest.mark.parametrize("kernels", SETS, ids=IDS)
def test_copies_and_zeroing_work_on_whole_pages(kernels: Kernels) -> None:
    pages = torch.arange(5.0)[:, None].repeat(1, 3)
    kernels.copy_pages(pages, ((1, 2), (2, 1), (4, 3)))
    assert pages[:, 0].tolist() == [0, 2, 1, 4, 4]
    kernels.zero_pages(pages[:, 1:], (4, 1))
    assert pages.tolist() == [[0, 0, 0], [2, 0, 0], [1, 1, 1], [4, 4, 4], [4, 0, 0]]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, last: int) -> torch.Tensor:
    """One query ``[heads, dim]`` over the first `last` of ``[kv_heads, tokens, dim]``, in float64."""
    out = []
    for head in range(len(q)):
        shared = head * len(k) // len(q)
        scores = k[shared, :last].double() @ q[head].double() / math.sqrt(q.shape[1])
        out.append(scores.softmax(0) @ v[shared, :last].double())
    return torch.stack(out)


@pytest.mark.parametrize("kernels", SETS, ids=IDS)
def test_fresh_attention_is_causal(kernels: Kernels) -> None:
    q, k, v = drawn(1, 4, 7, 8), drawn(1, 2, 7, 8, seed=1), drawn(1, 2, 7, 8, seed=2)
    got = kernels.fresh_attention(q, k, v)
    for i in range(7):
        near(got[0, :, i], attention(q[0, :, i], k[0], v[0], i + 1))


@pytest.mark.parametrize("kernels", SETS, ids=IDS)
def test_gelu_tanh_mul_gates_the_second_half_by_the_first(kernels: Kernels) -> None:
    both = drawn(5, 2 * 24) * 3
    gate, up = both.double().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    near(kernels.gelu_tanh_mul(both), (gate * (1 + inner.tanh()) / 2 * up).float())


@pytest.mark.parametrize("kernels", SETS, ids=IDS)
@pytest.mark.parametrize("page_tokens", [4, 16])
def test_paged_attention_reads_each_rows_own_pages(kernels: Kernels, page_tokens: int) -> None:
    kv_heads, dim, num_pages = 2, 8, 40
    contexts, counts = [9, 30, 17, 5], [1, 6, 1, 1]
    pool = drawn(num_pages, 2 * kv_heads, page_tokens, dim)
    pool[0] = 0
    width = -(-max(contexts) // page_tokens)
    order = iter((torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist())
    tables = torch.zeros(4, width, dtype=torch.int32)
    for row, context in enumerate(contexts):
        for block in range(-(-context // page_tokens)):
            tables[row, block] = next(order)
    offsets = [0, 1, 7, 8, 9]
    batch = attention_batch(
        RaggedRows(
            token_ids=torch.zeros(9, dtype=torch.int64),
            positions=torch.tensor([8, *range(24, 30), 16, 4]),
            offsets=torch.tensor(offsets),
            contexts=torch.tensor(contexts),
            block_tables=tables,
            logit_tokens=torch.zeros(0, dtype=torch.int64),
        ),
        KvGeometry(page_tokens=page_tokens, kv_heads=kv_heads, head_dim=dim, run_stride=2 * kv_heads),
        tables,
    )
    assert [(group.rows, group.decode) for group in batch.paged] == [(3, True), (1, False)]
    queries, runs = drawn(9, 4, dim, seed=5), pool.view(-1, page_tokens * dim)
    for group, kernel in zip(batch.paged, (kernels.decode_attention, kernels.prefill_attention), strict=True):
        assert group.tokens is not None
        q = queries[group.tokens].view(group.rows, -1, 4, dim).transpose(1, 2)
        got = kernel(q, runs, group.pages, group.mask, group.space).transpose(1, 2).reshape(-1, 4, dim)
        for index, token in enumerate(group.tokens.tolist()):
            row = next(r for r in range(4) if offsets[r] <= token < offsets[r + 1])
            last = contexts[row] - counts[row] + (token - offsets[row]) + 1
            own = pool[tables[row].long()].transpose(0, 1).reshape(2 * kv_heads, -1, dim)
            near(got[index], attention(queries[token], own[:kv_heads], own[kv_heads:], last))
    assert len(batch.opened) == sum(
        c % page_tokens != 0 and c // page_tokens * page_tokens >= c - n for c, n in zip(contexts, counts, strict=True)
    )
