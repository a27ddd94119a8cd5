"""Everything a checkpoint's files say except the weights themselves."""

from __future__ import annotations

from pathlib import Path

import attrs

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.gguf_header import GgufFile
from tokenspeed.checkpoint.sources import CheckpointKind, ResolvedModel
from tokenspeed.checkpoint.tokenizer_data import TokenizerData
from tokenspeed.plane.messages import SamplingParams


@attrs.frozen(kw_only=True, eq=False)
class Checkpoint:
    """A checkpoint that was opened and checked; its weights were not read.

    Attributes:
        path: the .gguf file, or the folder; None for RANDOM.
        name: what the model calls itself; `served_name` is what clients call it.
        weight_files: safetensors files in the order of the index, or the GGUF file; () for RANDOM.
        generation: sampling defaults; every field None or 0 where the checkpoint says nothing.
        eos_token_ids: all ids that end a sequence, the checkpoint's first choice first.
        add_bos: a text prompt starts with `bos_token_id`.
        tokenizer_vocab_size: ids below this have a text; may differ from ``config.vocab_size``.
        chat_template: Jinja source, or None.
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
    tokenizer: TokenizerData
    gguf: GgufFile | None = None
    seed: int = 0


def open_checkpoint(resolved: ResolvedModel) -> Checkpoint:
    """Read configuration, tokenizer facts, chat template and generation defaults.

    Raises: ModelError: a file is missing or damaged, or the model is of a kind this build cannot
        serve; the text names the file and the key.
    """
    raise NotImplementedError
