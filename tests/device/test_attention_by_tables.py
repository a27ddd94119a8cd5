"""Models whose kernels follow block tables themselves, as a graphics device's do, compute what the others compute."""

from __future__ import annotations

import attrs
import pytest
import torch
from grouped_rows import run_over
from paged_rows import paged_run

from tokenspeed.checkpoint.random_models import open_random_checkpoint
from tokenspeed.device.kernels.registry import Kernels, KernelSet, kernel_set
from tokenspeed.device.kv.grouped import GroupedPool
from tokenspeed.device.weights.bind import LoadedModel, bind_model
from tokenspeed.device.weights.load import load_weights

LISTED = kernel_set(KernelSet.TORCH)
FOLLOWING = attrs.evolve(LISTED, follows_tables=True)
PAGES, PAGE_TOKENS = 64, 8


def bound(kind: str, kernels: Kernels) -> LoadedModel:
    weights = load_weights(attrs.evolve(open_random_checkpoint(kind, served_name=kind), seed=1))
    return bind_model(weights, num_pages=PAGES, page_tokens=PAGE_TOKENS, kernels=kernels)


def ids(length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["tiny-llama", "tiny-qwen3"])
def test_chunks_and_decodes_mixed_have_the_logits_of_listed_pages(kind: str) -> None:
    results = []
    for kernels in (LISTED, FOLLOWING):
        run = paged_run(bound(kind, kernels).step, num_pages=PAGES, page_tokens=PAGE_TOKENS)
        rows = [run.sequence(ids(length)) for length in (19, 40, 7)]
        first = run.forward([(rows[0], 18), (rows[1], 25)])
        mixed = run.forward([(rows[0], 1), (rows[1], 15), (rows[2], 7)])
        for row in rows:
            row.tokens.append(5)
        results.append(torch.cat((first, mixed, run.forward([(row, 1) for row in rows]))))
    near(*results)


def test_window_layers_see_as_much_as_with_listed_pages() -> None:
    results = []
    for kernels in (LISTED, FOLLOWING):
        model = bound("tiny-gemma3", kernels)
        assert isinstance(model.pool, GroupedPool)
        run = run_over(model.step, model.pool)
        row, got = run.sequence(ids(90)), []
        while row.computed < len(row.tokens):
            got.append(run.forward([(row, min(31, len(row.tokens) - row.computed))], all_logits=True))
        row.tokens.append(9)
        got.append(run.forward([(row, 1)]))
        results.append(torch.cat(got))
    near(*results)


def test_numbers_that_a_page_held_before_do_not_reach_its_new_owner() -> None:
    model = bound("tiny-llama", FOLLOWING)
    run = paged_run(model.step, num_pages=PAGES, page_tokens=PAGE_TOKENS)
    clean = run.forward([(run.sequence(ids(11)), 11)])
    model.pool.layer_bytes(0)[1:].fill_(0xFF)  # as float32 not a number
    near(run.forward([(run.sequence(ids(11)), 11)]), clean)
