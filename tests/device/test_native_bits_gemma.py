"""The native forward's promise where layers have a window: bits do not depend on batch, chunks, threads or pages.

Sequences computed alone and whole are compared, bit by bit, with the same ones computed in random chunks in
random batches, their blocks behind the window given back and reused meanwhile.
"""

from __future__ import annotations

import random
from pathlib import Path

import attrs
import pytest
import torch
from grouped_rows import GroupedRun, native_grouped_run
from native_rig import own_library, prompt

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.random_models import RANDOM_MODELS, open_random_checkpoint
from tokenspeed.device.native.library import native_library
from tokenspeed.settings.model import WeightsMode

PARENTS = 480
TEXTS = tuple(prompt(length, seed=60 + length) for length in (300, 129, 25, 7, 181))


def checkpoint_of(window: int) -> Checkpoint:
    config = attrs.evolve(RANDOM_MODELS["tiny-gemma3"], sliding_window=window)
    return attrs.evolve(open_random_checkpoint("tiny-gemma3", served_name="x"), config=config, seed=1)


def alone(run: GroupedRun) -> list[torch.Tensor]:
    """Logits of all positions of each text, computed in one piece with nothing else in the batch."""
    found = []
    for text in TEXTS:
        row = run.sequence(text)
        found.append(run.forward([(row, len(text))], all_logits=True))
        run.end(row)
    return found


def play(run: GroupedRun, wanted: list[torch.Tensor], seed: int) -> None:
    """Random rounds over `TEXTS`, each compared with `wanted`."""
    dice = random.Random(seed)
    rows = [run.sequence(text) for text in TEXTS]
    while any(row.computed < len(row.tokens) for row in rows):
        live = [at for at, row in enumerate(rows) if row.computed < len(row.tokens)]
        chosen = dice.sample(live, dice.randint(1, len(live)))
        work = []
        for at in chosen:
            left = len(rows[at].tokens) - rows[at].computed
            work.append((rows[at], min(left, dice.choice((1, 1, dice.randint(1, 40), dice.randint(1, 150))))))
        starts = [row.computed for row, _ in work]
        logits = run.forward(work, all_logits=True)
        begin = 0
        for at, (_, count), start in zip(chosen, work, starts, strict=True):
            assert torch.equal(logits[begin : begin + count], wanted[at][start : start + count]), (at, start, count)
            begin += count


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [24, 130])
def test_random_schedules_give_the_bits_of_each_sequence_alone(window: int, kv_dtype: torch.dtype) -> None:
    checkpoint = checkpoint_of(window)
    wanted = alone(native_grouped_run(checkpoint, num_parents=PARENTS, kv_dtype=kv_dtype))
    for seed, page_tokens in enumerate((8, 4, 32)):
        run = native_grouped_run(
            checkpoint,
            num_parents=PARENTS,
            page_tokens=page_tokens,
            threads=1 + seed,
            kv_dtype=kv_dtype,
            seed=seed,
        )
        play(run, wanted, seed)


@pytest.mark.parametrize("instruction_set", native_library().instruction_sets)
def test_every_instruction_set_of_this_machine_keeps_the_promise(instruction_set: str, tmp_path: Path) -> None:
    library = own_library(tmp_path, instruction_set)
    checkpoint, mode = checkpoint_of(24), WeightsMode.INT8G32
    wanted = alone(native_grouped_run(checkpoint, mode, num_parents=PARENTS, library=library))
    play(native_grouped_run(checkpoint, mode, num_parents=PARENTS, threads=2, library=library), wanted, seed=4)


def test_many_threads_on_one_long_row_give_its_bits() -> None:
    checkpoint, text = checkpoint_of(24), prompt(400, seed=9)
    found = []
    for threads in (1, 2, 5):
        run = native_grouped_run(checkpoint, num_parents=PARENTS, threads=threads)
        row = run.sequence(text)
        run.forward([(row, len(text) - 3)])
        found.append(torch.cat([run.forward([(row, 1)]) for _ in range(3)]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
