"""What is left of a request, however it ends: one line, one span, each metric counted once, nothing in any table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
from direct_pieces import OffersPieces
from frontend_rig import FrontendRig, frontend
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ScriptedEngine, engine_info
from starlette.types import ASGIApp, Message, Scope

from tokenspeed.frontend.calls import CallName
from tokenspeed.frontend.tracing import JoinTrace
from tokenspeed.plane.traces import Begun, TraceEntry
from tokenspeed.settings.model import ServerSettings

pytestmark = pytest.mark.anyio

USER = [{"role": "user", "content": "x"}]
ROUTES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 50},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 50},
    "/v1/responses": {"input": "x", "max_output_tokens": 50},
    "/v1/messages": {"messages": USER, "max_tokens": 50},
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 50}},
}
EACH = pytest.mark.parametrize("path", ROUTES)
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@attrs.frozen(kw_only=True, eq=False)
class Lines:
    """A `CallLog`: what was told, as (status, number of sequences) of calls and (status, code) of others."""

    told: list[tuple[int, object]] = attrs.field(factory=list)

    def ended(self, name: CallName, *, rids: Sequence[str], status: int, seconds: float) -> None:
        self.told.append((status, len(rids)))

    def refused(self, client: str, *, path: str, status: int, code: str, field: str) -> None:
        self.told.append((status, code))


@attrs.frozen(kw_only=True, eq=False)
class Spans:
    """A `Tracer` that keeps what it gets."""

    entries: list[TraceEntry] = attrs.field(factory=list)
    active: bool = True

    def begin(self, rid: str, trace: str) -> Begun | None:
        return Begun(span_id="00000000000000aa", trace=f"under {rid}")

    def add(self, entry: TraceEntry) -> None:
        self.entries.append(entry)

    def close(self) -> None: ...


@attrs.define(eq=False)
class Caller:
    """A client at the server's door: it may send its body late, read slowly and leave at any time.

    Attributes:
        pieces: of the body, given one by one as `uploaded` allows.
        reads: cleared, nothing more is taken from the server.
        direct: it takes pieces of a body from where they arrive.
    """

    app: ASGIApp
    path: str
    body: bytes
    pieces: list[bytes] = attrs.field(factory=list)
    sent: list[Message] = attrs.field(factory=list)
    left: asyncio.Event = attrs.field(factory=asyncio.Event)
    reads: asyncio.Event = attrs.field(factory=asyncio.Event)
    direct: bool = True

    async def receive(self) -> Message:
        if self.pieces:
            piece = self.pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self.pieces)}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.sent.append(message)

    @property
    def status(self) -> int | None:
        return next((one["status"] for one in self.sent if one["type"] == "http.response.start"), None)

    @property
    def text(self) -> str:
        return b"".join(one.get("body", b"") for one in self.sent).decode()

    def start(self) -> asyncio.Task[None]:
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"traceparent", CALLER.encode())],
            "state": {},
        }
        self.reads.set()
        app = OffersPieces(app=self.app, takes=self.reads.is_set) if self.direct else self.app
        return asyncio.create_task(app(scope, self.receive, self.send))  # type: ignore[arg-type]


@attrs.frozen(kw_only=True, eq=False)
class Rig:
    front: FrontendRig
    lines: Lines
    spans: Spans

    @property
    def engine(self) -> ScriptedEngine:
        return self.front.engine

    def caller(self, path: str, body: dict[str, object] | bytes, **more: object) -> Caller:
        raw = body if isinstance(body, bytes) else json.dumps({**body, **more}).encode()
        return Caller(app=JoinTrace(app=self.front.app), path=path, body=raw, pieces=[raw])

    async def turns(self, count: int = 12) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def until_asked(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.engine.requests) < count:  # noqa: ASYNC110 - the request is on its way through the loop
                await asyncio.sleep(0)

    async def finish(self, task: asyncio.Task[None]) -> None:
        """Step the engine until the server is done with a request."""
        async with asyncio.timeout(10):
            while not task.done():
                await self.turns()
                if not self.engine.quiet:
                    self.engine.step()
        await task

    def samples(self) -> dict[str, float]:
        """Counts of requests by name and label; zeros left out."""
        found = {}
        for family in text_string_to_metric_families(self.front.registry.scrape().decode()):
            for one in family.samples:
                label = one.labels.get("finished_reason") or one.labels.get("status") or ""
                name = one.name.removeprefix("tokenspeed:")
                if one.value and (name.endswith("_count") or name in COUNTED):
                    found[f"{name} {label}".strip()] = one.value
        return found

    def nothing_left(self) -> None:
        service, api = self.front.service, self.front.api
        assert (service.in_flight, service.gate.live, len(service.live.groups), api.state.busy) == (0, 0, 0, 0)
        assert self.front.client.state.routes == {}
        assert self.front.metric("frontend_live_sequences") == 0
        if not self.engine.quiet:
            self.engine.step()
        assert self.engine.quiet

    def told(self, status: int, what: object) -> None:
        """There was one line and, if the request became a call, one span within the caller's trace."""
        assert self.lines.told == [(status, what)]
        if what not in (0, None) and isinstance(what, int):
            (entry,) = self.spans.entries
            (span,) = entry.spans
            assert (span.name, entry.trace, entry.span_id) == ("llm_request", CALLER, "00000000000000aa")
            assert {request.trace for request in self.engine.requests} == {f"under {entry.rid}"}
            assert dict(span.attributes)["gen_ai.request.n"] == what
        else:
            assert self.spans.entries == []


