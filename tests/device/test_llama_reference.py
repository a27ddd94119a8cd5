"""The model step alone, on the default model, against the reference's greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from paged_rows import Sequenced, paged_run

from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.sources import resolve_model
from tokenspeed.device.step import ForwardStep
from tokenspeed.device.weights.bind import bind_model
from tokenspeed.device.weights.load import load_weights
from tokenspeed.settings.model import ModelSettings

REFERENCE = Path(__file__).parents[1] / "equality" / "reference" / "smollm2-135m-q4_1.json"
MARGIN = 1e-4
NUM_PAGES, PAGE_TOKENS, CHUNK = 64, 16, 48
STEPS = 24


@pytest.fixture(scope="module")
def step() -> ForwardStep:
    checkpoint = open_checkpoint(resolve_model(ModelSettings(), NoProgress()))
    return bind_model(load_weights(checkpoint), num_pages=NUM_PAGES, page_tokens=PAGE_TOKENS).step


@pytest.mark.model
def test_three_prompts_in_chunks_and_one_batch_continue_as_the_reference_does(step: ForwardStep) -> None:
    prompts = json.loads(REFERENCE.read_text())["prompts"]
    chosen = [
        next(p for p in prompts if low < len(p["prompt"]) < high) for low, high in ((4, 12), (70, 90), (140, 160))
    ]
    run = paged_run(step, num_pages=NUM_PAGES, page_tokens=PAGE_TOKENS)
    rows = [run.sequence(p["prompt"]) for p in chosen]
    pending: list[Sequenced] = list(rows)
    excused: set[int] = set()
    while any(len(row.tokens) < len(p["prompt"]) + STEPS for row, p in zip(rows, chosen, strict=True)):
        # The first rows decode while the longer prompts are still being cut into chunks.
        work = [(row, min(CHUNK, len(row.tokens) - row.computed)) for row in pending]
        logits = run.forward(work)
        for index, (row, _) in enumerate(work):
            if row.computed == len(row.tokens):
                at, prompt = rows.index(row), chosen[rows.index(row)]
                done = len(row.tokens) - len(prompt["prompt"])
                token = int(logits[index].argmax())
                if token != prompt["tokens"][done] and prompt["margins"][done] < MARGIN:
                    excused.add(at)
                assert token == prompt["tokens"][done] or at in excused, (prompt["name"], done)
                row.tokens.append(token)
        pending = [r for r, p in zip(rows, chosen, strict=True) if len(r.tokens) < len(p["prompt"]) + STEPS]
    assert len(excused) < len(rows)
