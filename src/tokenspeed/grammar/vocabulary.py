"""What a grammar needs to know of a tokenizer."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Vocabulary:
    """The tokens that may be sampled.

    Attributes:
        tokens: each one's bytes; b"" for those that no grammar ever allows, such as control tokens.
        stops: ids that end a sequence.
    """

    tokens: tuple[bytes, ...] = attrs.field(repr=False)
    stops: tuple[int, ...]
