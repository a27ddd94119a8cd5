"""Gemma 3, in torch and in C: the mathematics, and the window over paged keys and values."""

from __future__ import annotations

import random

import attrs
import pytest
import torch
from dense_gemma import gemma_logits
from dense_llama import dense_tensors
from grouped_rows import GroupedRun, native_grouped_run, run_over

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.random_models import RANDOM_MODELS, open_random_checkpoint
from tokenspeed.device.kv.grouped import GroupedPool
from tokenspeed.device.weights.bind import bind_model
from tokenspeed.device.weights.load import load_weights
from tokenspeed.device.weights.shapes import tensor_shapes

TINY = RANDOM_MODELS["tiny-gemma3"]
PARENTS = 128
SEED = 1


@attrs.frozen
class Rig:
    """Runs of one forward; `native` or torch."""

    native: bool

    def run_of(self, config: ModelConfig = TINY, *, page_tokens: int = 8) -> GroupedRun:
        checkpoint = attrs.evolve(open_random_checkpoint("tiny-gemma3", served_name="x"), config=config, seed=SEED)
        if self.native:
            return native_grouped_run(checkpoint, num_parents=PARENTS, page_tokens=page_tokens, threads=2)
        model = bind_model(load_weights(checkpoint), num_pages=PARENTS, page_tokens=page_tokens)
        assert isinstance(model.pool, GroupedPool)
        return run_over(model.step, model.pool)


@pytest.fixture(params=[False, True], ids=["torch", "native"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(native=bool(request.param))


def prompt(length: int, *, seed: int) -> list[int]:
    return torch.randint(0, TINY.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(ids: list[int], config: ModelConfig = TINY) -> torch.Tensor:
    return gemma_logits(config, dense_tensors(config, list(tensor_shapes(config)), SEED), ids).float()


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 8, 24, 25, 100])
def test_a_whole_prompt_has_the_logits_of_the_plain_computation(rig: Rig, length: int) -> None:
    run, ids = rig.run_of(), prompt(length, seed=length)
    near(run.forward([(run.sequence(ids), length)], all_logits=True), expected(ids))


@pytest.mark.parametrize("page_tokens", [4, 8, 16])
@pytest.mark.parametrize("chunk", [1, 7, 24, 40])
def test_chunks_and_decodes_see_the_window_and_nothing_behind_it(rig: Rig, chunk: int, page_tokens: int) -> None:
    run, ids = rig.run_of(page_tokens=page_tokens), prompt(97, seed=3)
    row, got = run.sequence(ids), []
    while row.computed < len(ids):
        got.append(run.forward([(row, min(chunk, len(ids) - row.computed))], all_logits=True))
    near(torch.cat(got), expected(ids))


def test_window_blocks_are_reused_while_the_sequence_goes_on(rig: Rig) -> None:
    run, ids = rig.run_of(), prompt(200, seed=4)
    row = run.sequence(ids)
    there = len(run.free[1])
    while row.computed < len(ids):
        logits = run.forward([(row, min(10, len(ids) - row.computed))])
        assert there - len(run.free[1]) <= (24 + 10) // 8 + 2
    near(logits[-1], expected(ids)[-1])
    assert there == len(run.free[1]) + sum(block > 0 for block in row.blocks[1])


def test_mixed_batches_of_random_chunks_agree_with_each_sequence_alone(rig: Rig) -> None:
    rng, run = random.Random(5), rig.run_of()
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


def test_another_scale_of_scores_is_kept(rig: Rig) -> None:
    config, ids = attrs.evolve(TINY, query_scale=0.05), prompt(40, seed=6)
    run = rig.run_of(config)
    near(run.forward([(run.sequence(ids), 40)], all_logits=True), expected(ids, config))
    assert not torch.allclose(expected(ids, config), expected(ids), atol=1e-2)


def test_a_range_of_layers_at_a_time_gives_the_same(rig: Rig) -> None:
    run, ids = rig.run_of(), prompt(50, seed=7)
    rows = run.rows([(run.sequence(ids), 50)])
    hidden = None
    for layers in (range(1), range(1, 3), range(3, 4)):
        hidden = run.step.run(rows, layers=layers, ready=run.ready, hidden=hidden)
    assert hidden is not None
    near(hidden[0], expected(ids)[-1])


def test_text_of_the_preset_depends_on_its_context(rig: Rig) -> None:
    run = rig.run_of()
    row = run.sequence(prompt(9, seed=5))
    logits = run.forward([(row, 9)])
    for _ in range(40):
        row.tokens.append(int(logits[0].argmax()))
        logits = run.forward([(row, 1)])
    assert len(set(row.tokens[9:])) > 4


@pytest.mark.parametrize("window", [24, 100, 128, 140])
def test_windows_on_either_side_of_a_stretch_of_softmax(rig: Rig, window: int) -> None:
    config, ids = attrs.evolve(TINY, sliding_window=window), prompt(290, seed=8)
    run = rig.run_of(config)
    row, got = run.sequence(ids), []
    for count in (130, 1, 1, 26, 100, 32):
        got.append(run.forward([(row, count)], all_logits=True))
    near(torch.cat(got), expected(ids, config))


def test_sizes_that_are_multiples_of_nothing(rig: Rig) -> None:
    config = attrs.evolve(TINY, hidden_size=72, intermediate_size=100, num_heads=6, num_kv_heads=2, head_dim=20)
    ids, run = prompt(150, seed=9), rig.run_of(config)
    row = run.sequence(ids)
    got = [run.forward([(row, count)], all_logits=True) for count in (11, 1, 100, 38)]
    near(torch.cat(got), expected(ids, config))
