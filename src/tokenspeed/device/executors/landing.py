"""From the host copies of one forward to its result, read by the committing thread."""

from __future__ import annotations

import attrs

from tokenspeed.device.backends.base import DeviceEvent, HostCopy
from tokenspeed.device.executors.prepare import Prepared
from tokenspeed.device.grammar_fill import NO_ENDS, GrammarEnds
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import TopLogprobs
from tokenspeed.plane.ports import Wakeup
from tokenspeed.plane.results import ForwardResult, PromptLogprobs


@attrs.frozen(kw_only=True, eq=False)
class LogprobCopies:
    """float32 ``[q]``, and the best alternatives: int64 and float32 ``[q, top]``."""

    values: HostCopy
    top_ids: HostCopy
    top_values: HostCopy


@attrs.define(eq=False)
class Outputs:
    """What one forward's job copies out. Writer: that job, before its event."""

    tokens: HostCopy | None = None
    nan: HostCopy | None = None
    logprobs: LogprobCopies | None = None
    prompt: tuple[LogprobCopies, ...] = ()
    grammars: GrammarEnds = NO_ENDS


@attrs.frozen(kw_only=True, eq=False)
class StreamLanding:
    """`plane.ports.Landing` of a forward on a stream."""

    event: DeviceEvent
    prepared: Prepared
    outputs: Outputs

    def landed(self) -> bool:
        return self.event.query()

    def notify(self, wakeup: Wakeup) -> None:
        self.event.notify(wakeup)

    def result(self) -> ForwardResult:
        """Wait for the copy event, without the GIL; then make lists of the copies (OL-1)."""
        self.event.wait()
        prepared, outputs = self.prepared, self.outputs
        if outputs.tokens is None or outputs.nan is None:
            return ForwardResult(tokens=[], prompt_logprobs=_prompt(prepared, outputs), device_s=self.event.busy_s)
        tokens: list[int] = outputs.tokens.array().tolist()
        token_logprobs, token_tops = _sampled(prepared, outputs)
        return ForwardResult(
            tokens=tokens,
            token_logprobs=token_logprobs,
            token_top_logprobs=token_tops,
            prompt_logprobs=_prompt(prepared, outputs),
            nan_rows=prepared.sampled[outputs.nan.array().astype(bool)].tolist(),
            grammar_ends=list(outputs.grammars.ends),
            grammar_faults=list(outputs.grammars.faults),
            grammar_costly=list(outputs.grammars.costly),
            device_s=self.event.busy_s,
        )


@attrs.frozen(kw_only=True, eq=False)
class NoForwardLanding:
    """`plane.ports.Landing` of a plan without a batch: its cache work, queued behind `event`."""

    event: DeviceEvent

    def landed(self) -> bool:
        return self.event.query()

    def notify(self, wakeup: Wakeup) -> None:
        self.event.notify(wakeup)

    def result(self) -> ForwardResult:
        self.event.wait()
        return ForwardResult(tokens=[], device_s=self.event.busy_s)


def _sampled(prepared: Prepared, outputs: Outputs) -> tuple[dict[int, float], dict[int, TopLogprobs]]:
    """Log-probabilities of sampled tokens, and their alternatives where any were asked for, by batch index."""
    if prepared.logprobs is None or outputs.logprobs is None:
        return {}, {}
    values, tops = _lists(outputs.logprobs, [alternatives for _, alternatives in prepared.logprobs.wanted])
    indices = [index for index, _ in prepared.logprobs.wanted]
    wanting = {index: top for index, top in zip(indices, tops, strict=True) if top.ids}
    return dict(zip(indices, values, strict=True)), wanting


def _prompt(prepared: Prepared, outputs: Outputs) -> list[PromptLogprobs]:
    if prepared.prompt is None:
        return []
    wanted = [alternatives for _, _, count, alternatives in prepared.prompt.parts for _ in range(count)]
    values: list[float] = []
    tops: list[TopLogprobs] = []
    for copies in outputs.prompt:
        more, alternatives = _lists(copies, wanted[len(values) :])
        values.extend(more)
        tops.extend(alternatives)
    if len(values) != len(wanted):
        raise InvariantBroken("prompt log-probabilities are missing", wanted=len(wanted), there=len(values))
    parts, at = [], 0
    for index, first, count, _ in prepared.prompt.parts:
        end = at + count
        parts.append(PromptLogprobs(index=index, first=first, values=values[at:end], top=tops[at:end]))
        at = end
    return parts


def _lists(copies: LogprobCopies, wanted: list[int]) -> tuple[list[float], list[TopLogprobs]]:
    """The copies as lists; row i keeps its best ``wanted[i]`` alternatives. `wanted` may be longer."""
    values: list[float] = copies.values.array().tolist()
    ids, tops = copies.top_ids.array().tolist(), copies.top_values.array().tolist()
    rows = zip(ids, tops, wanted, strict=False)
    return values, [TopLogprobs(ids=tuple(i[:k]), values=tuple(v[:k])) for i, v, k in rows]
