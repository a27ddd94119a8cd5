"""The native step on the default model against the reference's greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from paged_rows import Sequenced, paged_run

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.sources import resolve_model
from tokenspeed.device.native.library import native_library
from tokenspeed.device.native.model import NativeModel
from tokenspeed.settings.model import ModelSettings, WeightsMode

REFERENCE = Path(__file__).parents[1] / "equality" / "reference" / "smollm2-135m-q4_1.json"
MARGIN = 1e-4
NUM_PAGES, PAGE_TOKENS, CHUNK = 640, 16, 100
STEPS = 24


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(resolve_model(ModelSettings(), NoProgress()))


@pytest.mark.model
@pytest.mark.parametrize(("mode", "margin"), [(WeightsMode.EXACT, MARGIN), (WeightsMode.NATIVE, 30 * MARGIN)])
def test_every_prompt_continues_as_the_reference_does(checkpoint: Checkpoint, mode: WeightsMode, margin: float) -> None:
    """NATIVE keeps the weights and rounds activations to 16 bits, so that it may differ where the margin is small."""
    prompts = json.loads(REFERENCE.read_text())["prompts"]
    factory = NativeModel(library=native_library(), mode=mode)
    model = factory.bind(factory.load(checkpoint, NoProgress()), num_pages=NUM_PAGES, page_tokens=PAGE_TOKENS)
    run = paged_run(model.step, num_pages=NUM_PAGES, page_tokens=PAGE_TOKENS)
    rows = [run.sequence(p["prompt"]) for p in prompts]
    excused: dict[int, int] = {}
    pending: list[tuple[int, Sequenced]] = list(enumerate(rows))
    while pending:
        work = [(row, min(CHUNK, len(row.tokens) - row.computed)) for _, row in pending]
        logits = run.forward(work)
        for at, (number, row) in enumerate(pending):
            if row.computed < len(row.tokens):
                continue
            prompt = prompts[number]
            done = len(row.tokens) - len(prompt["prompt"])
            token = int(logits[at].argmax())
            if token != prompt["tokens"][done] and prompt["margins"][done] < margin:
                excused.setdefault(number, done)
            assert number in excused or token == prompt["tokens"][done], (prompt["name"], done)
            row.tokens.append(token)
        pending = [
            (number, row)
            for number, row in pending
            if number not in excused and len(row.tokens) < len(prompts[number]["prompt"]) + STEPS
        ]
    assert len(excused) <= 2, excused


def predictions(checkpoint: Checkpoint, mode: WeightsMode, texts: list[list[int]], kv_dtype: torch.dtype) -> list[int]:
    """The likeliest next token at every position of every text."""
    factory = NativeModel(library=native_library(), mode=mode, kv_dtype=kv_dtype)
    model = factory.bind(factory.load(checkpoint, NoProgress()), num_pages=NUM_PAGES, page_tokens=PAGE_TOKENS)
    run = paged_run(model.step, num_pages=NUM_PAGES, page_tokens=PAGE_TOKENS)
    logits = [run.forward([(run.sequence(text), len(text))], all_logits=True) for text in texts]
    return torch.cat(logits).argmax(dim=1).tolist()


@pytest.mark.model
def test_every_mode_agrees_with_exact_weights_on_nearly_every_token(checkpoint: Checkpoint) -> None:
    prompts = json.loads(REFERENCE.read_text())["prompts"]
    texts = [p["prompt"] + p["tokens"] for p in prompts if 40 < len(p["prompt"]) < 120][:6]
    exact = predictions(checkpoint, WeightsMode.EXACT, texts, torch.float32)
    least = {WeightsMode.NATIVE: 0.995, WeightsMode.FP16: 0.99, WeightsMode.INT8G32: 0.97}
    for mode, share in least.items():
        got = predictions(checkpoint, mode, texts, torch.float16)
        assert sum(a == b for a, b in zip(got, exact, strict=True)) >= share * len(exact), mode
