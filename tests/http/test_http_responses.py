"""The responses API through the official client: created, streamed, asked for, continued, cancelled, deleted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from frontend_rig import LiveServer, live_server
from openai.types.responses import Response, ResponseStreamEvent
from piece_tokenizer import EOS, piece_tokenizer
from pydantic import TypeAdapter
from scripted_engine import ScriptedEngine, engine_info

from tokenspeed.frontend.http.response_store import Kept, ResponseStore
from tokenspeed.frontend.http.responses_schema import ResponseReasoning, ResponseReply, ResponseText
from tokenspeed.frontend.text.output.families import OutputFamily
from tokenspeed.frontend.text.output.reasoning import REASONING
from tokenspeed.plane.messages import GenerateRequest
from tokenspeed.settings.model import ServerSettings

TOKENIZER = piece_tokenizer()
ANSWERS = {
    "call": 'Well:\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    "think": "<think>Hm.</think>Yes.",
    "long": "x" * 1000,
}
TOOLS: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}]
EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def script(request: GenerateRequest) -> Sequence[int]:
    prompt = TOKENIZER.decode(request.input_ids.tolist())
    asked = prompt.rpartition("<|user|>")[2].partition("\n")[0]
    return [*TOKENIZER.encode(ANSWERS.get(asked, "Yes.")), EOS]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    engine = ScriptedEngine(script=script, info=engine_info(max_model_len=2048))
    family = OutputFamily(calls="hermes", reasoning=REASONING["think"])
    with live_server(engine, family=family, settings=ServerSettings(port=0, max_stored_responses=16)) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0, timeout=20) as made:
        yield made


def items(response: Response) -> list[tuple[str, str]]:
    """Each output item as its type and what it says."""
    said = []
    for item in response.output:
        if item.type == "function_call":
            said.append((item.type, f"{item.name}({item.arguments})"))
        else:
            said.append((item.type, item.content[0].text))
    return said


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("hello", [("message", "Yes.")]),
        ("call", [("message", "Well:"), ("function_call", 'f({"a": 1})')]),
        ("think", [("reasoning", "Hm."), ("message", "Yes.")]),
    ],
)
def test_a_response_and_its_stream_say_the_same(client: openai.OpenAI, asked: str, said: list[tuple[str, str]]) -> None:
    whole = client.responses.create(model="scripted", input=asked, tools=TOOLS)
    assert (whole.status, whole.object, items(whole)) == ("completed", "response", said)
    events = list(client.responses.create(model="scripted", input=asked, tools=TOOLS, stream=True))
    for event in events:
        EVENTS.validate_json(event.model_dump_json(exclude_unset=True), strict=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    streamed = events[-1].response
    assert items(streamed) == said
    assert streamed.usage == whole.usage
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    opened = [event.output_index for event in events if event.type == "response.output_item.added"]
    closed = [event.output_index for event in events if event.type == "response.output_item.done"]
    assert opened == closed == list(range(len(said)))
    arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert arguments == ('{"a": 1}' if asked == "call" else "")


def test_tokens_of_reasoning_are_counted(client: openai.OpenAI) -> None:
    usage = client.responses.create(model="scripted", input="think").usage
    assert usage is not None
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_a_response_is_found_by_its_id_continued_and_deleted(client: openai.OpenAI, live: LiveServer) -> None:
    first = client.responses.create(model="scripted", input="call", tools=TOOLS, instructions="Be brief.")
    assert client.responses.retrieve(first.id).output == first.output
    result: Any = [{"type": "function_call_output", "call_id": first.output[1].call_id, "output": "sunny"}]
    second = client.responses.create(model="scripted", input=result, previous_response_id=first.id)
    prompt = TOKENIZER.decode(live.engine.requests[-1].input_ids.tolist())
    assert prompt == "<|user|>call\n<|assistant|>Well:\n<|tool|>sunny\n<|assistant|>"
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="scripted", input="x", previous_response_id=first.id)
    assert missing.value.param == "previous_response_id"


def test_what_is_not_to_be_stored_is_not_found_later(client: openai.OpenAI) -> None:
    for stream in (False, True):
        made: Any = client.responses.create(model="scripted", input="x", store=False, stream=stream)
        ident = made.id if not stream else list(made)[-1].response.id
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(ident)


def test_a_streamed_response_can_be_asked_for_after_its_end(client: openai.OpenAI) -> None:
    last: Any = list(client.responses.create(model="scripted", input="x", stream=True))[-1]
    assert client.responses.retrieve(last.response.id).output_text == "Yes."


def test_the_token_limit_makes_a_response_incomplete(client: openai.OpenAI) -> None:
    made = client.responses.create(model="scripted", input="long", max_output_tokens=3)
    assert (made.status, made.output_text) == ("incomplete", "xxx")
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"


def test_a_response_in_the_background_runs_until_it_is_cancelled(client: openai.OpenAI, live: LiveServer) -> None:
    with live.engine.changed:
        live.engine.credit = 3
    try:
        made = client.responses.create(model="scripted", input="long", background=True)
        assert made.status == "queued"
        assert live.engine.wait_until(lambda: live.engine.credit == 0)
        assert client.responses.cancel(made.id).status == "cancelled"
        assert client.responses.retrieve(made.id).status == "cancelled"
    finally:
        with live.engine.changed:
            live.engine.credit = None
            live.engine.changed.notify_all()
    assert live.engine.wait_until(lambda: live.engine.quiet)
    assert live.in_flight() == 0
    done = client.responses.create(model="scripted", input="x", background=True)
    found = next(
        response
        for response in (client.responses.retrieve(done.id) for _ in range(5000))
        if response.status not in ("queued", "in_progress")
    )
    assert (found.status, found.output_text) == ("completed", "Yes.")
    assert client.responses.cancel(done.id).status == "completed"
    assert live.on_loop(lambda: live.rig.api.state.busy) == 0


BAD: list[tuple[dict[str, object], str]] = [
    ({"conversation": "conv_1"}, "conversation"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"background": True, "store": False}, "background"),
    ({"background": True, "stream": True}, "stream"),
    ({"temperature": "hot"}, "temperature"),
    ({"text": {"format": {"type": "nonsense"}}}, "response_format.type"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[str(row[0])[:40] for row in BAD])
def test_a_bad_field_is_refused_before_anything_runs(live: LiveServer, fields: dict[str, object], param: str) -> None:
    before = len(live.engine.requests)
    for stream in ({}, {"stream": True}):
        answer = httpx.post(f"{live.url}/v1/responses", json={"input": "x", **stream, **fields}, timeout=20)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
    assert len(live.engine.requests) == before


def test_only_a_response_in_the_background_can_be_cancelled(client: openai.OpenAI) -> None:
    made = client.responses.create(model="scripted", input="x")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(made.id)


def reply(ident: str, text: str = "") -> Kept:
    made = ResponseReply(
        id=ident,
        created_at=0,
        status="completed",
        model="m",
        output=[],
        parallel_tool_calls=True,
        reasoning=ResponseReasoning(),
        store=True,
        text=ResponseText(),
        tool_choice="auto",
        tools=[],
        metadata={},
    )
    return Kept(reply=made, messages=[{"role": "user", "content": text}])


def test_the_store_forgets_what_was_not_used_for_the_longest_time() -> None:
    store = ResponseStore(limit=2)
    for ident in "ab":
        store.put(reply(ident))
    store.get("a")
    store.put(reply("c"))
    assert list(store.state.kept) == ["a", "c"]
    big = ResponseStore(limit=100, max_bytes=5000)
    for ident in "abc":
        big.put(reply(ident, "x" * 2000))
    assert list(big.state.kept) == ["c"]
    assert big.state.size == sum(kept.size for kept in big.state.kept.values())
    big.delete("c")
    assert big.state.size == 0
