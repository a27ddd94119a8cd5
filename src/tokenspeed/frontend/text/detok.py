"""Token ids to text, as they arrive."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable

import attrs

from tokenspeed.frontend.text.tokenizer import TextTokenizer


@attrs.define(eq=False)
class DecodeState:
    """What one stream remembers. One writer: its StreamDecoder.

    Attributes:
        held: the bytes of a character that is not whole yet (three at most).
        at_start: no text came yet.
    """

    held: bytes = b""
    at_start: bool = True


@attrs.frozen(kw_only=True, eq=False)
class StreamDecoder:
    """Decodes one sequence piece by piece; its pieces joined are ``tokenizer.decode`` of all ids.

    A token costs its own bytes only: nothing is decoded twice.

    Attributes:
        continues_text: the ids go on from text that was shown before (a completion's prompt): a leading
            space stays, which the tokenizer's ``decode`` would remove.
    """

    tokenizer: TextTokenizer
    skip_special_tokens: bool = True
    continues_text: bool = False
    state: DecodeState = attrs.field(factory=DecodeState)

    def push(self, ids: Iterable[int]) -> str:
        """Text that is certain after `ids`; never half a character."""
        tokenizer, state = self.tokenizer, self.state
        parts, skips = [state.held], self.skip_special_tokens
        for one in ids:
            if not (skips and tokenizer.is_special(one)):
                parts.append(tokenizer.token_bytes(one))  # noqa: PERF401 - a comprehension is one more call a token
        data = b"".join(parts)
        text, used = utf_8_decode(data, "replace", False)
        state.held = data[used:]
        return self._shown(text) if state.at_start else text

    def flush(self) -> str:
        """What was held back: U+FFFD for a character that was cut off, or nothing. The sequence is over."""
        held, self.state.held = self.state.held, b""
        return self._shown(held.decode("utf-8", "replace"))

    def _shown(self, text: str) -> str:
        if not text or not self.state.at_start:
            return text
        self.state.at_start = False
        strips = self.tokenizer.strips_leading_space and not self.continues_text
        return text.removeprefix(" ") if strips else text


def open_stream(
    tokenizer: TextTokenizer, *, skip_special_tokens: bool = True, continues_text: bool = False
) -> StreamDecoder:
    """A decoder for one sequence; see :class:`StreamDecoder`."""
    return StreamDecoder(tokenizer=tokenizer, skip_special_tokens=skip_special_tokens, continues_text=continues_text)
