"""A tokenizer from the ``tokenizer.ggml.*`` metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tokenspeed.checkpoint.gguf_header import GgufFile
from tokenspeed.checkpoint.tokenizer_data import GGUF_CONTROL, GGUF_UNUSED, GGUF_USER_DEFINED
from tokenspeed.errors import ModelError
from tokenspeed.frontend.text.pieces import WORD_MARK, ByteLevelPieces, SentencePieces
from tokenspeed.frontend.text.tokenizer_json import BuiltTokenizer

_KEY = "tokenizer.ggml."

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UNNAMED = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


@attrs.frozen(kw_only=True)
class _Splitting:
    """How a byte-level tokenizer cuts text before merging.

    Attributes:
        patterns: applied one after another; each cuts its matches out of what the ones before left.
        nfc: text is composed (Unicode NFC) first.
        whole_words: a piece that is in the vocabulary as it stands is not merged from its parts.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False


_BY_DIGIT = _Splitting(patterns=(r"\p{N}", _GPT2))
_OF_LLAMA3 = _Splitting(patterns=(_LLAMA3,), whole_words=True)
_OF_QWEN2 = _Splitting(patterns=(_QWEN2,), nfc=True)

SPLITTINGS: Mapping[str, _Splitting] = MappingProxyType(
    {
        "gpt-2": _Splitting(patterns=(_GPT2,)),
        "smollm": _BY_DIGIT,
        "starcoder": _BY_DIGIT,
        "refact": _BY_DIGIT,
        "command-r": _BY_DIGIT,
        "llama3": _OF_LLAMA3,
        "llama-v3": _OF_LLAMA3,
        "llama-bpe": _OF_LLAMA3,
        "qwen2": _OF_QWEN2,
        "deepseek-r1-qwen": _OF_QWEN2,
        "default": _Splitting(patterns=_UNNAMED),
    }
)
"""By ``tokenizer.ggml.pre``; the names are those of llama.cpp's converter."""


def tokenizer_from_gguf(gguf: GgufFile) -> BuiltTokenizer:
    """Build the tokenizer the file describes: byte-level BPE, or SentencePiece BPE.

    Raises: ModelError: inconsistent data, or a tokenizer or pre-tokenizer this build does not know.
    """
    model = gguf.metadata.get(f"{_KEY}model")
    match model:
        case "gpt2":
            return _byte_level(gguf)
        case "llama":
            return _sentencepiece(gguf)
        case _:
            raise ModelError(f"{gguf.path}: {_KEY}model is {model!r}; supported are gpt2 and llama")


@attrs.frozen(kw_only=True, eq=False)
class _Tokens:
    pieces: tuple[str, ...]
    kinds: tuple[int, ...]

    def vocabulary(self) -> dict[str, int]:
        return {
            piece: number
            for number, (piece, kind) in enumerate(zip(self.pieces, self.kinds, strict=True))
            if kind != GGUF_UNUSED
        }

    def added(self) -> list[AddedToken]:
        """Tokens that are cut out of a text before anything else."""
        return [
            AddedToken(piece, special=kind == GGUF_CONTROL, normalized=False)
            for piece, kind in zip(self.pieces, self.kinds, strict=True)
            if kind in (GGUF_CONTROL, GGUF_USER_DEFINED)
        ]


def _strings(gguf: GgufFile, key: str) -> tuple[str, ...]:
    value = gguf.metadata.get(f"{_KEY}{key}")
    if not isinstance(value, tuple):
        raise ModelError(f"{gguf.path}: {_KEY}{key} is missing or no list")
    return tuple(one if isinstance(one, str) else "" for one in value)


def _tokens(gguf: GgufFile) -> _Tokens:
    pieces = _strings(gguf, "tokens")
    kinds = gguf.metadata.get(f"{_KEY}token_type")
    numbers = tuple(int(kind) for kind in kinds) if isinstance(kinds, tuple) else (1,) * len(pieces)
    if len(numbers) != len(pieces):
        raise ModelError(f"{gguf.path}: {_KEY}token_type has {len(numbers)} entries for {len(pieces)} tokens")
    if len(set(pieces)) != len(pieces):
        raise ModelError(f"{gguf.path}: {_KEY}tokens has the same token twice")
    return _Tokens(pieces=pieces, kinds=numbers)


def _byte_level(gguf: GgufFile) -> BuiltTokenizer:
    name = gguf.metadata.get(f"{_KEY}pre", "default")
    splitting = SPLITTINGS.get(str(name))
    if splitting is None:
        raise ModelError(f"{gguf.path}: {_KEY}pre is {name!r}; supported are {', '.join(SPLITTINGS)}")
    tokens = _tokens(gguf)
    merges: list[tuple[str, str]] = []
    for line in _strings(gguf, "merges"):
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise ModelError(f"{gguf.path}: {_KEY}merges has {line!r}; two tokens and a space are needed")
        merges.append((left, right))
    library = _assemble(gguf, tokens, merges, ignore_merges=splitting.whole_words)
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if splitting.nfc:
        library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    library.add_tokens(tokens.added())
    return BuiltTokenizer(library=library, pieces=ByteLevelPieces(), strips_leading_space=False)


def _sentencepiece(gguf: GgufFile) -> BuiltTokenizer:
    tokens = _tokens(gguf)
    scores = gguf.metadata.get(f"{_KEY}scores")
    if not isinstance(scores, tuple) or len(scores) != len(tokens.pieces):
        raise ModelError(f"{gguf.path}: {_KEY}scores is missing or has not one entry a token")
    unknown = gguf.metadata.get(f"{_KEY}unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens.pieces):
        raise ModelError(f"{gguf.path}: {_KEY}unknown_token_id is {unknown!r}; an id is needed")
    ranks = {piece: -float(score) for piece, score in zip(tokens.pieces, scores, strict=True)}
    library = _assemble(
        gguf,
        tokens,
        merges_of_scores(tokens.vocabulary(), ranks),
        unk_token=tokens.pieces[unknown],
        byte_fallback=True,
        fuse_unk=True,
    )
    prefix = gguf.metadata.get(f"{_KEY}add_space_prefix", True) is not False
    mark = normalizers.Replace(" ", WORD_MARK)
    library.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_MARK), mark]) if prefix else mark
    library.add_tokens(tokens.added())
    pieces = SentencePieces(byte_fallback=True)
    return BuiltTokenizer(library=library, pieces=pieces, strips_leading_space=prefix)


def merges_of_scores(vocabulary: Mapping[str, int], ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """Merge rules that do what SentencePiece's BPE does with scores.

    SentencePiece joins, again and again, the two neighbours whose joint piece scores best; a list of
    rules joins the neighbours whose rule comes first. Every cut of a piece into two pieces is a rule,
    in the order of the joint piece's rank (the smaller, the earlier).
    """
    rules = [
        (ranks[piece], number, piece[:cut], piece[cut:])
        for piece, number in vocabulary.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    rules.sort(key=lambda rule: rule[:2])
    return [(left, right) for _, _, left, right in rules]


def _assemble(gguf: GgufFile, tokens: _Tokens, merges: list[tuple[str, str]], **options: str | bool) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(tokens.vocabulary(), merges, **options))
    except Exception as fault:  # the library raises plain Exception
        raise ModelError(f"{gguf.path}: {_KEY}tokens and merges do not fit together: {fault}") from fault
