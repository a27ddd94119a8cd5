"""The asyncio end of one engine's link: who gets which output, and what becomes of it when the engine dies.

Events arrive on a wire thread, are put into a deque and handled on the event loop. Everything else
here runs on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import attrs

from tokenspeed.errors import EngineDead
from tokenspeed.frontend.ports import LoadMeter
from tokenspeed.plane.messages import (
    AbortRequest,
    ControlOp,
    ControlReply,
    EngineEvent,
    EngineGone,
    EngineInfo,
    Finish,
    GenerateRequest,
    LoadReport,
    OutputBatch,
    PauseOp,
    ResumeOp,
    TopLogprobs,
)
from tokenspeed.plane.operations import FIRST_WEIGHT_VERSION, MEMORY_TAGS, ReleaseMemoryOp, ResumeMemoryOp
from tokenspeed.plane.ports import Clock, EngineLink

T = TypeVar("T")

PAUSED = "paused"
FRESH_S = 3.0
"""How old a load report may be; an engine sends one a second if it has nothing else to say."""


@attrs.define(eq=False)
class Arrived:
    """What came for one sequence since its consumer last looked.

    A consumer that does not look makes this grow, never anything else; it is bounded by the
    sequence's max_tokens, which the context length bounds.

    Sequences are empty, or lists that `more` made: most tokens come without log-probabilities.

    Attributes:
        finish: RUNNING until the engine's last word on this sequence.
        status, message: why the engine ended or refused it; 0 and "" for an ordinary end.
        weight_version: of the weights that computed this; an engine changes them between requests only.
    """

    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    top_logprobs: Sequence[TopLogprobs] = ()
    prompt_logprobs: Sequence[float | None] = ()
    prompt_top_logprobs: Sequence[TopLogprobs | None] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish: Finish = Finish.RUNNING
    status: int = 0
    message: str = ""
    weight_version: str = ""


def more(known: Sequence[T], new: Sequence[T]) -> Sequence[T]:
    """`known`, which is empty or came from here, with `new` behind it; never the caller's own sequence."""
    if isinstance(known, list):
        known.extend(new)
        return known
    return [*new]


def must_wake(_: dict[int, Arrived]) -> bool:
    """The `Inbox.pass_on` of a consumer that wants everything itself."""
    return False


@attrs.define(eq=False)
class Inbox:
    """Where the sequences of one consumer arrive. Writers: the engine client, and the timer that expires it.

    Attributes:
        rids: of the sequences, by their place in the group.
        pass_on: asked for the consumer while it waits in `take`: False if it must be woken, and then nothing of
            what arrived was used. What it raises, `take` raises.
        arrived: by place, what was not taken yet.
        touched: something came in the running delivery.
    """

    rids: tuple[str, ...]
    pass_on: Callable[[dict[int, Arrived]], bool] = must_wake
    arrived: dict[int, Arrived] = attrs.field(factory=dict[int, Arrived])
    gone: str | None = None
    failed: Exception | None = None
    expired: bool = False
    touched: bool = False
    ready: bool = False
    waiter: asyncio.Future[None] | None = None

    async def take(self) -> dict[int, Arrived]:
        """Wait until something came, and take all of it; empty once expired. One task at a time.

        Raises: EngineDead: the engine is gone; what it sent before is not delivered any more.
        """
        while not self.ready:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        self.ready, self.waiter = False, None
        if self.gone is not None:
            raise EngineDead(self.gone)
        if self.failed is not None:
            raise self.failed
        taken, self.arrived = self.arrived, {}
        return taken

    def at(self, place: int) -> Arrived:
        entry = self.arrived.get(place)
        if entry is None:
            entry = self.arrived[place] = Arrived()
        return entry

    def deliver(self) -> None:
        """What came is complete for now: pass it on, or wake who waits for it."""
        self.touched = False
        waiting = not self.ready and self.waiter is not None and not self.waiter.done()
        if waiting and self.gone is None and self.failed is None:
            try:
                if self.pass_on(self.arrived):
                    self.arrived.clear()
                    return
            except Exception as exc:  # this consumer's alone; it ends by it
                self.failed = exc
        self.wake()

    def wake(self) -> None:
        """There is something to take."""
        if not self.ready:
            self.ready = True
            if self.waiter is not None and not self.waiter.done():
                self.waiter.set_result(None)

    def expire(self) -> None:
        self.expired = True
        self.wake()


