"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenspeed.checkpoint.open import Checkpoint


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


def load_tokenizer(checkpoint: Checkpoint) -> TextTokenizer:
    """Build the tokenizer of `checkpoint`.

    Raises: ModelError: damaged data, or a kind of tokenizer this build does not know.
    """
    raise NotImplementedError
