"""A tokenizer of a few pieces: bytes 0..255, two special tokens, then pieces of several bytes."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

EOS, EOS_TOO = 256, 257
PIECES = ("hello", " wor", "ld", "lo w", "<|user|>", "<|assistant|>", "stop", "the ", "end", "é", "日本")


@attrs.frozen(kw_only=True, eq=False)
class PieceTokenizer:
    """A `TextTokenizer`; encodes by the longest piece that fits.

    Attributes:
        bos: put in front of a text where asked for.
    """

    pieces: tuple[bytes, ...]
    bos: int | None = None

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (EOS, EOS_TOO)

    @property
    def bos_token_id(self) -> int | None:
        return self.bos

    @property
    def strips_leading_space(self) -> bool:
        return False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        rest = text.encode()
        ids = [self.bos] if add_special_tokens and self.bos is not None else []
        while rest:
            longer = (i for i in range(256, len(self.pieces)) if rest.startswith(self.pieces[i]))
            ids.append(max(longer, key=self._size, default=rest[0]))
            rest = rest[len(self.pieces[ids[-1]]) :]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = [i for i in ids if not (skip_special_tokens and self.is_special(i))]
        return b"".join(self.pieces[i] for i in shown).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in (EOS, EOS_TOO)

    def id_of(self, token: str) -> int | None:
        raw = token.encode()
        return self.pieces.index(raw) if raw in self.pieces else None

    def _size(self, token: int) -> int:
        return len(self.pieces[token])


def piece_tokenizer(*, bos: int | None = None) -> PieceTokenizer:
    own = (bytes([byte]) for byte in range(256))
    specials = (b"<|eos|>", b"<|eot|>")
    return PieceTokenizer(pieces=(*own, *specials, *(piece.encode() for piece in PIECES)), bos=bos)
