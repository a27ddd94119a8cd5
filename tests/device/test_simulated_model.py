"""The simulated model and its timing: the hash model's tokens in any company, roofline seconds, whole builds."""

from __future__ import annotations

import random

import attrs
import numpy as np
import pytest
import torch
from device_doubles import DECODE, CountingWakeup, batch, checkpoint, granted, plan, seat

from tokenspeed.checkpoint.random_models import open_random_checkpoint
from tokenspeed.device.backends.simulated import Work
from tokenspeed.device.backends.simulated_model import SimulatedBound, SimulatedModel, powers
from tokenspeed.device.backends.simulated_roofline import (
    ACCELERATORS,
    Attending,
    FixedStep,
    Roofline,
    model_shape,
    step_time,
)
from tokenspeed.device.build import build_device_side
from tokenspeed.device.capture import Strict
from tokenspeed.device.data_plane import open_data_plane
from tokenspeed.device.step import AllReady, RaggedRows
from tokenspeed.device.survey import survey
from tokenspeed.errors import SettingsError
from tokenspeed.plane.plan import BlockCopy, Dispatch, GroupBlocks, LogprobPlan
from tokenspeed.settings.model import (
    Accelerator,
    Backend,
    DeviceSettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
    SimulatedSettings,
)
from tokenspeed.testing import hash_continuation

VOCAB, PAGE_TOKENS = 97, 8


def bound(seed: int = 0, work: Work | None = None) -> SimulatedBound:
    model = SimulatedModel(
        work=work or Work(), time=FixedStep(0.25), weight_bytes=0, vocab_size=VOCAB, seed=seed, max_tokens=300
    )
    return model.bind(None, num_pages=64, page_tokens=PAGE_TOKENS)


def rows(*work: tuple[list[int], int, list[int]]) -> RaggedRows:
    """(tokens, start, pages) of each row; all tokens' logits are wanted."""
    counts = [len(tokens) for tokens, _, _ in work]
    width = max(len(pages) for _, _, pages in work)
    ids = [token for tokens, _, _ in work for token in tokens]
    return RaggedRows(
        token_ids=torch.tensor(ids),
        positions=torch.tensor([start + i for tokens, start, _ in work for i in range(len(tokens))]),
        offsets=torch.tensor([0, *np.cumsum(counts).tolist()]),
        contexts=torch.tensor([start + len(tokens) for tokens, start, _ in work]),
        block_tables=torch.tensor([pages + [0] * (width - len(pages)) for _, _, pages in work], dtype=torch.int32),
        logit_tokens=torch.arange(len(ids)),
    )


def test_chunks_of_any_length_and_company_give_the_hash_of_the_whole_context() -> None:
    draw = random.Random(7)
    model = bound()
    sequences = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 60))] for _ in range(6)]
    done = [0] * 6
    while any(at < len(s) for at, s in zip(done, sequences, strict=True)):
        chosen = [i for i in range(6) if done[i] < len(sequences[i]) and draw.random() < 0.7]
        if not chosen:
            continue
        parts = [sequences[i][done[i] : done[i] + draw.randint(1, 20)] for i in chosen]
        pages = [list(range(1 + 8 * i, 9 + 8 * i)) for i in chosen]
        tokens = model.step.run(
            rows(*((part, done[i], page) for part, i, page in zip(parts, chosen, pages, strict=True))),
            layers=range(1),
            ready=AllReady(),
        )
        at = 0
        for i, part in zip(chosen, parts, strict=True):
            for j in range(len(part)):
                expected = hash_continuation(sequences[i][: done[i] + j + 1], 1, vocab_size=VOCAB)
                assert tokens[at].tolist() == expected
                at += 1
            done[i] += len(part)


def test_a_context_read_from_the_wrong_page_gives_another_token() -> None:
    model = bound()
    model.step.run(rows(([5] * 8, 0, [1]), ([6] * 8, 0, [2])), layers=range(1), ready=AllReady())
    right = model.step.run(rows(([7], 8, [1, 3])), layers=range(1), ready=AllReady())
    wrong = model.step.run(rows(([7], 8, [2, 3])), layers=range(1), ready=AllReady())
    assert right.tolist() != wrong.tolist()


