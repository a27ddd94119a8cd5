"""Operations a frontend asks for: pauses and resumes, cache flushes, memory and weights, questions.

`route` reads a round's messages in order of arrival: requests ahead of an operation stay ahead of it (IS-1).
Requests are held back while a pause or an operation drains, while the engine is paused, and while
memory is released. They are let go when none of this is so, in order of arrival.
"""

from __future__ import annotations

import enum
import json
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias, assert_never

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
from tokenspeed.plane.operations import (
    FIRST_WEIGHT_VERSION,
    WEIGHTS,
    AskOp,
    CloseGroupOp,
    DrainedOp,
    OpenGroupOp,
    Question,
    ReleaseMemoryOp,
    ResumeMemoryOp,
    StartProfileOp,
    StopProfileOp,
    UpdateWeightsOp,
    WeightVersionOp,
)
from tokenspeed.plane.routed import NOTHING_SAID, Routed, Sorting

QueuedOp: TypeAlias = DrainedOp | ResumeMemoryOp | OpenGroupOp | CloseGroupOp
"""Carried out one after the other; all but resumes and groups once nothing runs."""

NO_WEIGHTS = "the engine has no weights: they were forgotten by a release; update them first"


class Phase(enum.Enum):
    """What a pause does to the engine right now."""

    SERVING = "serving"
    DRAINING = "draining"
    PAUSED = "paused"
    FROZEN = "frozen"


@attrs.frozen(kw_only=True)
class WaitingFlush:
    op: FlushCacheOp
    until_s: float


@attrs.define(eq=False)
class PauseState:
    """Writer: ControlOps.

    `held` is bounded by ``max_buffered``, the rest by a frontend's open calls. `replies` wait for their round's end.

    Attributes:
        queue: operations to come; the engine drains for the first of them.
        drained: at the end of the last round nothing ran, and the queue was not empty.
        released: tags of regions whose memory was given back.
        usable: False from a release that forgot the weights until an update brought others.
        version: of the weights in force; `told`: the one that the frontend knows.
        updates: how many there were.
    """

    phase: Phase = Phase.SERVING
    mode: PauseMode | None = None
    drain_calls: list[int] = attrs.field(factory=list[int])
    held: dict[str, GenerateRequest] = attrs.field(factory=dict[str, GenerateRequest])
    flushes: deque[WaitingFlush] = attrs.field(factory=deque[WaitingFlush])
    replies: list[ControlReply] = attrs.field(factory=list[ControlReply])
    queue: deque[QueuedOp] = attrs.field(factory=deque[QueuedOp])
    drained: bool = False
    released: frozenset[str] = frozenset()
    usable: bool = True
    version: str = FIRST_WEIGHT_VERSION
    told: str = ""
    updates: int = 0


class Describes(Protocol):
    def describe(self, *, now_s: float) -> dict[str, object]: ...


