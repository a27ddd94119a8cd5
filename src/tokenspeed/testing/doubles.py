"""Doubles of the seams around an event loop: time, wire, plane, event sink."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.messages import ControlReply, FrontendMessage, OutputBatch
from tokenspeed.plane.operations import WeightsGroup, WeightsSource
from tokenspeed.plane.plan import Dispatch, ExecutionPlan, ForwardBatch
from tokenspeed.plane.ports import Ticket, completion_query
from tokenspeed.plane.results import NO_ACKS, CacheAcks, ForwardResult, KvEvent


@attrs.define(eq=False)
class HandClock:
    """`Clock` that moves when told."""

    at_s: float = 1.0

    def now_s(self) -> float:
        return self.at_s

    def advance(self, seconds: float) -> None:
        self.at_s += seconds


@attrs.define(eq=False)
class HandWakeup:
    """`Wakeup` for loops stepped by hand: remembers that it was set, never blocks."""

    was_set: bool = False

    def set(self) -> None:
        self.was_set = True

    def wait(self, timeout_s: float | None) -> bool:
        woken, self.was_set = self.was_set, False
        return woken


@attrs.define(eq=False)
class RecordingLink:
    """`FrontendLink` whose other end is the test: `put` messages in, read `sent` and `replies`.

    `log` keeps outputs and replies in the order in which they left.
    """

    inbox: deque[FrontendMessage] = attrs.field(factory=deque[FrontendMessage])
    log: list[OutputBatch | ControlReply] = attrs.field(factory=list[OutputBatch | ControlReply])
    gone: bool = False

    def put(self, *messages: FrontendMessage) -> None:
        self.inbox.extend(messages)

    def receive(self) -> tuple[FrontendMessage, ...]:
        messages = tuple(self.inbox)
        self.inbox.clear()
        return messages

    def send(self, batch: OutputBatch) -> None:
        self.log.append(batch)

    def reply(self, reply: ControlReply) -> None:
        self.log.append(reply)

    def close(self) -> None:
        self.gone = True

    @property
    def sent(self) -> list[OutputBatch]:
        return [entry for entry in self.log if isinstance(entry, OutputBatch)]

    @property
    def replies(self) -> list[ControlReply]:
        return [entry for entry in self.log if isinstance(entry, ControlReply)]

    def tokens(self, rid: str) -> list[int]:
        """All tokens sent for `rid` so far."""
        return [
            token
            for batch in self.sent
            for name, ids in zip(batch.rids, batch.output_ids, strict=True)
            if name == rid
            for token in ids
        ]

    def finish(self, rid: str) -> tuple[int, int, str] | None:
        """(finish, status, message) of `rid`'s end, or None while it runs. Raises if it ended twice."""
        ends = [
            (finished, status, message)
            for batch in self.sent
            for name, finished, status, message in zip(
                batch.rids, batch.finished, batch.status, batch.messages, strict=True
            )
            if name == rid and finished
        ]
        if len(ends) > 1:
            raise InvariantBroken("a request ended twice", rid=rid, ends=ends)
        return ends[0] if ends else None


@attrs.define(eq=False)
class RecordingSink:
    """`KvEventSink` that keeps every batch."""

    batches: list[tuple[KvEvent, ...]] = attrs.field(factory=list[tuple[KvEvent, ...]])

    def publish(self, events: tuple[KvEvent, ...]) -> None:
        self.batches.append(events)

    def close(self) -> None:
        return None


def counting_tokens(batch: ForwardBatch) -> list[int]:
    """A token for each sampled row: its position modulo 1000, so that every row differs by its length."""
    ends = (batch.starts + batch.counts)[batch.samples]
    tokens: list[int] = (ends % 1000).tolist()
    return tokens


