"""Operations a frontend asks for: pauses and resumes, cache flushes, and what is not carried out here.

Owns the pause state, the requests buffered by it and the queue of flushes. `route` reads a round's
messages in order of arrival, so that requests ahead of an operation stay ahead of it (IS-1).
"""

from __future__ import annotations

import enum
from collections import deque

import attrs

from tokenspeed.plane.messages import (
    AbortRequest,
    ControlReply,
    FlushCacheOp,
    FrontendMessage,
    GenerateRequest,
    PauseMode,
    PauseOp,
    Refusal,
    ResumeOp,
    UnsupportedOp,
)


class Phase(enum.Enum):
    """What a pause does to the engine right now."""

    SERVING = "serving"
    DRAINING = "draining"
    PAUSED = "paused"
    FROZEN = "frozen"


@attrs.frozen(kw_only=True)
class Routed:
    """A round's messages, sorted.

    Attributes:
        requests: to be admitted now, in order of arrival.
        aborts: ids whose clients went away.
        refusals: requests that found the pause buffer full.
        abort_ahead: how many of `requests` stood ahead of an abort pause; -1: no such pause began.
    """

    requests: tuple[GenerateRequest, ...]
    aborts: tuple[str, ...]
    refusals: tuple[Refusal, ...]
    abort_ahead: int = -1


NOTHING_SAID = Routed(requests=(), aborts=(), refusals=())


@attrs.frozen(kw_only=True)
class WaitingFlush:
    op: FlushCacheOp
    until_s: float


@attrs.define(eq=False)
class PauseState:
    """Writer: ControlOps.

    `held` is bounded by ``max_buffered``, the rest by the calls a frontend has open. `replies` wait
    for the end of their round.
    """

    phase: Phase = Phase.SERVING
    mode: PauseMode | None = None
    drain_calls: list[int] = attrs.field(factory=list[int])
    held: dict[str, GenerateRequest] = attrs.field(factory=dict[str, GenerateRequest])
    flushes: deque[WaitingFlush] = attrs.field(factory=deque[WaitingFlush])
    replies: list[ControlReply] = attrs.field(factory=list[ControlReply])


@attrs.frozen(kw_only=True, eq=False)
class ControlOps:
    max_buffered: int
    state: PauseState = attrs.field(factory=PauseState)

    @property
    def frozen(self) -> bool:
        """No forward may run (a keep pause)."""
        return self.state.phase is Phase.FROZEN

    @property
    def busy(self) -> bool:
        """A drain or a flush waits, so that a round may have something to resolve."""
        return self.state.phase is Phase.DRAINING or bool(self.state.flushes)

    def buffers(self, rid: str) -> bool:
        return rid in self.state.held

    def route(self, messages: tuple[FrontendMessage, ...], *, now_s: float) -> Routed:
        if not messages:
            return NOTHING_SAID
        requests: list[GenerateRequest] = []
        aborts: list[str] = []
        refusals: list[Refusal] = []
        abort_ahead = -1
        for message in messages:
            match message:
                case GenerateRequest():
                    self._admit_or_hold(message, requests, refusals)
                case AbortRequest(rids=rids):
                    # A buffered request leaves the buffer and has nothing to abort further in.
                    aborts.extend(rid for rid in rids if self.state.held.pop(rid, None) is None)
                case PauseOp():
                    if self._pause(message) and message.mode is PauseMode.ABORT:
                        abort_ahead = len(requests)
                case ResumeOp():
                    requests.extend(self._resume(message))
                case FlushCacheOp():
                    self.state.flushes.append(WaitingFlush(op=message, until_s=now_s + message.timeout_s))
                case UnsupportedOp(call_id=call_id, method=method):
                    text = f"{method}: not supported by this engine yet"
                    self._answer(call_id, success=False, message=text)
        return Routed(requests=tuple(requests), aborts=tuple(aborts), refusals=tuple(refusals), abort_ahead=abort_ahead)

    def flush_waiting(self) -> bool:
        return bool(self.state.flushes)

    def flush_tried(self, *, cleared: bool, now_s: float) -> None:
        """The round tried the flush at the head of the queue; it is answered when done or out of time."""
        flush = self.state.flushes[0]
        if cleared:
            self._answer(flush.op.call_id, success=True)
        elif now_s >= flush.until_s:
            text = f"flush_cache: requests still hold cache blocks after {flush.op.timeout_s:g} s"
            self._answer(flush.op.call_id, success=False, message=text)
        else:
            return
        self.state.flushes.popleft()

    def next_timer_s(self) -> float | None:
        """When a waiting flush runs out of time, on the loop's clock."""
        return min((flush.until_s for flush in self.state.flushes), default=None)

    def resolve(self, *, drained: bool) -> None:
        """End a drain once the scheduler holds nothing and nothing is in flight."""
        if self.state.phase is Phase.DRAINING and drained:
            self.state.phase = Phase.PAUSED
            for call_id in self.state.drain_calls:
                self._answer(call_id, success=True)
            self.state.drain_calls.clear()

    def take_replies(self) -> tuple[ControlReply, ...]:
        replies = tuple(self.state.replies)
        self.state.replies.clear()
        return replies

    def _admit_or_hold(
        self, request: GenerateRequest, requests: list[GenerateRequest], refusals: list[Refusal]
    ) -> None:
        state = self.state
        if state.phase is Phase.SERVING:
            requests.append(request)
        elif request.rid in state.held:
            # The buffered one is the original; its repeat is dropped like any duplicate (IS-7).
            requests.append(request)
        elif len(state.held) >= self.max_buffered:
            text = f"the engine is paused and already buffers {self.max_buffered} requests; retry after the resume"
            refusals.append(Refusal(rid=request.rid, status=429, message=text))
        else:
            state.held[request.rid] = request

    def _pause(self, op: PauseOp) -> bool:
        """Whether the pause began (or escalated) now."""
        state = self.state
        if state.mode is op.mode:
            self._join(op)
            return False
        if state.mode is not None and not (state.mode is PauseMode.WAIT and op.mode is PauseMode.ABORT):
            text = f"pause {op.mode.value}: the engine is paused in mode {state.mode.value}; resume it first"
            self._answer(op.call_id, success=False, message=text)
            return False
        state.mode = op.mode
        if op.mode is PauseMode.KEEP:
            state.phase = Phase.FROZEN
            self._answer(op.call_id, success=True)
        else:
            state.phase = Phase.DRAINING
            state.drain_calls.append(op.call_id)
        return True

    def _join(self, op: PauseOp) -> None:
        if self.state.phase is Phase.DRAINING:
            self.state.drain_calls.append(op.call_id)
        else:
            self._answer(op.call_id, success=True)

    def _resume(self, op: ResumeOp) -> tuple[GenerateRequest, ...]:
        state = self.state
        for call_id in state.drain_calls:
            self._answer(call_id, success=False, message="pause: resumed before the drain was over")
        state.drain_calls.clear()
        released = tuple(state.held.values())
        state.held.clear()
        state.phase = Phase.SERVING
        state.mode = None
        self._answer(op.call_id, success=True)
        return released

    def _answer(self, call_id: int, *, success: bool, message: str = "") -> None:
        self.state.replies.append(ControlReply(call_id=call_id, success=success, message=message))