def test_copied_pages_read_like_their_source_and_zeroed_ones_do_not() -> None:
    model = bound()
    model.step.run(rows(([5] * 8, 0, [1])), layers=range(1), ready=AllReady())
    model.pool.copy_blocks((BlockCopy(source=1, destination=4),))
    model.pool.zero_blocks((GroupBlocks(blocks=(1,)),))
    copied = model.step.run(rows(([7], 8, [4, 3])), layers=range(1), ready=AllReady())
    zeroed = model.step.run(rows(([7], 8, [1, 3])), layers=range(1), ready=AllReady())
    assert copied[0].tolist() == hash_continuation([5] * 8 + [7], 1, vocab_size=VOCAB)
    assert zeroed.tolist() != copied.tolist()


def test_a_page_moved_as_bytes_is_the_same_page() -> None:
    model = bound()
    model.step.run(rows(([5] * 8, 0, [1])), layers=range(1), ready=AllReady())
    view = model.pool.layer_bytes(0)
    assert view.shape == (len(model.pool.pages), 1, model.pool.pages[0].nbytes)
    view[4] = view[1]
    moved = model.step.run(rows(([7], 8, [4, 3])), layers=range(1), ready=AllReady())
    assert moved[0].tolist() == hash_continuation([5] * 8 + [7], 1, vocab_size=VOCAB)


def test_another_seed_gives_other_tokens() -> None:
    work = ([1, 2, 3, 4, 5, 6, 7, 8], 0, [1])
    tokens = [bound(seed).step.run(rows(work), layers=range(1), ready=AllReady()).tolist() for seed in (0, 0, 1)]
    assert tokens[0] == tokens[1] != tokens[2]


def test_powers_are_those_of_the_field() -> None:
    assert powers(3, 5).tolist() == [1, 3, 9, 27, 81, 243]


def test_every_forward_charges_its_time() -> None:
    work = Work()
    bound(work=work).step.run(rows(([1], 0, [1])), layers=range(1), ready=AllReady())
    assert work.seconds == 0.25


CONFIG = open_random_checkpoint("llama-8b", served_name="big").config


