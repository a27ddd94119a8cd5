"""One choice on its way from token ids to text: detokenized, searched for stop strings, cut where one was found."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Protocol

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.frontend.engine_client import Arrived
from tokenspeed.frontend.generation import (
    LOGPROB_FLOOR,
    ChoiceDelta,
    GenerationInput,
    PromptLogprobs,
    TokenLogprob,
)
from tokenspeed.frontend.text.detok import StreamDecoder
from tokenspeed.frontend.text.stops import Emitted
from tokenspeed.plane.messages import FINISH_WORDS, Finish, TopLogprobs


class StopSearch(Protocol):
    """Looks for stop strings in text that arrives in pieces."""

    def push(self, delta: str) -> Emitted: ...

    def flush(self) -> Emitted:
        """The text is over: what was held back as a possible beginning."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class NoStops:
    """The search of a request without stop strings: holds nothing back."""

    def push(self, delta: str) -> Emitted:
        return Emitted(text=delta)

    def flush(self) -> Emitted:
        return Emitted(text="")


NOTHING = Emitted(text="")


@attrs.define(eq=False)
class ChoiceState:
    """Writer: Choice, and its service for `first_s` and `last_s`.

    Attributes:
        tokens: new tokens kept so far.
        chars: characters decoded so far, those held back or cut included.
        first_s: when the first tokens came; None before.
        last_s: when the latest tokens came; None before the first.
    """

    tokens: int = 0
    chars: int = 0
    ended: bool = False
    first_s: float | None = None
    last_s: float | None = None


