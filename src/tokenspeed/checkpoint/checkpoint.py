"""An opened checkpoint, as a value."""

from __future__ import annotations

from pathlib import Path

import attrs

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.gguf_header import GgufFile
from tokenspeed.checkpoint.resolved import CheckpointKind
from tokenspeed.checkpoint.tokenizer_data import TokenizerData
from tokenspeed.plane.messages import SamplingParams


@attrs.frozen(kw_only=True, eq=False)
class Checkpoint:
    """A checkpoint that was opened and checked; its weights were not read.

    Attributes:
        path: the .gguf file, or the folder; None for RANDOM.
        name: what the model calls itself; `served_name` is what clients call it.
        weight_files: safetensors files in the order of the index, or the GGUF file; () for RANDOM.
        generation: sampling defaults; every field None where the checkpoint says nothing.
        eos_token_ids: all ids that end a sequence, the checkpoint's first choice first.
        add_bos: a text prompt starts with `bos_token_id`.
        tokenizer_vocab_size: ids below this have a text; may differ from ``config.vocab_size``.
        chat_template: Jinja source, or None.
        special_tokens: pairs of name and text a chat template may use: ``bos_token``, ``eos_token``, …
        tokenizer: what a tokenizer is built from.
        gguf: metadata and tensor index, kind GGUF only.
        seed: kind RANDOM only: weights are drawn from it.
    """

    kind: CheckpointKind
    path: Path | None
    name: str
    served_name: str
    config: ModelConfig
    weight_files: tuple[Path, ...]
    generation: SamplingParams
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool
    tokenizer_vocab_size: int
    chat_template: str | None
    special_tokens: tuple[tuple[str, str], ...]
    tokenizer: TokenizerData = attrs.field(repr=False)
    gguf: GgufFile | None = attrs.field(default=None, repr=False)
    seed: int = 0
