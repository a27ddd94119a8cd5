"""What a tokenizer is built from; the frontend builds it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import attrs

from tokenspeed.checkpoint.gguf_header import GgufFile

GGUF_CONTROL, GGUF_USER_DEFINED, GGUF_UNUSED, GGUF_BYTE = 3, 4, 5, 6
"""Values of ``tokenizer.ggml.token_type`` that differ from a plain token."""

BOS_BY_DEFAULT = frozenset({"llama3", "llama-v3", "llama-bpe"})
"""Byte-pair pre-tokenizers whose files mean a BOS where ``add_bos_token`` is missing."""


@attrs.frozen(kw_only=True)
class TokenizerJson:
    """A ``tokenizer.json`` in the format of the `tokenizers` library.

    Attributes:
        prefix_ids: ids put before a text prompt (a BOS, usually).
    """

    path: Path
    prefix_ids: tuple[int, ...] = ()


@attrs.frozen(kw_only=True, eq=False)
class TokenizerGguf:
    """The ``tokenizer.ggml.*`` metadata of a GGUF file."""

    gguf: GgufFile
    prefix_ids: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class TokenizerBytes:
    """Ids 0..255 are bytes; the special tokens follow in order."""

    specials: tuple[str, ...]
    prefix_ids: tuple[int, ...] = ()


TokenizerData: TypeAlias = TokenizerJson | TokenizerGguf | TokenizerBytes