@attrs.define(eq=False)
class ScriptedPlane:
    """`DataPlane` without a device: answers from `answer`, remembers what it was asked.

    Args:
        answer: tokens for the sampled rows of a batch; a `ForwardResult` where more is to be said.
        held: while True, forwards do not land and `commit` of one raises instead of waiting.
        refusals: what the operations of memory and weights answer, by name; "" otherwise.
    """

    answer: Callable[[ForwardBatch], list[int] | ForwardResult] = counting_tokens
    held: bool = False
    plans: list[ExecutionPlan] = attrs.field(factory=list[ExecutionPlan])
    dispatches: list[Dispatch] = attrs.field(factory=list[Dispatch])
    calls: list[tuple[str, str]] = attrs.field(factory=list[tuple[str, str]])
    acks: deque[CacheAcks] = attrs.field(factory=deque[CacheAcks])
    keep_plans: bool = True
    executed: int = 0
    refusals: dict[str, str] = attrs.field(factory=dict[str, str])
    live: dict[int, ForwardBatch] = attrs.field(factory=dict[int, ForwardBatch])

    def execute(self, plan: ExecutionPlan, dispatch: Dispatch) -> Ticket:
        self._note("execute")
        if self.keep_plans:
            self.plans.append(plan)
            self.dispatches.append(dispatch)
        ticket = Ticket(self.executed)
        self.executed += 1
        if plan.batch is not None:
            self.live[ticket] = plan.batch
        return ticket

    def commit(self, ticket: Ticket) -> ForwardResult:
        self._note("commit")
        if self.held:
            raise InvariantBroken("commit of a held forward would block for ever", ticket=int(ticket))
        answer = self.answer(self.live.pop(ticket))
        return answer if isinstance(answer, ForwardResult) else ForwardResult(tokens=answer)

    @completion_query
    def landed(self, ticket: Ticket) -> bool:
        return not self.held

    @completion_query
    def poll_cache_results(self) -> CacheAcks:
        self._note("poll_cache_results")
        return self.acks.popleft() if self.acks else NO_ACKS

    def release(self, rows: tuple[int, ...], slots: tuple[int, ...]) -> None:
        self._note("release")

    def note_forwarded(self) -> None:
        self._note("note_forwarded")

    def idle_forward(self) -> None:
        self._note("idle_forward")

    def flush_cache(self) -> None:
        self._note("flush_cache")

    def release_memory(self, tags: tuple[str, ...]) -> str:
        self._note("release_memory")
        return self.refusals.get("release_memory", "")

    def resume_memory(self, tags: tuple[str, ...], restore: bool) -> str:
        self._note("resume_memory")
        return self.refusals.get("resume_memory", "")

    def load_weights(self, source: WeightsSource) -> str:
        self._note("load_weights")
        return self.refusals.get("load_weights", "")

    def commit_weights(self, accept: bool) -> str:
        self._note("commit_weights")
        return self.refusals.get("commit_weights", "")

    def open_weights_group(self, group: WeightsGroup) -> str:
        self._note("open_weights_group")
        return self.refusals.get("open_weights_group", "")

    def close_weights_group(self, name: str) -> str:
        self._note("close_weights_group")
        return self.refusals.get("close_weights_group", "")

    def start_profile(self, path: str) -> str:
        self._note("start_profile")
        return path

    def stop_profile(self) -> str:
        self._note("stop_profile")
        return ""

    def shutdown_cache(self) -> None:
        self._note("shutdown_cache")

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def _note(self, name: str) -> None:
        if self.keep_plans:
            self.calls.append((name, threading.current_thread().name))


def token_script(answers: Iterable[list[int]]) -> Callable[[ForwardBatch], list[int]]:
    """An `answer` for `ScriptedPlane` that plays `answers` in order, one forward each.

    Raises: InvariantBroken: of the answer, once the script is over.
    """
    script = iter(answers)

    def answer(batch: ForwardBatch) -> list[int]:
        tokens = next(script, None)
        if tokens is None:
            raise InvariantBroken("the script has no answer for another forward", rows=len(batch.rows))
        return tokens

    return answer
