"""Gemma 3 in torch: the mathematics, and the window over paged keys and values."""

from __future__ import annotations

import random

import attrs
import pytest
import torch
from dense_gemma import gemma_logits
from dense_llama import dense_tensors
from grouped_rows import GroupedRun, grouped_run

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.random_models import RANDOM_MODELS, open_random_checkpoint
from tokenspeed.device.kv.grouped import GroupedPool
from tokenspeed.device.weights.bind import bind_model
from tokenspeed.device.weights.load import load_weights
from tokenspeed.device.weights.shapes import tensor_shapes

TINY = RANDOM_MODELS["tiny-gemma3"]
PARENTS = 64
SEED = 1


def run_of(config: ModelConfig = TINY, *, page_tokens: int = 8, seed: int = 0) -> GroupedRun:
    checkpoint = attrs.evolve(open_random_checkpoint("tiny-gemma3", served_name="x"), config=config, seed=SEED)
    model = bind_model(load_weights(checkpoint), num_pages=PARENTS, page_tokens=page_tokens)
    pool = model.pool
    assert isinstance(pool, GroupedPool)
    groups = pool.layout.groups
    return grouped_run(
        model.step, groups, [pool.layer_bytes(number) for number in range(len(groups))], num_parents=PARENTS, seed=seed
    )


def prompt(length: int, *, seed: int) -> list[int]:
    return torch.randint(0, TINY.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(ids: list[int], config: ModelConfig = TINY) -> torch.Tensor:
    return gemma_logits(config, dense_tensors(config, list(tensor_shapes(config)), SEED), ids).float()


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 8, 24, 25, 100])
def test_a_whole_prompt_has_the_logits_of_the_plain_computation(length: int) -> None:
    run, ids = run_of(), prompt(length, seed=length)
    near(run.forward([(run.sequence(ids), length)], all_logits=True), expected(ids))


@pytest.mark.parametrize("page_tokens", [4, 8, 16])
@pytest.mark.parametrize("chunk", [1, 7, 24, 40])
def test_chunks_and_decodes_see_the_window_and_nothing_behind_it(chunk: int, page_tokens: int) -> None:
    run, ids = run_of(page_tokens=page_tokens), prompt(97, seed=3)
    row, got = run.sequence(ids), []
    while row.computed < len(ids):
        got.append(run.forward([(row, min(chunk, len(ids) - row.computed))], all_logits=True))
    near(torch.cat(got), expected(ids))


def test_window_blocks_are_reused_while_the_sequence_goes_on() -> None:
    run, ids = run_of(), prompt(200, seed=4)
    row = run.sequence(ids)
    there = len(run.free[1])
    while row.computed < len(ids):
        logits = run.forward([(row, min(10, len(ids) - row.computed))])
        assert there - len(run.free[1]) <= (24 + 10) // 8 + 2
    near(logits[-1], expected(ids)[-1])
    assert there == len(run.free[1]) + sum(block > 0 for block in row.blocks[1])


def test_mixed_batches_of_random_chunks_agree_with_each_sequence_alone() -> None:
    rng, run = random.Random(5), run_of()
    lengths = (3, 24, 60, 75, 110)
    rows = [run.sequence(prompt(length, seed=length)) for length in lengths]
    last: dict[int, torch.Tensor] = {}
    while len(last) < len(rows):
        work = []
        for index, row in enumerate(rows):
            left = len(row.tokens) - row.computed
            if left and rng.random() < 0.8:
                work.append((index, row, min(left, rng.choice((1, 1, 5, 30)))))
        if not work:
            continue
        logits = run.forward([(row, count) for _, row, count in work])
        for (index, row, _), line in zip(work, logits, strict=True):
            if row.computed == len(row.tokens):
                last[index] = line
    for index, row in enumerate(rows):
        near(last[index], expected(row.tokens)[-1])


def test_another_scale_of_scores_is_kept() -> None:
    config, ids = attrs.evolve(TINY, query_scale=0.05), prompt(40, seed=6)
    run = run_of(config)
    near(run.forward([(run.sequence(ids), 40)], all_logits=True), expected(ids, config))
    assert not torch.allclose(expected(ids, config), expected(ids), atol=1e-2)


def test_a_range_of_layers_at_a_time_gives_the_same() -> None:
    run, ids = run_of(), prompt(50, seed=7)
    rows = run.rows([(run.sequence(ids), 50)])
    hidden = None
    for layers in (range(1), range(1, 3), range(3, 4)):
        hidden = run.step.run(rows, layers=layers, ready=run.ready, hidden=hidden)
    assert hidden is not None
    near(hidden[0], expected(ids)[-1])


def test_text_of_the_preset_depends_on_its_context() -> None:
    run = run_of()
    row = run.sequence(prompt(9, seed=5))
    logits = run.forward([(row, 9)])
    for _ in range(40):
        row.tokens.append(int(logits[0].argmax()))
        logits = run.forward([(row, 1)])
    assert len(set(row.tokens[9:])) > 4
