"""Generation: prompts in, text out, as it comes. The HTTP server and the Python API both use this class.

One call is a group of sequences (prompts times choices) on one engine. The group is admitted as a
whole; a sequence the engine refuses ends the group with that refusal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

import attrs

from tokenspeed.errors import EngineDead, RequestError
from tokenspeed.frontend.calls import UNNAMED, CallLog, CallName, NoCallLog
from tokenspeed.frontend.choice import Choice, NoStops
from tokenspeed.frontend.engine_client import Arrived, EngineClient, Inbox, must_wake
from tokenspeed.frontend.gate import SequenceGate
from tokenspeed.frontend.generation import ChoiceDelta, ChoiceResult, GenerationInput, joined
from tokenspeed.frontend.ports import DeltaSink, NoSink, RequestMeter
from tokenspeed.frontend.routing import Router
from tokenspeed.frontend.text.detok import StreamDecoder
from tokenspeed.frontend.text.stops import StopMatcher, prepare_stops
from tokenspeed.frontend.text.tokenizer import TextTokenizer
from tokenspeed.frontend.tracing import CallSpan, begin_call
from tokenspeed.plane.messages import EngineInfo, Finish, GenerateRequest, SamplingParams
from tokenspeed.plane.ports import Clock
from tokenspeed.plane.traces import NoTracer, Tracer

NO_SINK = NoSink()
CLIENT_LEFT = 499
"""Told of a call whose consumer went away before its end."""


@attrs.define(eq=False)
class Group:
    """The sequences of one call, while it runs. Writer: the call's own generator."""

    engine: EngineClient
    inbox: Inbox
    choices: tuple[Choice, ...]
    began_s: float
    live: int
    span: CallSpan
    name: CallName
    answered: set[int] = attrs.field(factory=set[int])
    """Prompts whose first token came."""
    left: dict[int, int] = attrs.field(factory=dict[int, int])
    """Choices still running, by prompt."""


@attrs.define(eq=False)
class LiveGroups:
    """Writer: GenerationService. The groups of calls that run, to be ended by what their callers name them."""

    groups: set[Group] = attrs.field(factory=set[Group])