COUNTED = ("request_success_total", "http_requests_total", "generation_tokens_total", "prompt_tokens_total")


@asynccontextmanager
async def rig(engine: ScriptedEngine | None = None, **options: Any) -> AsyncIterator[Rig]:
    lines, spans = Lines(), Spans()
    async with frontend(engine, calls=lines, tracer=spans, **options) as front:
        yield Rig(front=front, lines=lines, spans=spans)


@EACH
@BOTH
async def test_an_answered_request_is_counted_once_in_every_histogram(path: str, *, stream: bool) -> None:
    async with rig() as made:
        caller = made.caller(path, ROUTES[path], stream=stream)
        await made.finish(caller.start())
        assert caller.status == 200
        made.told(200, 1)
        made.nothing_left()
        once = ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens")
        once += ("request_generation_tokens", "request_max_num_generation_tokens", "request_params_n")
        once += ("request_params_max_tokens", "request_time_per_output_token_seconds", "http_request_duration_seconds")
        assert made.samples() == {
            **{f"{name}_count": 1 for name in once},
            "inter_token_latency_seconds_count": 49,
            "generation_tokens_total": 50,
            "prompt_tokens_total": len(made.engine.requests[0].input_ids),
            "request_success_total length": 1,
            "http_requests_total 200": 1,
        }


@EACH
@BOTH
async def test_a_client_that_leaves_while_it_waits_is_told_of_once(path: str, *, stream: bool) -> None:
    async with rig() as made:
        caller = made.caller(path, ROUTES[path], stream=stream)
        task = caller.start()
        await made.until_asked(1)
        caller.left.set()
        await asyncio.wait_for(task, 10)
        assert caller.sent == []
        assert made.engine.aborted == [made.engine.requests[0].rid]
        made.told(499, 1)
        made.nothing_left()
        found = made.samples()
        assert (found["request_success_total abort"], found["http_requests_total 499"]) == (1, 1)
        assert "time_to_first_token_seconds_count" not in found
        assert "generation_tokens_total" not in found


@EACH
@BOTH
async def test_a_client_that_leaves_while_tokens_come_is_told_of_once(path: str, *, stream: bool) -> None:
    async with rig() as made:
        caller = made.caller(path, ROUTES[path], stream=stream)
        task = caller.start()
        await made.until_asked(1)
        for _ in range(3):
            made.engine.step()
            await made.turns()
        assert bool(caller.sent) is stream
        caller.left.set()
        await asyncio.wait_for(task, 10)
        assert made.engine.aborted == [made.engine.requests[0].rid]
        made.told(499, 1)
        made.nothing_left()
        found = made.samples()
        assert found["generation_tokens_total"] == 3
        assert found["time_to_first_token_seconds_count"] == found["request_success_total abort"] == 1
        assert found[f"http_requests_total {200 if stream else 499}"] == 1


@EACH
async def test_a_client_that_stopped_reading_and_then_leaves_is_told_of_once(path: str) -> None:
    async with rig() as made:
        caller = made.caller(path, ROUTES[path], stream=True)
        task = caller.start()
        await made.until_asked(1)
        made.engine.step()
        await made.turns()
        heard = len(caller.sent)
        caller.reads.clear()
        for _ in range(5):
            made.engine.step()
            await made.turns()
        assert len(caller.sent) == heard
        caller.left.set()
        await asyncio.wait_for(task, 10)
        assert made.engine.aborted == [made.engine.requests[0].rid]
        made.told(499, 1)
        made.nothing_left()