def rows_of(*rows: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Counts and starts from (tokens computed, tokens before them)."""
    counts, starts = zip(*rows, strict=True)
    return np.array(counts), np.array(starts)


def test_the_roofline_is_memory_for_small_batches_and_arithmetic_for_large_ones() -> None:
    shape = model_shape(CONFIG, SimulatedSettings())
    assert shape.parameters == pytest.approx(8.03e9, rel=0.01)
    time = Roofline(accelerator=ACCELERATORS[Accelerator.H100], shape=shape)
    one = time.seconds(*rows_of((1, 99)))
    eight = time.seconds(*rows_of(*[(1, 99)] * 8))
    prompt = time.seconds(*rows_of((8192, 0)))
    assert one == pytest.approx(0.0003 + 16.06e9 / (3.35e12 * 0.8), rel=0.01)
    assert one < eight < 1.01 * one
    assert prompt == pytest.approx(
        0.0003 + (2 * 8.03e9 * 8192 + 4 * 32 * 4096 * 8192**2 / 2) / (989e12 * 0.6), rel=0.01
    )
    assert prompt > 20 * one


def test_long_contexts_cost_memory_traffic() -> None:
    time = step_time(CONFIG, SimulatedSettings())
    short, long = (time.seconds(*rows_of(*[(1, context - 1)] * 64)) for context in (128, 8192))
    assert long - short == pytest.approx(64 * 8064 * 131072 / (3.35e12 * 0.8), rel=0.01)


@pytest.mark.parametrize("window", [0, 1, 7, 64])
def test_what_a_chunk_reads_and_sees_is_what_its_queries_see_one_by_one(window: int) -> None:
    layers = Attending(window_tokens=window, token_bytes=1, pair_flops=1.0)
    rows = [(1, 0), (5, 0), (1, 6), (9, 3), (1, 63), (30, 50), (4, 200)]
    read = pairs = 0
    for count, start in rows:
        seen = [range(max(0, at + 1 - window) if window else 0, at + 1) for at in range(start, start + count)]
        pairs += sum(len(one) for one in seen)
        read += len(set().union(*seen))
    assert layers.seen(*rows_of(*rows)) == (read, pairs)


def test_layers_with_a_window_cost_what_the_window_holds() -> None:
    """A model with windows in all but one layer of six, at long contexts: the traffic is a sixth, and the windows."""
    config = attrs.evolve(CONFIG, sliding_window=512, window_layers=tuple(i for i in range(32) if i % 6))
    full, mixed = (step_time(of, SimulatedSettings()) for of in (CONFIG, config))
    weights, token = model_shape(CONFIG, SimulatedSettings()).weight_bytes, 131072
    rows = rows_of(*[(1, 8191)] * 64)
    bandwidth = 3.35e12 * 0.8
    assert full.seconds(*rows) == pytest.approx(0.0003 + (weights + 64 * 8193 * token) / bandwidth)
    seen = (6 * 8193 + 26 * 513) / 32
    assert mixed.seconds(*rows) == pytest.approx(0.0003 + (weights + 64 * seen * token) / bandwidth)
    short = rows_of(*[(1, 100)] * 64)  # the windows hold all there is
    assert mixed.seconds(*short) == pytest.approx(full.seconds(*short))


def test_layers_with_a_state_cost_the_same_at_any_context() -> None:
    hybrid = open_random_checkpoint("tiny-hybrid", served_name="h").config
    stateful = attrs.evolve(hybrid, linear=attrs.evolve(hybrid.linear, layers=tuple(range(hybrid.num_layers))))
    time = step_time(stateful, SimulatedSettings())
    assert time.seconds(*rows_of((1, 9))) == time.seconds(*rows_of((1, 9000)))
    assert time.seconds(*rows_of((1, 9), (1, 9))) > time.seconds(*rows_of((1, 9)))


def test_the_settings_name_accelerator_size_and_a_fixed_time() -> None:
    quick = step_time(CONFIG, SimulatedSettings(accelerator=Accelerator.H200))
    small = step_time(CONFIG, SimulatedSettings(parameters_b=1.0, bytes_per_parameter=0.5))
    plain = step_time(CONFIG, SimulatedSettings())
    one = rows_of((1, 0))
    assert small.seconds(*one) < quick.seconds(*one) < plain.seconds(*one)
    assert step_time(CONFIG, SimulatedSettings(step_ms=5.0)).seconds(*one) == 0.005


SETTINGS = Settings(
    device=DeviceSettings(backend=Backend.SIMULATED),
    simulated=SimulatedSettings(step_ms=0.0),
    scheduler=SchedulerSettings(max_num_seqs=8, max_batched_tokens=64, chunk_tokens=64),
)


def test_a_simulated_build_serves_plans_without_weights() -> None:
    made = build_device_side(SETTINGS, checkpoint())
    plane = open_data_plane(made.handle, CountingWakeup(), check=Strict())
    try:
        assert made.specs.backend == "simulated"
        prompt = [3, 1, 4, 1, 5]
        pages = granted(*((2, i, 3 + i) for i in range(2)))
        work = plan(1, batch((2, 0, prompt)), grants=pages)
        asked = Dispatch(seats=(seat(2),), logprobs=LogprobPlan(sampled=((0, 2),)))
        tickets = [plane.execute(work, asked)]
        tickets += [plane.execute(plan(2 + i, batch((2, 5 + i, DECODE))), Dispatch()) for i in range(3)]
        results = [plane.commit(ticket) for ticket in tickets]
    finally:
        plane.close()
    assert [result.tokens[0] for result in results] == hash_continuation(prompt, 4, vocab_size=97)
    token = results[0].tokens[0]
    assert results[0].token_logprobs == {0: pytest.approx(np.log(0.5))}
    assert results[0].token_top_logprobs[0].ids == (token, (token + 1) % 97)


def test_a_large_model_gets_the_accelerators_memory() -> None:
    settings = attrs.evolve(SETTINGS, scheduler=SchedulerSettings(max_num_seqs=1024))
    made = build_device_side(settings, open_random_checkpoint("llama-8b", served_name="big"))
    made.handle.close()
    assert made.specs.weights_bytes == pytest.approx(16.06e9, rel=0.01)
    assert 40e9 < made.specs.kv_pool_bytes < 60e9
    assert made.specs.max_model_len == 131072


def test_a_model_that_does_not_fit_the_accelerator_is_refused() -> None:
    settings = attrs.evolve(SETTINGS, simulated=SimulatedSettings(accelerator=Accelerator.L4))
    with pytest.raises(SettingsError, match="weights"):
        build_device_side(settings, open_random_checkpoint("llama-32b", served_name="big"))


def test_the_survey_tells_of_the_accelerator_and_not_of_this_machine() -> None:
    first, memory, pool = survey(
        attrs.evolve(SETTINGS, model=ModelSettings(source="random:llama-8b")),
        open_random_checkpoint("llama-8b", served_name="big"),
    )
    assert first.startswith("simulated h100")
    assert "weights 15,31" in memory
    assert "longest request 131,072 tokens" in pool