@attrs.frozen(kw_only=True, eq=False)
class ControlOps:
    """Attributes:
    state_dump: answers what the engine holds, request by request; see `state_dump.StateDump`.
    """

    max_buffered: int
    state_dump: Describes
    state: PauseState = attrs.field(factory=PauseState)

    @property
    def frozen(self) -> bool:
        """No forward may run: a keep pause, or memory that is not there."""
        return self.state.phase is Phase.FROZEN or bool(self.state.released)

    @property
    def busy(self) -> bool:
        """A drain, a flush or an operation waits, so that a round may have something to resolve."""
        return self.state.phase is Phase.DRAINING or bool(self.state.flushes) or bool(self.state.queue)

    @property
    def drains(self) -> bool:
        """Something waits until nothing runs: a pause, or an operation."""
        return self.state.phase is Phase.DRAINING or bool(self.state.queue)

    @property
    def holds_back(self) -> bool:
        """New requests are not admitted."""
        state = self.state
        return state.phase is not Phase.SERVING or bool(state.queue) or bool(state.released)

    @property
    def due(self) -> bool:
        """The next round has something to do, whatever arrives; a flush waits for what wakes the loop."""
        return self._turn_has_come or (bool(self.state.held) and not self.holds_back)

    def buffers(self, rid: str) -> bool:
        return rid in self.state.held

    def version_to_tell(self) -> str:
        """The weights' version if the frontend does not know it yet, else ""."""
        state = self.state
        if state.told == state.version:
            return ""
        state.told = state.version
        return state.version

    def route(self, messages: tuple[FrontendMessage, ...], *, now_s: float) -> Routed:
        let_go = bool(self.state.held) and not self.holds_back
        if not messages and not let_go:
            return NOTHING_SAID
        found = Sorting()
        if let_go:
            self._let_go(found)
        for message in messages:
            match message:
                case GenerateRequest():
                    self._admit_or_hold(message, found)
                case AbortRequest():
                    self._abort(message, found)
                case PauseOp():
                    if self._pause(message) and message.mode is PauseMode.ABORT:
                        found.end_all_ahead("the engine was paused")
                case ResumeOp():
                    self._resume(message, found)
                case FlushCacheOp():
                    self.state.flushes.append(WaitingFlush(op=message, until_s=now_s + message.timeout_s))
                case UpdateWeightsOp() | WeightVersionOp():
                    self.state.queue.append(message)
                    if message.abort:
                        found.end_all_ahead("the weights are being updated")
                case ReleaseMemoryOp() | ResumeMemoryOp() | OpenGroupOp() | CloseGroupOp():
                    self._queue(message)
                case StartProfileOp() | StopProfileOp():
                    found.profiles.append(message)
                case AskOp(call_id=call_id, question=question):
                    self._answer(call_id, success=True, message=json.dumps(self._told(question, now_s)))
                case UnsupportedOp(call_id=call_id, method=method):
                    text = f"{method}: not supported by this engine yet"
                    self._answer(call_id, success=False, message=text)
                case _:
                    assert_never(message)
        return found.sorted()

    # ---- what the round carries out -----------------------------------------------------------

    def operation_waiting(self) -> bool:
        """A flush, or an operation whose turn has come."""
        return bool(self.state.flushes) or self._turn_has_come

    def flush_waiting(self) -> bool:
        return bool(self.state.flushes)

    def flush_tried(self, *, refusal: str, now_s: float) -> None:
        """The round tried the flush at the head of the queue; it is answered when done ("") or out of time."""
        flush = self.state.flushes[0]
        if not refusal:
            self._answer(flush.op.call_id, success=True)
        elif now_s >= flush.until_s:
            text = f"flush_cache: {refusal}, after {flush.op.timeout_s:g} s"
            self._answer(flush.op.call_id, success=False, message=text)
        else:
            return
        self.state.flushes.popleft()

    def next_timer_s(self) -> float | None:
        """When a waiting flush runs out of time, on the loop's clock."""
        return min((flush.until_s for flush in self.state.flushes), default=None)

    def take_operation(self) -> QueuedOp | None:
        """The operation whose turn has come, with the tags that still concern it; `carried_out` takes the outcome."""
        state = self.state
        while self._turn_has_come:
            op = state.queue.popleft()
            if isinstance(op, ReleaseMemoryOp):
                op = attrs.evolve(op, tags=tuple(tag for tag in op.tags if tag not in state.released))
            elif isinstance(op, ResumeMemoryOp):
                wanted = op.tags or tuple(state.released)
                op = attrs.evolve(op, tags=tuple(tag for tag in wanted if tag in state.released))
            elif isinstance(op, UpdateWeightsOp) and WEIGHTS in state.released:
                text = "update_weights: the weights' memory is released; resume it first"
                self._answer(op.call_id, success=False, message=text)
                continue
            if isinstance(op, ReleaseMemoryOp | ResumeMemoryOp) and not op.tags:
                self._answer(op.call_id, success=True)  # as it is already
                continue
            return op
        state.drained = False
        return None

    def restores(self) -> bool:
        """A resume brings weights back."""
        return self.state.usable

    def carried_out(self, op: QueuedOp, refusal: str) -> None:
        """Note what became of `op`: "", or why nothing has changed."""
        state = self.state
        if refusal:
            self._answer(op.call_id, success=False, message=refusal)
            return
        match op:
            case ReleaseMemoryOp(tags=tags, restore=restore):
                state.released |= set(tags)
                state.usable = state.usable and (restore or WEIGHTS not in tags)
            case ResumeMemoryOp(tags=tags):
                state.released -= set(tags)
            case UpdateWeightsOp(version=version):
                state.updates += 1
                state.usable = True
                state.version = version if version is not None else str(state.updates)
            case WeightVersionOp(version=version):
                state.version = version
        self._answer(op.call_id, success=True)

    def resolve(self, *, drained: bool, empty: Callable[[], bool], stored: bool = True) -> None:
        """End a drain once nothing is in flight and nobody holds anything.

        Args:
            empty: the scheduler has no request.
            stored: no storage work holds a block: operations wait for that, too, and pauses do not.
        """
        state = self.state
        if state.phase is Phase.DRAINING and drained:
            state.phase = Phase.PAUSED
            for call_id in state.drain_calls:
                self._answer(call_id, success=True)
            state.drain_calls.clear()
        if state.phase is Phase.FROZEN and state.queue and not empty():
            self._refuse_drains()
        state.drained = bool(state.queue) and drained and stored

    def tell(self, replies: tuple[ControlReply, ...]) -> None:
        self.state.replies.extend(replies)

    def take_replies(self) -> tuple[ControlReply, ...]:
        replies = tuple(self.state.replies)
        self.state.replies.clear()
        return replies

    # ---- requests -----------------------------------------------------------------------------

    def _admit_or_hold(self, request: GenerateRequest, found: Sorting) -> None:
        state = self.state
        if request.rid in state.held:
            # The buffered one is the original; its repeat is dropped like any duplicate (IS-7).
            found.requests.append(request)
        elif not self.holds_back:
            self._admit(request, found)
        elif len(state.held) >= self.max_buffered:
            text = f"the engine is paused and already buffers {self.max_buffered} requests; retry after the resume"
            found.refusals.append(Refusal(rid=request.rid, status=429, message=text))
        else:
            state.held[request.rid] = request

    def _admit(self, request: GenerateRequest, found: Sorting) -> None:
        if self.state.usable:
            found.requests.append(request)
        else:
            found.refusals.append(Refusal(rid=request.rid, status=503, message=NO_WEIGHTS))

    def _let_go(self, found: Sorting) -> None:
        held = tuple(self.state.held.values())
        self.state.held.clear()
        for request in held:
            self._admit(request, found)

    def _abort(self, abort: AbortRequest, found: Sorting) -> None:
        """A held request leaves the buffer with an end of its own and has nothing to abort further in."""
        held = self.state.held
        gone = [rid for rid in held if abort.every or rid in abort.rids or rid.startswith(abort.prefixes)]
        for rid in gone:
            del held[rid]
            found.refusals.append(Refusal(rid=rid, status=0, message="the request was aborted while it was held back"))
        found.aborts.extend(rid for rid in abort.rids if rid not in gone)
        found.prefixes.extend(abort.prefixes)
        if abort.every:
            found.end_all_ahead("all requests were aborted")

    # ---- pauses -------------------------------------------------------------------------------

    def _pause(self, op: PauseOp) -> bool:
        """Whether the pause began (or escalated) now."""
        state = self.state
        if text := self._pause_fault(op):
            self._answer(op.call_id, success=False, message=f"pause {op.mode.value}: {text}")
            return False
        if state.mode is op.mode:
            self._join(op)
            return False
        state.mode = op.mode
        if op.mode is PauseMode.KEEP:
            state.phase = Phase.FROZEN
            self._answer(op.call_id, success=True)
        else:
            state.phase = Phase.DRAINING
            state.drain_calls.append(op.call_id)
        return True

    def _pause_fault(self, op: PauseOp) -> str:
        state = self.state
        if state.released or any(isinstance(other, ReleaseMemoryOp) for other in state.queue):
            return "memory is released or about to be; resume it first"
        if op.mode is PauseMode.KEEP and state.queue:
            return "an operation waits for running requests, which this pause would stop"
        escalates = state.mode is PauseMode.WAIT and op.mode is PauseMode.ABORT
        if state.mode is None or state.mode is op.mode or escalates:
            return ""
        return f"the engine is paused in mode {state.mode.value}; resume it first"

    def _join(self, op: PauseOp) -> None:
        if self.state.phase is Phase.DRAINING:
            self.state.drain_calls.append(op.call_id)
        else:
            self._answer(op.call_id, success=True)

    def _resume(self, op: ResumeOp, found: Sorting) -> None:
        state = self.state
        for call_id in state.drain_calls:
            self._answer(call_id, success=False, message="pause: resumed before the drain was over")
        state.drain_calls.clear()
        state.phase = Phase.SERVING
        state.mode = None
        self._answer(op.call_id, success=True)
        if not self.holds_back:
            self._let_go(found)

    def _queue(self, op: ReleaseMemoryOp | ResumeMemoryOp | OpenGroupOp | CloseGroupOp) -> None:
        state = self.state
        if isinstance(op, ReleaseMemoryOp) and state.mode is PauseMode.KEEP:
            # Draining would let the frozen requests run, and waking up would end the pause (CP-11).
            text = "release_memory: requests are frozen by a keep pause; resume it first"
            self._answer(op.call_id, success=False, message=text)
        elif isinstance(op, ResumeMemoryOp) and not op.tags and self._draining:
            self._answer(op.call_id, success=True)  # without effect: the drain's owner decides (CP-20)
        else:
            state.queue.append(op)

    @property
    def _turn_has_come(self) -> bool:
        queue = self.state.queue
        return bool(queue) and (self.state.drained or not isinstance(queue[0], DrainedOp))

    @property
    def _draining(self) -> bool:
        return self.state.phase is Phase.DRAINING or any(isinstance(op, DrainedOp) for op in self.state.queue)

    def _refuse_drains(self) -> None:
        """Frozen requests never end, so nothing may wait for them."""
        state = self.state
        for op in [op for op in state.queue if isinstance(op, DrainedOp)]:
            state.queue.remove(op)
            text = "requests frozen by a keep pause hold the KV of the weights in force; resume or abort them first"
            self._answer(op.call_id, success=False, message=text)

    def _told(self, question: Question, now_s: float) -> dict[str, object]:
        state = self.state
        asleep = bool(state.released) or not state.usable
        match question:
            case Question.PAUSED:
                return {"is_paused": state.mode is not None, "phase": state.phase.value}
            case Question.SLEEPING:
                return {"is_sleeping": asleep, "released": sorted(state.released), "weights": state.usable}
            case Question.WEIGHT_VERSION:
                return {"weight_version": state.version}
            case Question.STATE:
                return self.state_dump.describe(now_s=now_s)
            case Question.SERVER | Question.HEALTH:
                return {
                    "status": "paused" if state.mode is not None else "sleeping" if asleep else "serving",
                    "weight_version": state.version,
                    "released": sorted(state.released),
                    "held_back": len(state.held),
                }

    def _answer(self, call_id: int, *, success: bool, message: str = "") -> None:
        self.state.replies.append(ControlReply(call_id=call_id, success=success, message=message))
