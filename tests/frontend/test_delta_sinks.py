"""Deltas that are sent from where they arrive: which, in what order, and what a fault of one consumer does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

import attrs
import msgspec
import pytest
from frontend_rig import FrontendRig, frontend
from hypothesis import given, settings
from hypothesis import strategies as st
from piece_tokenizer import piece_tokenizer
from scripted_engine import ScriptedEngine, engine_info, says
from starlette.types import Message

from tokenspeed.frontend.generation import ChoiceDelta, GenerationInput
from tokenspeed.frontend.http.replies import ChatChunk, Completion
from tokenspeed.frontend.http.stream import PIECES, event
from tokenspeed.frontend.ports import DeltaSink
from tokenspeed.plane.messages import SamplingParams, frozen_tokens

TOKENIZER = piece_tokenizer()
LETTERS = list(b"abcdefgh")


@pytest.fixture(name="rig")
async def fixture_rig() -> AsyncIterator[FrontendRig]:
    async with frontend(ScriptedEngine(script=says(LETTERS))) as made:
        yield made


@attrs.define(eq=False)
class ListedSink:
    """Keeps what it is given; `fault` is raised instead."""

    open: bool = True
    fault: Exception | None = None
    found: list[ChoiceDelta] = attrs.field(factory=list[ChoiceDelta])

    def takes(self) -> bool:
        return self.open

    def put(self, delta: ChoiceDelta) -> None:
        if self.fault is not None:
            raise self.fault
        self.found.append(delta)


def inp(**fields: Any) -> GenerationInput:
    sampling = SamplingParams(max_new_tokens=len(LETTERS))
    return GenerationInput(prompt_ids=frozen_tokens(TOKENIZER.encode("hi")), sampling=sampling, **fields)


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def consume(rig: FrontendRig, sink: DeltaSink, given: GenerationInput) -> list[ChoiceDelta]:
    found = []
    async with aclosing(rig.service.stream(given, sink=sink)) as deltas:
        async for delta in deltas:
            found.append(delta)
    return found


async def step_until_done(rig: FrontendRig, *tasks: asyncio.Task[Any]) -> None:
    await settle()
    while not all(task.done() for task in tasks):
        rig.engine.step()
        await settle()


@pytest.mark.anyio
async def test_all_but_the_first_and_the_last_delta_go_to_a_sink_that_takes_them(rig: FrontendRig) -> None:
    sink = ListedSink()
    task = asyncio.create_task(consume(rig, sink, inp()))
    await step_until_done(rig, task)
    assert [delta.text for delta in task.result()] == ["a", "h"]
    assert [delta.text for delta in sink.found] == list("bcdefg")
    assert [delta.completion_tokens for delta in sink.found] == [2, 3, 4, 5, 6, 7]
    assert rig.metric("generation_tokens_total") == len(LETTERS)
    assert rig.metric("inter_token_latency_seconds_count") == len(LETTERS) - 1


@pytest.mark.anyio
async def test_what_a_sink_does_not_take_is_yielded(rig: FrontendRig) -> None:
    sink = ListedSink()
    task = asyncio.create_task(consume(rig, sink, inp()))
    await settle()
    for number in range(len(LETTERS)):
        sink.open = number in (1, 2, 5)
        rig.engine.step()
        await settle()
    assert [delta.text for delta in sink.found] == list("bcf")
    assert [delta.text for delta in task.result()] == list("adegh")


@pytest.mark.anyio
async def test_a_consumer_that_is_busy_gets_what_came_meanwhile_itself(rig: FrontendRig) -> None:
    sink = ListedSink()
    async with aclosing(rig.service.stream(inp(), sink=sink)) as deltas:
        first = asyncio.create_task(anext(deltas))
        await settle()
        rig.engine.step()
        assert (await first).text == "a"
        rig.engine.step()  # nobody awaits a delta now
        rig.engine.step()
        await settle()
        assert sink.found == []
        assert (await anext(deltas)).text == "bc"


@pytest.mark.anyio
@pytest.mark.parametrize("fields", [{"stop": ("zz",)}, {"logprobs": 1}, {"prompt_logprobs": 0}], ids=str)
async def test_what_may_have_more_than_text_is_never_put_into_a_sink(
    rig: FrontendRig, fields: Mapping[str, Any]
) -> None:
    sink = ListedSink()
    task = asyncio.create_task(consume(rig, sink, inp(**fields)))
    await step_until_done(rig, task)
    assert sink.found == []
    assert "".join(delta.text for delta in task.result()) == "abcdefgh"


@pytest.mark.anyio
async def test_a_sink_that_fails_ends_its_own_call_only(rig: FrontendRig) -> None:
    bad, good = ListedSink(fault=ValueError("no room")), ListedSink()
    tasks = [asyncio.create_task(consume(rig, sink, inp())) for sink in (bad, good)]
    await step_until_done(rig, *tasks)
    with pytest.raises(ValueError, match="no room"):
        tasks[0].result()
    assert "".join(delta.text for delta in good.found) == "bcdefg"
    assert rig.engine.aborted == [rig.engine.requests[0].rid]
    assert rig.client.in_flight == 0
    assert rig.metric("frontend_live_sequences") == 0


# ---- streamed answers ----


@attrs.define(eq=False)
class Line:
    """A client's connection, also for pieces of a body: what was sent over it, and whether it is full."""

    body: bytes
    full: bool = False
    data: bytes = b""
    waits: int = 0
    pieces: int = 0
    drained: asyncio.Event = attrs.field(factory=asyncio.Event)
    unread: bool = True

    async def receive(self) -> Message:
        if self.unread:
            self.unread = False
            return {"type": "http.request", "body": self.body, "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        while self.full:
            self.waits += 1
            await self.drained.wait()
        self.data += message.get("body", b"")

    def takes(self) -> bool:
        return not self.full

    def write(self, data: bytes) -> None:
        assert not self.full
        self.pieces += 1
        self.data += data


async def answered(rig: FrontendRig, path: str, fields: Mapping[str, Any], full_at: frozenset[int]) -> Line:
    """The whole answer, over a connection that is full while the engine makes those of its steps."""
    line = Line(body=json.dumps({**fields, "stream": True}).encode())
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "extensions": {PIECES: line},
    }
    task = asyncio.ensure_future(rig.app(scope, line.receive, line.send))
    await settle()
    step = 0
    while not task.done():
        line.full = step in full_at
        if not line.full:
            line.drained.set()
            line.drained = asyncio.Event()
        rig.engine.step()
        await settle()
        step += 1
    await task
    return line


