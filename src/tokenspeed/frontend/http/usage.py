"""Counting tokens of one call: each prompt once, each choice's output once."""

from __future__ import annotations

import attrs

from tokenspeed.frontend.generation import ChoiceDelta, ChoiceResult
from tokenspeed.frontend.http.replies import PromptDetails, Usage


@attrs.define(eq=False)
class UsageTally:
    """Writer: the response it belongs to.

    Attributes:
        prompt_tokens: of all prompts, known from the start.
        completion: tokens so far, by (prompt, choice).
        cached: prompt tokens found in the cache, by prompt; the first choice's number stands for all.
    """

    prompt_tokens: int
    completion: dict[tuple[int, int], int] = attrs.field(factory=dict[tuple[int, int], int])
    cached: dict[int, int] = attrs.field(factory=dict[int, int])

    def add(self, delta: ChoiceDelta | ChoiceResult) -> None:
        self.completion[delta.prompt_index, delta.index] = delta.completion_tokens
        if delta.index == 0:
            self.cached[delta.prompt_index] = delta.cached_tokens

    def usage(self) -> Usage:
        completion = sum(self.completion.values())
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=completion,
            total_tokens=self.prompt_tokens + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=sum(self.cached.values())),
        )
