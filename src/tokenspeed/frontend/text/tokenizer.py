"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, assert_never

import attrs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tokenspeed.checkpoint.open import Checkpoint
from tokenspeed.checkpoint.tokenizer_data import TokenizerBytes, TokenizerData, TokenizerGguf, TokenizerJson
from tokenspeed.errors import RequestError
from tokenspeed.frontend.text.pieces import BYTE_SIGNS, ByteLevelPieces
from tokenspeed.frontend.text.tokenizer_gguf import tokenizer_from_gguf
from tokenspeed.frontend.text.tokenizer_json import BuiltTokenizer, tokenizer_from_json


class TextTokenizer(Protocol):
    """A model's tokenizer. Immutable; may be used from several threads at once.

    The text of a sequence is the UTF-8 text of its tokens' bytes joined, with U+FFFD for what is
    not UTF-8, less one leading space where :attr:`strips_leading_space` says so.
    """

    @property
    def vocab_size(self) -> int:
        """Ids below this have a text."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def strips_leading_space(self) -> bool:
        """The tokenizer's own convention puts a space before a text, which decoding removes."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in `text` become their ids.

        Args:
            add_special_tokens: put the model's BOS in front, unless `text` starts with it already.
                An end token is never added: a prompt is there to be continued.
        Raises: RequestError: `text` is not valid Unicode.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; b"" for an id without a token."""
        ...

    def is_special(self, token_id: int) -> bool:
        """True for control tokens (BOS, EOS, role marks), which `skip_special_tokens` leaves out."""
        ...

    def id_of(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling, or None."""
        ...


@attrs.define(eq=False)
class Spelled:
    """Bytes of the tokens that were seen; no more than the vocabulary has. Writer: LibraryTokenizer, on any thread."""

    bytes_of: dict[int, bytes] = attrs.field(factory=dict[int, bytes])


@attrs.frozen(kw_only=True, eq=False)
class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library that decodes by bytes.

    Attributes:
        added: tokens beside the model's own, by id; True: special.
        prefix_ids: what a text prompt starts with.
    """

    built: BuiltTokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    added: Mapping[int, bool]
    prefix_ids: tuple[int, ...]
    spelled: Spelled = attrs.field(factory=Spelled)

    @property
    def strips_leading_space(self) -> bool:
        return self.built.strips_leading_space

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            # A batch of one: `encode` holds the interpreter for the whole text, this does not. Fast: without offsets.
            ids: list[int] = self.built.library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (TypeError, UnicodeError) as fault:  # how the library says that a text has no UTF-8 form
            raise _unencodable(text) from fault
        prefix = list(self.prefix_ids)
        if add_special_tokens and ids[: len(prefix)] != prefix:
            return prefix + ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        skipped = self.is_special if skip_special_tokens else _never
        text = b"".join(self.token_bytes(one) for one in ids if not skipped(one)).decode("utf-8", "replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        found = self.spelled.bytes_of.get(token_id)
        if found is None:
            if not 0 <= token_id < self.vocab_size:
                return b""
            piece = self.built.library.id_to_token(token_id)
            found = b"" if piece is None else self.built.pieces.to_bytes(piece, added=token_id in self.added)
            self.spelled.bytes_of[token_id] = found
        return found

    def is_special(self, token_id: int) -> bool:
        return self.added.get(token_id, False)

    def id_of(self, token: str) -> int | None:
        return self.built.library.token_to_id(token)


def _unencodable(text: str) -> RequestError:
    place = next((at for at, sign in enumerate(text) if "\ud800" <= sign <= "\udfff"), -1)
    return RequestError(
        f"the text has half a surrogate pair ({text[place]!a}) at character {place}; valid Unicode is needed"
    )


def _never(_: int) -> bool:
    return False


def load_tokenizer(checkpoint: Checkpoint) -> TextTokenizer:
    """Build the tokenizer of `checkpoint`.

    Raises: ModelError: damaged data, or a kind of tokenizer this build does not know.
    """
    built = built_tokenizer(checkpoint.tokenizer)
    added = {number: token.special for number, token in built.library.get_added_tokens_decoder().items()}
    return LibraryTokenizer(
        built=built,
        vocab_size=checkpoint.tokenizer_vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
        bos_token_id=checkpoint.bos_token_id,
        added=MappingProxyType(added),
        prefix_ids=checkpoint.tokenizer.prefix_ids,
    )


def built_tokenizer(data: TokenizerData) -> BuiltTokenizer:
    """The library's tokenizer. Raises: ModelError."""
    match data:
        case TokenizerJson(path=path):
            return tokenizer_from_json(path)
        case TokenizerGguf(gguf=gguf):
            return tokenizer_from_gguf(gguf)
        case TokenizerBytes(specials=specials):
            return tokenizer_of_bytes(specials)
        case other:
            assert_never(other)


def tokenizer_of_bytes(specials: Sequence[str]) -> BuiltTokenizer:
    """Ids 0..255 are bytes; `specials` follow."""
    # Without a cache: a text is one word here, so that it would keep the last ten thousand texts.
    library = Tokenizer(models.BPE({sign: byte for byte, sign in BYTE_SIGNS.items()}, [], cache_capacity=0))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return BuiltTokenizer(library=library, pieces=ByteLevelPieces(), strips_leading_space=False)