@attrs.frozen(kw_only=True, eq=False)
class Choice:
    """Turns what arrives for one sequence into deltas.

    A stop string ends the choice at the token that completed it: that token is the last one kept
    in ids, log-probabilities and usage, and what the engine produced beyond it is dropped.

    Attributes:
        single: tokens must be decoded one by one, to know which of them completed a stop string, or
            where in the text each begins.
        plain: until its end nothing but text can come of it: no stop strings, no log-probabilities.
    """

    inp: GenerationInput
    prompt_index: int
    index: int
    rid: str
    eos: frozenset[int]
    decoder: StreamDecoder
    search: StopSearch
    single: bool
    plain: bool
    state: ChoiceState = attrs.field(factory=ChoiceState)

    def take(self, arrived: Arrived) -> ChoiceDelta:
        """The delta of what arrived; its `finish_reason` tells whether it is the last."""
        state, ids = self.state, arrived.ids
        if self.plain and arrived.finish is Finish.RUNNING:
            text = self.decoder.push(ids)
            state.chars += len(text)
            state.tokens += len(ids)
            return self._delta(arrived, text, tuple(ids))
        stop_token = self._stop_token(arrived)
        before = state.chars
        visible = len(ids) if stop_token is None or self.inp.include_stop else len(ids) - 1
        text, ends, last = self._decode(ids[:visible], over=arrived.finish is not Finish.RUNNING)
        matched, kept = last.matched, len(ids)
        if matched is not None:
            kept = min(bisect.bisect_left(ends, state.chars - last.excess) + 1, kept)
        logprobs = self._logprobs(arrived, [before, *ends, state.chars][:kept])
        scores = self._prompt_logprobs(arrived)
        state.tokens += kept
        finish, reason = self._finish(arrived, matched, stop_token)
        state.ended = finish is not None
        return self._delta(arrived, text, tuple(ids[:kept]), logprobs, finish, reason, scores)

    def _delta(
        self,
        arrived: Arrived,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] = (),
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> ChoiceDelta:
        prompt_tokens = len(self.inp.prompt_ids)
        return ChoiceDelta(
            prompt_index=self.prompt_index,
            index=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            prompt_logprobs=prompt_logprobs,
            prompt_tokens=arrived.prompt_tokens or prompt_tokens,
            cached_tokens=min(arrived.cached_tokens, prompt_tokens),
            completion_tokens=self.state.tokens,
            weight_version=arrived.weight_version,
        )

    def _decode(self, ids: Sequence[int], *, over: bool) -> tuple[str, list[int], Emitted]:
        """The text of `ids` that may be sent; where in the sequence's text each token's text ends (if
        tokens are decoded singly); the emission that ended it, if a stop string did.

        Text that came before the `min_tokens`-th token is not searched, now or later.
        """
        state = self.state
        parts: list[str] = []
        ends: list[int] = []
        for piece in [(token,) for token in ids] if self.single else [tuple(ids)]:
            text = self.decoder.push(piece)
            state.chars += len(text)
            ends.append(state.chars)
            if state.tokens + len(ends) < self.inp.sampling.min_new_tokens:
                parts.append(text)
                continue
            emitted = self.search.push(text)
            parts.append(emitted.text)
            if emitted.matched is not None:
                return "".join(parts), ends, emitted
        emitted = NOTHING
        if over:
            tail = self.decoder.flush()
            state.chars += len(tail)
            emitted = self.search.push(tail)
            parts.append(emitted.text)
            if emitted.matched is None:
                emitted = self.search.flush()
                parts.append(emitted.text)
        return "".join(parts), ends, emitted

    def _stop_token(self, arrived: Arrived) -> int | None:
        """The id that made the engine end the sequence, if its output contains it."""
        if arrived.finish is not Finish.STOP or not arrived.ids:
            return None
        last = arrived.ids[-1]
        sampling = self.inp.sampling
        ends = last in sampling.stop_token_ids or (last in self.eos and not sampling.ignore_eos)
        return last if ends else None

    def _finish(
        self, arrived: Arrived, matched: str | None, stop_token: int | None
    ) -> tuple[str | None, str | int | None]:
        if matched is not None:
            return "stop", matched
        if arrived.finish is Finish.RUNNING:
            return None, None
        if stop_token in self.eos and not self.inp.sampling.ignore_eos:
            stop_token = None
        return FINISH_WORDS[arrived.finish], stop_token

    def _logprobs(self, arrived: Arrived, offsets: Sequence[int]) -> tuple[TokenLogprob, ...]:
        wanted = self.inp.logprobs
        if wanted is None:
            return ()
        if len(arrived.logprobs) != len(arrived.ids):
            raise InvariantBroken(
                "one log-probability for each new token", tokens=len(arrived.ids), values=len(arrived.logprobs)
            )
        tops: list[TopLogprobs | None] = list(arrived.top_logprobs) or [None] * len(arrived.ids)
        return tuple(
            _entry(arrived.ids[at], arrived.logprobs[at], offset, tops[at], wanted) for at, offset in enumerate(offsets)
        )

    def _prompt_logprobs(self, arrived: Arrived) -> PromptLogprobs | None:
        """Once, with the first tokens; None where they were not asked for."""
        wanted, values = self.inp.prompt_logprobs, arrived.prompt_logprobs
        if wanted is None or not values:
            return None
        tops = arrived.prompt_top_logprobs or [None] * len(values)
        decoder = StreamDecoder(tokenizer=self.decoder.tokenizer, skip_special_tokens=False)
        found: list[TokenLogprob | None] = []
        chars = 0
        for token, value, top in zip(self.inp.prompt_ids.tolist(), values, tops, strict=True):
            found.append(None if value is None else _entry(token, value, chars, top, wanted))
            chars += len(decoder.push((token,)))
        return tuple(found)


def _entry(token: int, value: float, offset: int, top: TopLogprobs | None, wanted: int) -> TokenLogprob:
    pairs: list[tuple[int, float]] = []
    if top is not None and wanted:
        pairs = [(i, _finite(v)) for i, v in zip(top.ids[:wanted], top.values[:wanted], strict=True)]
    if wanted and all(other != token for other, _ in pairs):
        pairs.append((token, _finite(value)))
    return TokenLogprob(token_id=token, logprob=_finite(value), offset=offset, top=tuple(pairs))


def _finite(value: float) -> float:
    return LOGPROB_FLOOR if math.isnan(value) else min(max(value, LOGPROB_FLOOR), 0.0)
