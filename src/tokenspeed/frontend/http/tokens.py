"""Tokens and log-probabilities as the API shows them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from tokenspeed.frontend.generation import PromptLogprobs, TokenLogprob
from tokenspeed.frontend.http.replies import ChatLogprobs, CompletionLogprobs, ContentLogprob, PromptLogprob, TopLogprob
from tokenspeed.frontend.text.tokenizer import TextTokenizer


@attrs.frozen(kw_only=True, eq=False)
class TokenWords:
    """Text of single tokens. A token that is only part of a character has bytes but no text of its own."""

    tokenizer: TextTokenizer

    def text(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode("utf-8", "replace")

    def key(self, token: int) -> str:
        """A text that tells tokens apart even where they are not whole characters."""
        raw = self.tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
        content = [
            ContentLogprob(
                token=self.text(entry.token_id),
                logprob=entry.logprob,
                bytes=list(self.tokenizer.token_bytes(entry.token_id)),
                top_logprobs=[self._top(token, value) for token, value in entry.top],
            )
            for entry in entries
        ]
        return ChatLogprobs(content=content)

    def completion(
        self, entries: Sequence[TokenLogprob | None], first: int | None, *, shift: int
    ) -> CompletionLogprobs:
        """The four columns of completions.

        Args:
            entries: None only for a prompt's first token.
            first: that token.
            shift: added to every offset.
        """
        columns = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for entry in entries:
            token = first if entry is None else entry.token_id
            columns.tokens.append("" if token is None else self.key(token))
            columns.token_logprobs.append(None if entry is None else entry.logprob)
            columns.top_logprobs.append(None if entry is None else self._table(entry))
            columns.text_offset.append(max(0, (0 if entry is None else entry.offset) + shift))
        return columns

    def prompt(self, entries: PromptLogprobs) -> list[dict[str, PromptLogprob] | None]:
        return [
            None
            if entry is None
            else {
                str(token): PromptLogprob(logprob=value, decoded_token=self.text(token))
                for token, value in (*entry.top, (entry.token_id, entry.logprob))
            }
            for entry in entries
        ]

    def _top(self, token: int, value: float) -> TopLogprob:
        return TopLogprob(token=self.text(token), logprob=value, bytes=list(self.tokenizer.token_bytes(token)))

    def _table(self, entry: TokenLogprob) -> dict[str, float]:
        pairs = (*entry.top, (entry.token_id, entry.logprob))
        return {self.key(token): value for token, value in pairs}
