"""What one generation takes and gives: plain values, shared by the HTTP server and the Python API."""

from __future__ import annotations

from typing import TypeAlias

import attrs
import msgspec

from tokenspeed.plane.messages import Int32Array, SamplingParams

LOGPROB_FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


@attrs.frozen(kw_only=True, eq=False)
class GenerationInput:
    """One prompt and what is wanted for it.

    Attributes:
        prompt_ids: int32 ``[tokens]``.
        sampling: without stop strings, which are text and belong to the frontend.
        stop: the output ends right before the first of these.
        include_stop: keep the stop string, or the text of the stop token, in the output.
        n: choices; with a seed, choice i is seeded ``seed + i``.
        logprobs: alternatives to report for each new token besides itself; None: no log-probabilities.
        prompt_logprobs: the same for the prompt's tokens.
        continues_text: the output goes on from the prompt's text, so that a leading space is one
            between words; False for an answer that stands alone.
        timeout_s: ends this request sooner than the server's own limit.
        cache_salt: separates prefix-cache entries.
        name: what the caller calls it, to end it by; "" : nothing. Need not be unique.
    """

    prompt_ids: Int32Array
    sampling: SamplingParams = attrs.field(factory=SamplingParams)
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    continues_text: bool = True
    timeout_s: float | None = None
    cache_salt: bytes = b""
    priority: int = 0
    name: str = ""


@attrs.frozen(kw_only=True)
class TokenLogprob:
    """One token's log-probability and its alternatives.

    Attributes:
        offset: characters of the sequence's text before this token's.
        top: (id, log-probability) pairs, best first; the token itself is among them.
    """

    token_id: int
    logprob: float
    offset: int
    top: tuple[tuple[int, float], ...] = ()


PromptLogprobs: TypeAlias = tuple[TokenLogprob | None, ...]
"""By prompt position; the first token has no predecessor and so None."""


class ChoiceDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What became known of one choice. A value; a struct because one is made for every token.

    Attributes:
        prompt_index: which of the prompts handed over together.
        index: which of the prompt's `n` choices.
        text: to be appended; never taken back. May be "" while characters or a possible stop string
            are incomplete.
        token_ids, logprobs: of the new tokens, in order.
        finish_reason: stop, length or abort with the choice's last delta, else None.
        stop_reason: the stop string or the id in `stop_token_ids` that ended the choice.
        prompt_logprobs: once, with the choice's first delta, if asked for.
        completion_tokens: cumulative.
        weight_version: of the weights that all of the choice was computed with.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    weight_version: str = ""


@attrs.frozen(kw_only=True)
class ChoiceResult:
    """One finished choice; the fields mean what they mean in `ChoiceDelta`."""

    prompt_index: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: PromptLogprobs | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    weight_version: str = ""


def joined(deltas: list[ChoiceDelta]) -> ChoiceResult:
    """The deltas of one choice, from its first to its last."""
    last = deltas[-1]
    return ChoiceResult(
        prompt_index=last.prompt_index,
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason or "abort",
        stop_reason=last.stop_reason,
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
        prompt_tokens=last.prompt_tokens,
        cached_tokens=last.cached_tokens,
        completion_tokens=last.completion_tokens,
        weight_version=last.weight_version,
    )