@EACH
async def test_a_slow_reader_gets_everything_once_in_order(path: str) -> None:
    """Its stream is what a reader gets who was always there, but for where it is cut."""
    said = []
    for slow, direct in ((False, True), (True, True), (True, False)):
        async with rig() as made:
            caller = made.caller(path, ROUTES[path], stream=True)
            caller.direct = direct
            task = caller.start()
            await made.until_asked(1)
            if slow:
                for _ in range(4):
                    caller.reads.clear()
                    for _ in range(7):
                        made.engine.step()
                        await made.turns(3)
                    caller.reads.set()
                    await made.turns()
            await made.finish(task)
            made.told(200, 1)
            made.nothing_left()
            events = [line.removeprefix("data: ") for line in caller.text.split("\n") if line.startswith("data: {")]
            said.append("".join(piece_of(path, json.loads(event)) for event in events))
    if path == "/generate":
        said = [text[-50:] for text in said]
    assert said[0] == said[1] == said[2]
    assert len(said[0]) == 50


def piece_of(path: str, event: dict[str, Any]) -> str:
    match path:
        case "/v1/completions":
            return str(event["choices"][0]["text"])
        case "/v1/chat/completions":
            return str(event["choices"][0]["delta"].get("content") or "")
        case "/v1/messages":
            return str(event.get("delta", {}).get("text") or "")
        case "/v1/responses":
            return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
        case _:
            return str(event["text"])


@EACH
async def test_a_client_that_leaves_while_it_uploads_was_no_call(path: str) -> None:
    async with rig() as made:
        caller = made.caller(path, ROUTES[path])
        caller.pieces = [caller.body[:9], caller.body[9:]]
        gone = caller.pieces.pop()
        assert gone
        caller.pieces.append(b"")
        task = caller.start()
        caller.pieces.clear()  # the rest never comes
        caller.left.set()
        await asyncio.wait_for(task, 10)
        assert caller.sent == made.engine.requests == []
        made.told(499, "client_gone")
        made.nothing_left()
        assert made.samples() == {"http_requests_total 499": 1, "http_request_duration_seconds_count": 1}


def long_input(path: str) -> dict[str, object]:
    """What goes to a worker, because it is long."""
    text = "x" * 300_000
    given: dict[str, dict[str, object]] = {"/v1/completions": {"prompt": text}, "/generate": {"text": text}}
    given["/v1/responses"] = {"input": text}
    return given.get(path, {"messages": [{"role": "user", "content": text}]})


@attrs.frozen
class Refusal:
    """How a request comes to be refused, and what is told of it: its code, or as a call the number of sequences."""

    status: int
    told: object
    body: dict[str, object] | bytes = attrs.field(factory=dict)
    before: Callable[[FrontendRig], object] = lambda _: None
    paths: tuple[str, ...] = tuple(ROUTES)


LISTED = ("/v1/completions", "/generate")
NAMED = tuple(path for path in ROUTES if path != "/generate")
REFUSALS: dict[str, Refusal] = {
    "a field": Refusal(400, "invalid_value", {"priority": "x", "stream": "x"}),
    "no JSON": Refusal(400, "invalid_value", b'{"x": '),
    "no object": Refusal(400, "invalid_value", b"[]"),
    "too large": Refusal(413, "request_too_large", b" " * 600_000),
    "another model": Refusal(404, "model_not_found", {"model": "other"}, paths=NAMED),
    "too many read": Refusal(429, "overloaded", before=lambda front: setattr(front.api.state, "busy", 10_000)),
    "the workers have no room": Refusal(
        429, "overloaded", before=lambda front: setattr(front.api.prompts.workers.state, "pending", 10_000)
    ),
    "shutting down": Refusal(503, "unavailable", before=lambda front: front.api.drain()),
    "more than there are places": Refusal(400, 0, {"prompt": ["x"] * 5, "text": ["x"] * 5}, paths=LISTED),
    "all places taken": Refusal(429, 0, before=lambda front: setattr(front.service.gate.state, "live", 5)),
}


@pytest.mark.parametrize("what", REFUSALS)
async def test_a_request_that_is_refused_has_one_line_whatever_refuses_it(what: str) -> None:
    refusal = REFUSALS[what]
    small = ScriptedEngine(info=engine_info(max_model_len=1 << 20, max_waiting=4, max_num_seqs=1))
    async with rig(small, settings=ServerSettings(port=0, max_body_mib=0.5)) as made:
        refusal.before(made.front)
        for path in refusal.paths:
            given = refusal.body if isinstance(refusal.body, bytes) else {**ROUTES[path], **refusal.body}
            if what == "the workers have no room" and isinstance(given, dict):
                given |= long_input(path)
            caller = made.caller(path, given)
            await asyncio.wait_for(caller.start(), 10)
            assert caller.status == refusal.status
            made.told(refusal.status, refusal.told)
            made.lines.told.clear()
        assert made.engine.requests == []
        assert made.samples()[f"http_requests_total {refusal.status}"] == 1
