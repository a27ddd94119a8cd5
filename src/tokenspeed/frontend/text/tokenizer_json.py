"""A tokenizer from ``tokenizer.json``."""

from __future__ import annotations

from pathlib import Path

import attrs
import msgspec
from tokenizers import Tokenizer

from tokenspeed.errors import ModelError
from tokenspeed.frontend.text.pieces import WORD_MARK, ByteLevelPieces, Pieces, SentencePieces


@attrs.frozen(kw_only=True, eq=False)
class BuiltTokenizer:
    """What the files say of text and ids.

    Attributes:
        strips_leading_space: decoding removes one space at the start of a text.
    """

    library: Tokenizer
    pieces: Pieces
    strips_leading_space: bool


class _Decoder(msgspec.Struct):
    type: str
    decoders: list[_Decoder] = msgspec.field(default_factory=list)
    pattern: dict[str, str] = msgspec.field(default_factory=dict)
    content: str = ""
    start: int = 0
    stop: int = 0
    replacement: str = WORD_MARK
    prepend_scheme: str = "always"


class _File(msgspec.Struct):
    decoder: _Decoder | None = None


def tokenizer_from_json(path: Path) -> BuiltTokenizer:
    """Load `path` and find out how it spells bytes.

    Raises: ModelError: no tokenizer in this format, or a decoder whose text is not its tokens' bytes joined.
    """
    try:
        raw = path.read_bytes()
        decoder = msgspec.json.decode(raw, type=_File).decoder
        library = Tokenizer.from_buffer(raw)
    except Exception as fault:  # the library raises plain Exception
        raise ModelError(f"{path}: cannot be read as a tokenizer: {fault}") from fault
    library.no_padding()
    library.no_truncation()
    parts = () if decoder is None else _flat(decoder)
    kinds = {part.type for part in parts}
    if kinds and kinds <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
        return BuiltTokenizer(library=library, pieces=ByteLevelPieces(), strips_leading_space=False)
    if kinds and all(_sentencepiece_part(part) for part in parts) and kinds & {"Replace", "Metaspace"}:
        strips = any(
            (part.type == "Strip" and part.start > 0) or (part.type == "Metaspace" and part.prepend_scheme != "never")
            for part in parts
        )
        pieces = SentencePieces(byte_fallback="ByteFallback" in kinds)
        return BuiltTokenizer(library=library, pieces=pieces, strips_leading_space=strips)
    raise ModelError(
        f"{path}: decoder is {sorted(kinds) or None}; supported are ByteLevel, Metaspace, and the sequence"
        f" Replace {WORD_MARK!r} with a space, ByteFallback, Fuse, Strip"
    )


def _flat(decoder: _Decoder) -> tuple[_Decoder, ...]:
    if decoder.type != "Sequence":
        return (decoder,)
    return tuple(part for inner in decoder.decoders for part in _flat(inner))


def _sentencepiece_part(part: _Decoder) -> bool:
    match part.type:
        case "ByteFallback" | "Fuse":
            return True
        case "Replace":
            return part.pattern == {"String": WORD_MARK} and part.content == " "
        case "Metaspace":
            return part.replacement == WORD_MARK
        case "Strip":
            return part.content == " " and part.start in (0, 1) and part.stop == 0
        case _:
            return False