ODD = st.sampled_from(
    ['"text":"', '\\"content\\":', "\x85", "\u2028", "\u2029", "\x00", "\\", "é", "日本", "🙂", "\n\n"]
)
TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | ODD, min_size=1, max_size=5)
CASES = {
    "/v1/completions": ({"prompt": ["a", "b"], "n": 2}, Completion),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "x"}], "n": 2}, ChatChunk),
}


@pytest.fixture(name="shared", scope="module")
def fixture_shared() -> Iterator[tuple[asyncio.Runner, FrontendRig]]:
    """A frontend for many answers, one after another, and the loop it lives on."""
    with asyncio.Runner() as runner:
        made = frontend(ScriptedEngine(info=engine_info(max_model_len=1024)))
        yield runner, runner.run(made.__aenter__())
        runner.run(made.__aexit__(None, None, None))


@pytest.mark.parametrize("path", CASES)
@settings(max_examples=15, deadline=None)
@given(parts=TEXTS, full_at=st.frozensets(st.integers(0, 20), max_size=5), usage=st.booleans())
def test_an_event_made_around_its_text_is_the_event_made_whole(
    shared: tuple[asyncio.Runner, FrontendRig], path: str, parts: list[str], full_at: frozenset[int], *, usage: bool
) -> None:
    runner, rig = shared
    text = "".join(parts) + "."
    ids = list(text.encode())
    given_fields, form = CASES[path]
    options = {"stream_options": {"include_usage": True}} if usage else {}
    fields = {**given_fields, **options, "max_tokens": len(ids), "ignore_eos": True}
    rig.engine.script = says(ids)
    events = runner.run(answered(rig, path, fields, full_at)).data.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    said: dict[int, str] = {}
    for data in events[:-2]:
        chunk = msgspec.json.decode(data.removeprefix(b"data: "), type=form)
        assert event(chunk) == data + b"\n\n"
        for choice in chunk.choices:
            piece = choice.text if form is Completion else choice.delta.content or ""
            said[choice.index] = said.get(choice.index, "") + piece
    assert set(said.values()) == {text}
    assert len(said) == (4 if form is Completion else 2)


@pytest.mark.anyio
async def test_a_connection_that_is_full_is_waited_for_and_loses_nothing(rig: FrontendRig) -> None:
    fields = {"prompt": "x", "max_tokens": len(LETTERS)}
    line = await answered(rig, "/v1/completions", fields, frozenset({2, 3, 4}))
    assert line.waits
    assert line.pieces
    texts = [json.loads(part[6:])["choices"][0]["text"] for part in line.data.split(b"\n\n")[:-2]]
    assert texts[:2] == ["a", "b"]
    assert "".join(texts) == "abcdefgh"
    assert len(texts) < len(LETTERS)  # what came while it was full shares an event
