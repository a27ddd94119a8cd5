"""An engine's end of the wire that a test drives by hand, or lets run on a thread of its own.

It admits, queues, refuses, aborts and ends requests like a rank, one token a request and step, and
makes up its tokens from a script, so that a frontend can be tested without a model.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import attrs

from tokenspeed.plane.messages import (
    AbortRequest,
    ControlReply,
    EngineEvent,
    EngineGone,
    EngineInfo,
    Finish,
    FlushCacheOp,
    FrontendMessage,
    GenerateRequest,
    LoadReport,
    OutputBatch,
    PauseOp,
    ResumeOp,
    TopLogprobs,
    UnsupportedOp,
)

Script: TypeAlias = Callable[[GenerateRequest], Sequence[int]]
"""The ids a request would produce if nothing ended it; the last one repeats."""

PAGE = 16
VOCAB = 269


def engine_info(**changes: object) -> EngineInfo:
    values: dict[str, object] = {
        "model": "scripted",
        "dtype": "float32",
        "vocab_size": VOCAB,
        "max_model_len": 256,
        "num_blocks": 64,
        "block_size": PAGE,
        "max_num_seqs": 8,
        "max_batched_tokens": 256,
        "max_waiting": 32,
        "max_logprobs": 20,
        "eos_token_ids": (256, 257),
        "kv_capacity_tokens": 64 * PAGE,
        **changes,
    }
    return EngineInfo(**values)  # type: ignore[arg-type]


def random_letters(request: GenerateRequest) -> Sequence[int]:
    """Lower-case letters that depend on prompt and seed only."""
    source = random.Random(repr((request.input_ids.tolist(), request.sampling.seed)))
    return [source.randrange(97, 123) for _ in range(512)]


def says(ids: Sequence[int]) -> Script:
    """Every request produces `ids`."""
    return lambda _: ids


@attrs.define(eq=False)
class Running:
    """One request on the scripted engine."""

    request: GenerateRequest
    script: Sequence[int]
    made: int = 0

    @property
    def pages(self) -> int:
        return -(-(len(self.request.input_ids) + self.made) // PAGE)


@attrs.define(eq=False)
class ScriptedEngine:
    """An `EngineLink`.

    Attributes:
        received: every message, in order.
        cached: cached_tokens of every request.
        refuse: makes the engine refuse a request with (status, message).
        pace_s: least time between two steps of the thread.
    """

    info: EngineInfo = attrs.field(factory=engine_info)
    script: Script = random_letters
    cached: int = 0
    pace_s: float = 0.0
    refuse: Callable[[GenerateRequest], tuple[int, str] | None] = lambda _: None
    received: list[FrontendMessage] = attrs.field(factory=list[FrontendMessage])
    inbox: list[FrontendMessage] = attrs.field(factory=list[FrontendMessage])
    waiting: list[Running] = attrs.field(factory=list[Running])
    running: dict[str, Running] = attrs.field(factory=dict[str, Running])
    steps: int = 0
    changed: threading.Condition = attrs.field(factory=threading.Condition)
    credit: int | None = None
    """Steps the thread may still make; None: no limit."""
    stopping: bool = False
    thread: threading.Thread | None = None
    listener: Callable[[EngineEvent], None] | None = None

    # ---- EngineLink ----

    def send(self, message: FrontendMessage) -> None:
        with self.changed:
            self.received.append(message)
            self.inbox.append(message)
            self.changed.notify_all()

    def subscribe(self, listener: Callable[[EngineEvent], None]) -> None:
        self.listener = listener
        self.emit(self._blank())

    def close(self) -> None:
        self.stop()

    # ---- what tests do ----

    @property
    def requests(self) -> list[GenerateRequest]:
        return [message for message in self.received if isinstance(message, GenerateRequest)]

    @property
    def aborted(self) -> list[str]:
        return [rid for message in self.received if isinstance(message, AbortRequest) for rid in message.rids]

    def emit(self, event: EngineEvent) -> None:
        assert self.listener is not None, "subscribe first"
        self.listener(event)

    def beat(self) -> None:
        """A report without rows, as a quiet engine sends once a second."""
        self.emit(self._blank())

    def die(self, reason: str = "killed by the test") -> None:
        self.emit(EngineGone(reason=reason))

    def fail(self, rid: str, status: int = 500, message: str = "failed by the test") -> None:
        """End a running request with an error of its own, as after numbers that are none."""
        with self.changed:
            batch = self._blank()
            self._row(batch, self.running.pop(rid), finish=Finish.ABORT, why=(status, message))
            self.changed.notify_all()
        self.emit(batch)

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run, name="scripted-engine", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        if self.thread is not None:
            self.thread.join(10)

    def allow(self, steps: int | None) -> None:
        """Let the thread make so many more steps; None: any number."""
        with self.changed:
            self.credit = steps
            self.changed.notify_all()

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        """Wait, on a test's thread, for something that a step or a message changes."""
        with self.changed:
            return self.changed.wait_for(condition, timeout_s)

    @property
    def quiet(self) -> bool:
        return not self.running and not self.waiting and not self.inbox

    def step(self, *, forward: bool = True) -> OutputBatch:
        """One round: take messages, admit, make one token for each running request, tell the frontend.

        Args:
            forward: False: no tokens in this one.
        """
        with self.changed:
            batch = self._blank()
            self._take_messages(batch)
            while self.waiting and len(self.running) < self.info.max_num_seqs:
                entry = self.waiting.pop(0)
                self.running[entry.request.rid] = entry
            for entry in list(self.running.values()) if forward else ():
                self._advance(entry, batch)
            self.steps += 1
            batch = batch._replace(load=self._load())
            self.changed.notify_all()
        self.emit(batch)
        return batch

    # ---- inside ----

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(self._may_step)
                if self.stopping:
                    return
                forward = self.credit is None or self.credit > 0
                if self.credit is not None and forward:
                    self.credit -= 1
            self.step(forward=forward)
            if self.pace_s:
                with self.changed:
                    self.changed.wait_for(lambda: self.stopping, self.pace_s)

    def _may_step(self) -> bool:
        work = bool(self.inbox or self.waiting or self.running)
        return self.stopping or (work and (self.credit is None or self.credit > 0 or bool(self.inbox)))

    def _take_messages(self, batch: OutputBatch) -> None:
        inbox, self.inbox = self.inbox, []
        for message in inbox:
            match message:
                case GenerateRequest():
                    refusal = self.refuse(message)
                    if refusal is None and len(self.waiting) >= self.info.max_waiting:
                        refusal = (429, f"{self.info.max_waiting} requests are already waiting")
                    if refusal is not None:
                        self._row(batch, Running(request=message, script=()), finish=Finish.ABORT, why=refusal)
                    else:
                        self.waiting.append(Running(request=message, script=self.script(message)))
                case AbortRequest(rids=rids):
                    for rid in rids:
                        self.running.pop(rid, None)
                    self.waiting = [entry for entry in self.waiting if entry.request.rid not in rids]
                case UnsupportedOp(call_id=call_id, method=method):
                    self.emit(ControlReply(call_id=call_id, success=False, message=f"{method} is not supported"))
                case PauseOp(call_id=call_id) | ResumeOp(call_id=call_id) | FlushCacheOp(call_id=call_id):
                    self.emit(ControlReply(call_id=call_id, success=True))

    def _advance(self, entry: Running, batch: OutputBatch) -> None:
        sampling = entry.request.sampling
        token = entry.script[min(entry.made, len(entry.script) - 1)]
        entry.made += 1
        room = self.info.max_model_len - len(entry.request.input_ids)
        most = room if sampling.max_new_tokens is None else min(sampling.max_new_tokens, room)
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self.info.eos_token_ids))
        finish = Finish.RUNNING
        if token in stops and entry.made >= sampling.min_new_tokens:
            finish = Finish.STOP
        elif entry.made >= most:
            finish = Finish.LENGTH
        if finish is not Finish.RUNNING:
            del self.running[entry.request.rid]
        self._row(batch, entry, token=token, finish=finish)

    def _row(
        self,
        batch: OutputBatch,
        entry: Running,
        *,
        token: int | None = None,
        finish: Finish = Finish.RUNNING,
        why: tuple[int, str] = (0, ""),
    ) -> None:
        request = entry.request
        prompt = request.input_ids.tolist()
        ids = [] if token is None else [token]
        first = entry.made == 1 and request.prompt_logprobs >= 0
        batch.rids.append(request.rid)
        batch.output_ids.append(ids)
        batch.finished.append(int(finish))
        batch.prompt_tokens.append(len(prompt))
        batch.completion_tokens.append(entry.made)
        batch.cached_tokens.append(min(self.cached, len(prompt) - 1))
        batch.logprobs.append([logprob_of(i) for i in ids] if request.return_logprob else [])
        wanted = request.top_logprobs if request.return_logprob else 0
        batch.top_logprobs.append([top_of(i, wanted) for i in ids] if wanted else [])
        rest, tops = prompt[1:], request.top_logprobs
        batch.prompt_logprobs.append([None, *(logprob_of(i) for i in rest)] if first else [])
        batch.prompt_top_logprobs.append([None, *(top_of(i, tops) for i in rest)] if first and tops else [])
        batch.status.append(why[0])
        batch.messages.append(why[1])

    def _load(self) -> LoadReport:
        pages = sum(entry.pages for entry in self.running.values())
        return LoadReport(
            running=len(self.running),
            waiting=len(self.waiting),
            resident_blocks=pages,
            active_blocks=pages,
            total_blocks=self.info.num_blocks,
        )

    def _blank(self) -> OutputBatch:
        return OutputBatch(
            rids=[],
            output_ids=[],
            finished=[],
            prompt_tokens=[],
            completion_tokens=[],
            cached_tokens=[],
            logprobs=[],
            top_logprobs=[],
            prompt_logprobs=[],
            prompt_top_logprobs=[],
            status=[],
            messages=[],
            load=self._load(),
        )


def logprob_of(token: int) -> float:
    """What the scripted engine says of any token."""
    return -0.125 - (token % 8) / 8


def top_of(token: int, count: int) -> TopLogprobs:
    """`count` alternatives, the token itself not always among them."""
    ids = tuple((token + at) % VOCAB for at in range(token % 2, token % 2 + count))
    return TopLogprobs(ids=ids, values=tuple(logprob_of(i) for i in ids))
