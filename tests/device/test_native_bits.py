"""A token's logits have the same bits whatever it is computed with: the promise of the native forward.

The reference computes each sequence alone and whole. Random schedules then compute the same sequences in
chunks of any size, mixed in batches, behind shared prefixes, dropped and computed again, with pages in any
order and any number of threads; every logit of every position has to be equal, not close.
"""

from __future__ import annotations

import random
from pathlib import Path

import attrs
import pytest
import torch
from native_rig import KINDS, MODES, NUM_PAGES, checkpoint_of, native_model, native_run, odd_config, own_library, prompt
from paged_rows import PagedRun, Sequenced

from tokenspeed.device.native.bind import NativeModelBound
from tokenspeed.device.native.library import native_library
from tokenspeed.settings.model import WeightsMode

PREFIX = prompt(96, seed=50)
TEXTS = (
    PREFIX + prompt(180, seed=51),  # three stretches of attention
    PREFIX + prompt(33, seed=52),
    PREFIX[:64] + prompt(70, seed=53),
    prompt(7, seed=54),
    prompt(129, seed=55),
)
SHARED = {1: 96, 2: 64}
"""Texts that begin as text 0 does, and for how many tokens."""


def alone(model: NativeModelBound) -> list[torch.Tensor]:
    """Logits of all positions of each text, computed in one piece with nothing else in the batch."""
    run = native_run(model)
    return [run.forward([(run.sequence(text), len(text))], all_logits=True) for text in TEXTS]


@attrs.define(eq=False)
class Schedule:
    """Random rounds over `TEXTS`; compares what each computes with `wanted`."""

    run: PagedRun
    wanted: list[torch.Tensor]
    dice: random.Random
    rows: dict[int, Sequenced] = attrs.field(factory=dict[int, Sequenced])
    shared: int = 0
    recomputed: int = 0
    mixed: int = 0

    def play(self) -> None:
        waiting = list(range(len(TEXTS)))
        self.dice.shuffle(waiting)
        while waiting or any(row.computed < len(row.tokens) for row in self.rows.values()):
            if waiting and (not self.rows or self.dice.random() < 0.5):
                self._start(waiting.pop())
            live = [at for at, row in self.rows.items() if row.computed < len(row.tokens)]
            if live:
                self._round(self.dice.sample(live, self.dice.randint(1, len(live))))
            self._maybe_drop(waiting)

    def _start(self, at: int) -> None:
        row = self.run.sequence(TEXTS[at])
        source = self.rows.get(0)
        hit = min(SHARED.get(at, 0), source.computed if source else 0) // self.run.page_tokens * self.run.page_tokens
        if source and hit and self.dice.random() < 0.8:
            row.pages = source.pages[: hit // self.run.page_tokens]
            row.computed = hit
            self.shared += 1
        self.rows[at] = row

    def _round(self, chosen: list[int]) -> None:
        work = []
        for at in chosen:
            left = len(self.rows[at].tokens) - self.rows[at].computed
            count = self.dice.choice((1, 1, self.dice.randint(1, 40), self.dice.randint(1, 200)))
            work.append((at, min(left, count)))
        starts = [self.rows[at].computed for at, _ in work]
        self.mixed += {count == 1 for _, count in work} == {True, False}
        logits = self.run.forward([(self.rows[at], count) for at, count in work], all_logits=True)
        begin = 0
        for (at, count), start in zip(work, starts, strict=True):
            assert torch.equal(logits[begin : begin + count], self.wanted[at][start : start + count]), (
                at,
                start,
                count,
            )
            begin += count

    def _maybe_drop(self, waiting: list[int]) -> None:
        """Lose a sequence, as under memory pressure; it is computed again from its beginning."""
        if 3 in self.rows and self.rows[3].computed == len(TEXTS[3]) and not self.recomputed:
            self.run.end(self.rows.pop(3))
            waiting.append(3)
            self.recomputed += 1


def play(model: NativeModelBound, wanted: list[torch.Tensor], seed: int) -> Schedule:
    schedule = Schedule(run=native_run(model, seed=seed), wanted=wanted, dice=random.Random(seed))
    schedule.play()
    return schedule


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_random_schedules_give_the_bits_of_each_sequence_alone(kind: str, mode: WeightsMode) -> None:
    checkpoint = checkpoint_of(kind)
    wanted = alone(native_model(checkpoint, mode, threads=1))
    played = [play(native_model(checkpoint, mode, threads=1 + seed % 3), wanted, seed) for seed in range(3)]
    assert sum(schedule.shared for schedule in played) > 0
    assert sum(schedule.mixed for schedule in played) > 0
    assert all(schedule.recomputed for schedule in played)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("page_tokens", [8, 16, 32])
def test_page_size_and_page_order_do_not_show_in_the_bits(page_tokens: int, kv_dtype: torch.dtype) -> None:
    checkpoint = checkpoint_of("tiny-qwen3", odd_config("tiny-qwen3"))
    wanted = alone(native_model(checkpoint, kv_dtype=kv_dtype))
    model = native_model(checkpoint, page_tokens=page_tokens, threads=2, kv_dtype=kv_dtype)
    for seed in range(2):
        play(model, wanted, seed)


@pytest.mark.parametrize("instruction_set", native_library().instruction_sets)
def test_every_instruction_set_of_this_machine_keeps_the_promise(instruction_set: str, tmp_path: Path) -> None:
    library = own_library(tmp_path, instruction_set)
    checkpoint = checkpoint_of("tiny-llama")
    wanted = alone(native_model(checkpoint, WeightsMode.INT8G32, library=library))
    play(native_model(checkpoint, WeightsMode.INT8G32, threads=2, library=library), wanted, seed=4)


def test_many_threads_on_one_long_row_give_its_bits() -> None:
    checkpoint = checkpoint_of("tiny-llama")
    text = prompt(NUM_PAGES * 8 - 30, seed=9)
    run = native_run(native_model(checkpoint, threads=1))
    row = run.sequence(text)
    run.forward([(row, len(text) - 3)])
    wanted = [run.forward([(row, 1)]) for _ in range(3)]
    for threads in (2, 5):
        again = native_run(native_model(checkpoint, threads=threads))
        row = again.sequence(text)
        again.forward([(row, len(text) - 3)])
        for expected in wanted:
            assert torch.equal(again.forward([(row, 1)]), expected)


def test_the_comparison_would_notice_one_bit() -> None:
    model = native_model(checkpoint_of("tiny-llama"))
    wanted = alone(model)
    changed = wanted[4][77].view(torch.int32)
    changed[5] ^= 1
    with pytest.raises(AssertionError):
        play(model, wanted, seed=0)