@attrs.frozen(kw_only=True, eq=False)
class GenerationService:
    """Fans out, detokenizes, matches stop strings, trims, times out and cleans up.

    Runs on one event loop. Inputs are expected to have passed `limits.input_faults`.
    """

    engines: tuple[EngineClient, ...]
    router: Router
    tokenizer: TextTokenizer
    gate: SequenceGate
    clock: Clock
    meter: RequestMeter
    timeout_s: float
    tracer: Tracer = attrs.field(factory=NoTracer)
    calls: CallLog = attrs.field(factory=NoCallLog)
    live: LiveGroups = attrs.field(factory=LiveGroups)

    @property
    def info(self) -> EngineInfo:
        """What the engines serve; all of them serve the same."""
        return self.engines[0].info

    @property
    def in_flight(self) -> int:
        return sum(engine.in_flight for engine in self.engines)

    def trouble(self, *, stall_s: float) -> str:
        """Why no request could be served now, or "" if some engine can."""
        troubles = [engine.trouble(stall_s=stall_s) for engine in self.engines]
        return "" if any(not text for text in troubles) else "; ".join(troubles)

    def end_all(self) -> None:
        """End every running request with the reason ``abort``."""
        for engine in self.engines:
            engine.end_all()

    def end_named(self, name: str) -> int:
        """End what runs under a name that begins with `name`, with the reason ``abort``; returns how many sequences.

        A sequence is known by the name in its input, and by the id that the engine knows it under. A call's own
        names are taken whole: the id in its answer, that with a sequence's place (``ID-0``), the client's id.
        """
        ended = 0
        for group in tuple(self.live.groups):
            rids = [
                choice.rid
                for place, choice in enumerate(group.choices)
                if not choice.state.ended
                and (
                    choice.rid == name
                    or group.name.means(name, place)
                    or (choice.inp.name and choice.inp.name.startswith(name))
                )
            ]
            group.engine.end(rids)
            ended += len(rids)
        return ended

    @property
    def weight_version(self) -> str:
        """Of all engines; while they differ, each different one, in the engines' order."""
        return ", ".join(dict.fromkeys(engine.weight_version for engine in self.engines))

    def stream(
        self, inp: GenerationInput, call: CallName = UNNAMED, sink: DeltaSink = NO_SINK
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """Deltas of all `n` choices of one prompt, in order of arrival; see `stream_batch`."""
        return self.stream_batch((inp,), call, sink)

    async def stream_batch(
        self, inputs: Sequence[GenerationInput], call: CallName = UNNAMED, sink: DeltaSink = NO_SINK
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """Deltas of all choices of all `inputs`, in order of arrival; close it to cancel what still runs.

        Args:
            sink: gets the deltas that come while the next one is awaited here, if they have nothing but text and
                it takes them; these are not yielded.

        Raises:
            RequestError: refused (429: no room), ended by the engine, or over the time limit (408).
            EngineDead: the engine is gone.
        """
        total = sum(inp.n for inp in inputs)
        began_s = self.clock.now_s()
        held = 0
        group: Group | None = None
        reason, status = "abort", CLIENT_LEFT
        try:
            await self.gate.enter(total)
            held = total
            group = self._start(inputs, call, began_s)
            group.inbox.pass_on = partial(self._pass_on, group, sink)
            self.live.groups.add(group)
            limit_s = min([self.timeout_s, *(inp.timeout_s for inp in inputs if inp.timeout_s is not None)])
            timer = asyncio.get_running_loop().call_later(limit_s, group.inbox.expire)
            try:
                while group.live:
                    arrived = await group.inbox.take()
                    for entry in arrived.values():
                        if entry.finish is Finish.ABORT and entry.status:
                            raise RequestError(entry.message, status=entry.status)
                    for place, entry in arrived.items():
                        choice = group.choices[place]
                        if choice.state.ended:
                            continue
                        delta = self._take(group, choice, entry)
                        if delta.finish_reason is not None:
                            held -= 1
                            self.gate.leave(1)
                        yield delta
                    if group.live and group.inbox.expired:
                        raise RequestError(f"the request ran longer than its limit of {limit_s:g} s", status=408)
            finally:
                timer.cancel()
            status = 200
        except Exception as exc:
            reason, status = "error", _status_of(exc)
            raise
        finally:
            if group is not None:
                if not group.live and status == CLIENT_LEFT:
                    status = 200  # closed on the last delta
                self.live.groups.discard(group)
                self._close(group, reason)
            self.gate.leave(held)
            rids = () if group is None else group.inbox.rids
            self.calls.ended(call, rids=rids, status=status, seconds=self.clock.now_s() - began_s)

    def _pass_on(self, group: Group, sink: DeltaSink, arrived: dict[int, Arrived]) -> bool:
        """Put what arrived into `sink`; False if that cannot be done for all of it, or must not."""
        choices = group.choices
        for place, entry in arrived.items():
            if entry.finish is not Finish.RUNNING or not choices[place].plain or choices[place].state.last_s is None:
                return False
        if group.inbox.expired or not sink.takes():
            return False
        for place, entry in arrived.items():
            sink.put(self._take(group, choices[place], entry))
        return True

    async def run(self, inp: GenerationInput, call: CallName = UNNAMED) -> list[ChoiceResult]:
        """All choices of one prompt, by index."""
        (choices,) = await self.run_batch((inp,), call)
        return choices

    async def run_batch(self, inputs: Sequence[GenerationInput], call: CallName = UNNAMED) -> list[list[ChoiceResult]]:
        """All choices of all prompts, in order. Raises what `stream_batch` raises."""
        found: list[list[list[ChoiceDelta]]] = [[[] for _ in range(inp.n)] for inp in inputs]
        async with aclosing(self.stream_batch(inputs, call)) as deltas:
            async for delta in deltas:
                found[delta.prompt_index][delta.index].append(delta)
        return [[joined(choice) for choice in choices] for choices in found]

    def _start(self, inputs: Sequence[GenerationInput], call: CallName, began_s: float) -> Group:
        engine = self.engines[self.router.pick(self.engines)]
        rids = engine.new_rids(sum(inp.n for inp in inputs))
        eos = frozenset(engine.info.eos_token_ids)
        places = [(at, inp, i) for at, inp in enumerate(inputs) for i in range(inp.n)]
        choices = tuple(
            self._choice(inp, prompt_index=at, index=i, rid=rid, eos=eos)
            for rid, (at, inp, i) in zip(rids, places, strict=True)
        )
        span = begin_call(self.tracer, rids[0], len(rids))
        inbox = engine.submit([_request(choice, engine.info, span.handed_on) for choice in choices])
        for inp in inputs:
            self.meter.admitted(choices=inp.n, max_tokens=inp.sampling.max_new_tokens)
        return Group(
            engine=engine,
            inbox=inbox,
            choices=choices,
            began_s=began_s,
            live=len(choices),
            span=span,
            name=call,
            left={at: inp.n for at, inp in enumerate(inputs)},
        )

    def _choice(self, inp: GenerationInput, *, prompt_index: int, index: int, rid: str, eos: frozenset[int]) -> Choice:
        return Choice(
            inp=inp,
            prompt_index=prompt_index,
            index=index,
            rid=rid,
            eos=eos,
            decoder=StreamDecoder(
                tokenizer=self.tokenizer,
                skip_special_tokens=inp.skip_special_tokens,
                continues_text=inp.continues_text,
            ),
            search=StopMatcher(words=prepare_stops(inp.stop), include=inp.include_stop) if inp.stop else NoStops(),
            single=bool(inp.stop) or inp.logprobs is not None,
            plain=not inp.stop and inp.logprobs is None and inp.prompt_logprobs is None,
        )

    def _take(self, group: Group, choice: Choice, entry: Arrived) -> ChoiceDelta:
        """One choice's delta, its moments recorded; cuts the engine short if a stop string ended it."""
        delta = choice.take(entry)
        now_s, state = self.clock.now_s(), choice.state
        if delta.token_ids:
            if state.last_s is None:
                state.first_s = now_s
                self._answered(group, delta, now_s)
            gap_s = None if state.last_s is None else now_s - state.last_s
            self.meter.tokens(len(delta.token_ids), gap_s)
            state.last_s = now_s
        if delta.finish_reason is not None:
            group.engine.abort((choice.rid,))  # nothing to do unless a stop string ended it
            self._ended(group, choice, delta.finish_reason, now_s)
        return delta

    def _answered(self, group: Group, delta: ChoiceDelta, now_s: float) -> None:
        """A choice's first token came; it may be its prompt's."""
        if delta.prompt_index in group.answered:
            return
        group.answered.add(delta.prompt_index)
        self.meter.first_token(
            seconds=now_s - group.began_s, prompt_tokens=delta.prompt_tokens, cached_tokens=delta.cached_tokens
        )
        group.span.answered(prompt_index=delta.prompt_index, prompt_tokens=delta.prompt_tokens, now_s=now_s)

    def _ended(self, group: Group, choice: Choice, reason: str, now_s: float) -> None:
        choice.state.ended = True
        group.live -= 1
        group.left[choice.prompt_index] -= 1
        state = choice.state
        decode_s = 0.0 if state.first_s is None or state.last_s is None else state.last_s - state.first_s
        self.meter.choice_ended(reason=reason, tokens=state.tokens, decode_s=decode_s)
        if not group.left[choice.prompt_index]:
            tokens = (other.state.tokens for other in group.choices if other.prompt_index == choice.prompt_index)
            self.meter.request_ended(seconds=now_s - group.began_s, most_tokens=max(tokens))

    def _close(self, group: Group, reason: str) -> None:
        """Stop what still runs: the consumer left, or something failed."""
        group.engine.abort(group.inbox.rids)
        group.inbox.pass_on = must_wake  # lets go of the group
        now_s, outcome = self.clock.now_s(), reason if group.live else "finished"
        for choice in group.choices:
            if not choice.state.ended:
                self._ended(group, choice, reason, now_s)
        made = sum(choice.state.tokens for choice in group.choices)
        group.span.end(began_s=group.began_s, now_s=now_s, wall_s=time.time(), output_tokens=made, reason=outcome)


def _status_of(exc: Exception) -> int:
    match exc:
        case RequestError():
            return exc.status
        case EngineDead():
            return 503
        case _:
            return 500


def _request(choice: Choice, info: EngineInfo, trace: str) -> GenerateRequest:
    inp = choice.inp
    asked = [top for top in (inp.logprobs, inp.prompt_logprobs) if top is not None]
    return GenerateRequest(
        rid=choice.rid,
        input_ids=inp.prompt_ids,
        sampling=_sampling(inp, choice.index, info),
        return_logprob=inp.logprobs is not None,
        top_logprobs=max(asked, default=0),
        prompt_logprobs=-1 if inp.prompt_logprobs is None else 0,
        cache_salt=inp.cache_salt,
        priority=inp.priority,
        trace=trace,
    )


def _sampling(inp: GenerationInput, index: int, info: EngineInfo) -> SamplingParams:
    """The sampling of choice `index`: a budget that fits the context, a seed of its own."""
    sampling = inp.sampling
    most, seed = sampling.max_new_tokens, sampling.seed
    room = info.max_model_len - len(inp.prompt_ids)
    if most is not None and most > room:
        sampling = attrs.evolve(sampling, max_new_tokens=room)
    if seed is not None and index:
        sampling = attrs.evolve(sampling, seed=(seed + index) % 2**63)
    return sampling
