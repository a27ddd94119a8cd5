"""Norms, rotary, gates, moves and pages in Triton equal torch's; run by `test_triton_kernels.py`."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.device.kernels.registry import Kernels, KernelSet, kernel_set

TORCH, TRITON = kernel_set(KernelSet.TORCH), kernel_set(KernelSet.TRITON)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(3, 12), (2, 3, 16)])
def test_both_norms_equal_torch(shape: tuple[int, ...]) -> None:
    x, weight = drawn(*shape) * 0.1, drawn(shape[-1], seed=1)
    near(TRITON.rms_norm(x, weight, 1e-3), TORCH.rms_norm(x, weight, 1e-3))
    near(TRITON.gemma_rms_norm(x, weight, 1e-3), TORCH.gemma_rms_norm(x, weight, 1e-3))


def test_rotary_turns_a_view_in_place_and_touches_nothing_else() -> None:
    angles = drawn(3, 6, seed=1)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    results = []
    for kernels in (TORCH, TRITON):
        wide = drawn(3, 5, 12)
        kernels.rotary(wide[:, :3], turns)
        results.append(wide)
    near(results[1], results[0])
    assert torch.equal(results[1][:, 3:], drawn(3, 5, 12)[:, 3:])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter; 1 / inf is the 0 wanted
def test_gates_equal_torch_on_rows_wider_than_a_program_and_far_from_zero() -> None:
    both = drawn(2, 2 * 1030) * 20
    near(TRITON.silu_mul(both), TORCH.silu_mul(both))
    near(TRITON.gelu_tanh_mul(both), TORCH.gelu_tanh_mul(both))


def test_vectors_go_where_they_are_told_and_are_found_there() -> None:
    wide, places = drawn(3, 5, 12), torch.tensor([7, 3, 29, 0, 11, 12])
    pools = [torch.zeros(30, 12), torch.zeros(30, 12)]
    for kernels, pool in zip((TORCH, TRITON), pools, strict=True):
        kernels.kv_write(pool, places, wide[:, 3:])
    assert torch.equal(pools[1], pools[0])
    assert torch.equal(TRITON.kv_gather(pools[1], places), wide[:, 3:].reshape(6, 12))


def test_a_vector_of_a_padded_row_goes_nowhere() -> None:
    pool, kv = torch.zeros(6, 4), drawn(2, 2, 4)
    TRITON.kv_write(pool, torch.tensor([4, 5, -1, -1]), kv)
    assert torch.equal(pool[4:], kv[0])
    assert not pool[:4].any()


@pytest.mark.contract("RA-33")
@pytest.mark.parametrize(
    "pairs",
    [
        ((1, 2), (2, 3), (3, 1)),  # a ring
        ((1, 2), (2, 3), (3, 4)),  # a chain
        ((4, 1), (4, 2), (1, 4)),  # a source read twice and written
        ((5, 5), (1, 2)),  # itself
    ],
)
def test_copies_are_as_if_every_source_were_read_first(pairs: tuple[tuple[int, int], ...]) -> None:
    before = drawn(6, 2, 600)
    wanted, got = before.clone(), before.clone()
    for source, destination in pairs:
        wanted[destination] = before[source]
    TRITON.copy_pages(got, pairs)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("kernels", [TORCH, TRITON], ids=["torch", "triton"])
def test_zeroing_some_layers_leaves_the_others(kernels: Kernels) -> None:
    pages = drawn(5, 3, 7, 4)
    wanted = pages.clone()
    wanted[[1, 4], 1:] = 0
    kernels.zero_pages(pages[:, 1:], (1, 4))
    assert torch.equal(pages, wanted)


def test_nothing_to_do_is_done() -> None:
    empty = torch.zeros(0, 4)
    TRITON.copy_pages(drawn(2, 4), ())
    TRITON.zero_pages(drawn(2, 4), ())
    TRITON.rotary(torch.zeros(0, 2, 4), torch.zeros(0, 1, 2, dtype=torch.complex64))
    TRITON.kv_write(drawn(2, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2, 4))
    assert TRITON.rms_norm(empty, torch.ones(4), 1e-5).shape == TRITON.silu_mul(torch.zeros(0, 8)).shape == (0, 4)
