"""Prompts from text and from messages: bounded before, and off the event loop while, they are tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs

from tokenspeed.errors import RequestError
from tokenspeed.frontend.text.tokenizer import TextTokenizer
from tokenspeed.frontend.workers import INLINE_CHARS, TextWorkers


class ChatRenderer(Protocol):
    """The model's chat template."""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        Raises: RequestError: the messages are malformed, or the template refuses them.
        """
        ...


@attrs.frozen(kw_only=True, eq=False)
class PromptMaker:
    """Makes token ids of what clients send.

    Attributes:
        chat: None: the model has no chat template.
        max_chars: text longer than this cannot fit the model's context, whatever it says.
    """

    tokenizer: TextTokenizer
    chat: ChatRenderer | None
    workers: TextWorkers
    max_model_len: int
    max_chars: int

    async def from_text(
        self, text: str, *, add_special_tokens: bool, field: str = "prompt", any_length: bool = False
    ) -> list[int]:
        """Token ids of `text`.

        Args:
            any_length: what does not fit will be cut off.

        Raises: RequestError: 400, too long to fit or not valid Unicode; 429, too much is being tokenized.
        """
        if not any_length:
            self._check_chars(len(text), field)
        return await self.any_text(text, add_special_tokens=add_special_tokens)

    async def any_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """As `from_text`, of any length."""
        return await self.workers.run(
            len(text), lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def from_messages(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        extra: Mapping[str, object],
        tools: Sequence[Mapping[str, object]] = (),
        add_special_tokens: bool = False,
        any_length: bool = False,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            extra: further variables of the template.
            add_special_tokens: usually the template writes its own BOS if the model has one.

        Raises: RequestError: 400, as `from_text`, or the model has no chat template, or it refuses the messages.
        """
        chat = self.chat
        if chat is None:
            raise RequestError("this model has no chat template; use /v1/completions", field="messages")
        chars = _chars((*messages, *tools, extra))
        if not any_length:
            self._check_chars(sum(_content_chars(message.get("content")) for message in messages), "messages")

        def make() -> list[int]:
            text = chat.render(messages, add_generation_prompt=add_generation_prompt, tools=tools or None, extra=extra)
            if not any_length:
                self._check_chars(len(text), "messages")
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await self.workers.run(chars, make)

    def _check_chars(self, chars: int, field: str) -> None:
        if chars > self.max_chars:
            raise RequestError(
                f"{field}: {chars} characters is not allowed; expected at most {self.max_chars},"
                f" since no longer text fits the {self.max_model_len} tokens of this model",
                field=field,
            )


ITEM_CHARS = 16
"""What an object or a list costs a template, next to characters."""


def _chars(value: object) -> int:
    """About how much text `value` is for a template; stops counting where it is certainly much."""
    size, waiting = 0, [value]
    while waiting and size <= INLINE_CHARS:
        one = waiting.pop()
        if isinstance(one, str):
            size += len(one)
            continue
        size += ITEM_CHARS
        if isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    return size


def _content_chars(content: object) -> int:
    """Characters of a message's content, as far as it is text."""
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else []
    return sum(len(text) for part in parts if isinstance(part, dict) and isinstance(text := part.get("text"), str))


def prompt_maker(
    tokenizer: TextTokenizer, chat: ChatRenderer | None, workers: TextWorkers, *, max_model_len: int
) -> PromptMaker:
    """Looks at every token once, to know the longest."""
    longest = max((len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)), default=1)
    return PromptMaker(
        tokenizer=tokenizer,
        chat=chat,
        workers=workers,
        max_model_len=max_model_len,
        max_chars=max_model_len * max(longest, 1),
    )
