"""How a vocabulary spells the bytes of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import attrs

WORD_MARK = "▁"
"""SentencePiece's sign for a space."""


def _byte_signs() -> dict[int, str]:
    """The printable sign of each byte in byte-level vocabularies (GPT-2, 2019).

    Bytes that print in Latin-1 stand for themselves; the others, in order, for U+0100 and on.
    """
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    signs = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in signs)
    return {**signs, **{byte: chr(256 + place) for place, byte in enumerate(others)}}


BYTE_SIGNS: Mapping[int, str] = MappingProxyType(_byte_signs())
_SIGN_BYTES: Mapping[str, int] = MappingProxyType({sign: byte for byte, sign in BYTE_SIGNS.items()})


class Pieces(Protocol):
    """Spelling of one family of vocabularies."""

    def to_bytes(self, piece: str, *, added: bool) -> bytes:
        """The bytes that `piece` stands for.

        Args:
            added: it was added to the vocabulary beside the model, and is matched in text verbatim.
        """
        ...


@attrs.frozen
class ByteLevelPieces:
    """One printable sign a byte."""

    def to_bytes(self, piece: str, *, added: bool) -> bytes:
        if not added:
            try:
                return bytes([_SIGN_BYTES[sign] for sign in piece])
            except KeyError:  # a piece that is not spelled in signs stands for its own text
                pass
        return piece.encode("utf-8", "replace")


@attrs.frozen(kw_only=True)
class SentencePieces:
    """Text with spaces marked.

    Attributes:
        byte_fallback: pieces like ``<0x0A>`` are single bytes.
    """

    byte_fallback: bool

    def to_bytes(self, piece: str, *, added: bool) -> bytes:
        if self.byte_fallback and not added and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        return piece.replace(WORD_MARK, " ").encode("utf-8", "replace")