@attrs.define(eq=False)
class ClientState:
    """Writer: EngineClient, on the loop; `incoming` and `scheduled` are shared with the wire thread.

    Attributes:
        incoming: events not handled yet. Bounded by what live requests may still produce and one
            load report a second, for as long as the loop stands still.
        routes: rid -> where its output goes; an entry leaves with the sequence's end.
        load_at_s: when `load` came, by our clock: the engine's own may be set otherwise.
        progress_s: when the engine last did something for us, or first had something to do.
        held: why the engine was told by us to let requests wait; while it was, their waiting is no trouble.
    """

    incoming: deque[EngineEvent] = attrs.field(factory=deque[EngineEvent])
    scheduled: bool = False
    routes: dict[str, tuple[Inbox, int]] = attrs.field(factory=dict[str, tuple[Inbox, int]])
    calls: dict[int, asyncio.Future[ControlReply]] = attrs.field(factory=dict[int, "asyncio.Future[ControlReply]"])
    submitted: int = 0
    called: int = 0
    load: LoadReport | None = None
    load_at_s: float = 0.0
    gone: str | None = None
    progress_s: float = 0.0
    held: set[str] = attrs.field(factory=set[str])
    weight_version: str = FIRST_WEIGHT_VERSION


@attrs.frozen(kw_only=True, eq=False)
class EngineClient:
    """Sends requests to one engine and hands its outputs to their consumers.

    Attributes:
        rid_prefix: makes this client's request ids unique among all clients of the engine. What a
            user calls a request is echoed to him and never reaches the engine.
    """

    link: EngineLink
    loop: asyncio.AbstractEventLoop
    clock: Clock
    meter: LoadMeter
    rid_prefix: str
    state: ClientState = attrs.field(factory=ClientState)

    @property
    def info(self) -> EngineInfo:
        return self.link.info

    @property
    def alive(self) -> bool:
        return self.state.gone is None

    @property
    def load(self) -> LoadReport | None:
        """The engine's latest report; None before the first, and once it is :data:`FRESH_S` old by our own clock."""
        state = self.state
        return state.load if self.clock.now_s() - state.load_at_s < FRESH_S else None

    @property
    def weight_version(self) -> str:
        """Of the weights behind the engine's latest output."""
        return self.state.weight_version

    @property
    def in_flight(self) -> int:
        """Sequences that were sent and have not ended."""
        return len(self.state.routes)

    def trouble(self, *, stall_s: float) -> str:
        """Why this engine should not be sent traffic, or ""."""
        if self.state.gone is not None:
            return f"the engine is gone: {self.state.gone}"
        silent = self.clock.now_s() - self.state.progress_s
        if self.state.routes and silent > stall_s and not self.state.held:
            return f"{len(self.state.routes)} requests pending and no progress for {silent:.0f} s"
        return ""

    def new_rids(self, count: int) -> tuple[str, ...]:
        first = self.state.submitted
        self.state.submitted += count
        return tuple(f"{self.rid_prefix}-{number:x}" for number in range(first, first + count))

    def submit(self, requests: Sequence[GenerateRequest]) -> Inbox:
        """Send `requests`, whose ids came from `new_rids`, as one group.

        Raises: EngineDead.
        """
        state = self.state
        if state.gone is not None:
            raise EngineDead(state.gone)
        inbox = Inbox(rids=tuple(request.rid for request in requests))
        if not state.routes:
            state.progress_s = self.clock.now_s()
        for place, rid in enumerate(inbox.rids):
            state.routes[rid] = (inbox, place)
        for request in requests:
            self.link.send(request)
        return inbox

    def abort(self, rids: Iterable[str]) -> None:
        """Stop those of `rids` that still run; nothing more arrives for them."""
        live = tuple(rid for rid in rids if self.state.routes.pop(rid, None) is not None)
        if live:
            self.link.send(AbortRequest(rids=live))

    def end_all(self) -> None:
        """Stop everything; each consumer sees an ordinary end with the reason ``abort``."""
        self.end(tuple(self.state.routes))

    def end(self, rids: Sequence[str]) -> None:
        """Likewise, those of `rids` that still run."""
        self._drain()  # what came already is still theirs
        routes = [(rid, self.state.routes[rid]) for rid in rids if rid in self.state.routes]
        self.abort([rid for rid, _ in routes])
        for _, (inbox, place) in routes:
            inbox.at(place).finish = Finish.ABORT
            inbox.wake()

    async def call(self, make: Callable[[int], ControlOp], *, timeout_s: float) -> ControlReply:
        """Carry out one control operation, built by `make` from a fresh call id.

        Raises: EngineDead; TimeoutError.
        """
        state = self.state
        if state.gone is not None:
            raise EngineDead(state.gone)
        state.called += 1
        call_id = state.called
        operation = make(call_id)
        answer = state.calls[call_id] = self.loop.create_future()
        try:
            self.link.send(operation)
            async with asyncio.timeout(timeout_s):
                reply: ControlReply = await answer
        finally:
            state.calls.pop(call_id, None)
        if reply.success:
            self._note_held(operation)
        return reply

    def _note_held(self, done: ControlOp) -> None:
        state = self.state
        match done:
            case PauseOp():
                state.held.add(PAUSED)
            case ReleaseMemoryOp(tags=tags):
                state.held.update(tags)
            case ResumeOp():
                state.held.discard(PAUSED)
            case ResumeMemoryOp(tags=tags):
                state.held.difference_update(tags or MEMORY_TAGS)
            case _:
                return
        state.progress_s = self.clock.now_s()  # what waited has its time from now on

    def close(self, reason: str = "the frontend is shutting down") -> None:
        """Fail what is still running. The link belongs to whoever opened it."""
        self._gone(reason)

    def receive(self, event: EngineEvent) -> None:
        """The link's listener; called on a wire thread."""
        self.state.incoming.append(event)
        if not self.state.scheduled:
            self.state.scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for anything
                self.loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        # Cleared first: an event appended after the count schedules another drain, behind what else the loop has to do.
        self.state.scheduled = False
        incoming = self.state.incoming
        touched: list[Inbox] = []
        for _ in range(len(incoming)):
            match incoming.popleft():
                case OutputBatch() as batch:
                    self._deliver(batch, touched)
                case ControlReply() as reply:
                    future = self.state.calls.get(reply.call_id)
                    if future is not None and not future.done():
                        future.set_result(reply)
                case EngineGone(reason=reason):
                    self._gone(reason)
        for inbox in touched:
            inbox.deliver()

    def _deliver(self, batch: OutputBatch, touched: list[Inbox]) -> None:
        """Put the batch's rows where they belong; `touched` gets each inbox once."""
        state = self.state
        moved = False
        version = state.weight_version = batch.weight_version or state.weight_version
        routes, output_ids, finished = state.routes, batch.output_ids, batch.finished
        scored = any(batch.logprobs) or any(batch.prompt_logprobs)
        for i, rid in enumerate(batch.rids):
            route = routes.get(rid)
            if route is None:  # ended here already: aborted, or cut at a stop string
                continue
            moved = True
            inbox, place = route
            entry = inbox.at(place)
            entry.ids = more(entry.ids, output_ids[i])
            if scored:
                self._deliver_scores(batch, i, entry)
            entry.prompt_tokens = batch.prompt_tokens[i]
            entry.cached_tokens = batch.cached_tokens[i]
            entry.weight_version = version
            if finished[i]:
                entry.finish = Finish(finished[i])
                entry.status = batch.status[i]
                entry.message = batch.messages[i]
                del routes[rid]
            if not inbox.touched:
                inbox.touched = True
                touched.append(inbox)
        load = batch.load
        if load is not None:
            moved = moved or load != state.load
            state.load, state.load_at_s = load, self.clock.now_s()
            self.meter.show(load)
        if moved:
            state.progress_s = self.clock.now_s()

    def _deliver_scores(self, batch: OutputBatch, i: int, entry: Arrived) -> None:
        if batch.logprobs[i]:
            entry.logprobs = more(entry.logprobs, batch.logprobs[i])
            entry.top_logprobs = more(entry.top_logprobs, batch.top_logprobs[i])
        if batch.prompt_logprobs[i]:
            entry.prompt_logprobs = batch.prompt_logprobs[i]
            entry.prompt_top_logprobs = batch.prompt_top_logprobs[i]

    def _gone(self, reason: str) -> None:
        state = self.state
        if state.gone is not None:
            return
        state.gone = reason
        for inbox, _ in state.routes.values():
            inbox.gone = reason
            inbox.wake()
        state.routes.clear()
        for future in state.calls.values():
            if not future.done():
                future.set_exception(EngineDead(reason))


def connect_client(link: EngineLink, *, clock: Clock, meter: LoadMeter, rid_prefix: str) -> EngineClient:
    """A client on the running event loop, listening to `link`."""
    client = EngineClient(link=link, loop=asyncio.get_running_loop(), clock=clock, meter=meter, rid_prefix=rid_prefix)
    link.subscribe(client.receive)
    return client
