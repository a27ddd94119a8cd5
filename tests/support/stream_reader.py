"""Streams of the five generating routes, read strictly and put together to the answer that a request gets whole."""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]

VOLATILE = ("id", "created", "created_at", "e2e_latency", "item_id", "call_id", "previous_response_id")
"""What differs between two answers to one request."""

NAMED_EVENTS = ("/v1/messages", "/v1/responses")


def events_of(path: str, text: str) -> list[Json]:
    """The bodies of a stream's events; the stream is checked for its form, the end mark included."""
    blocks = text.split("\n\n")
    assert blocks.pop() == "", "the stream ends inside an event"
    if path not in NAMED_EVENTS:
        assert blocks.pop() == "data: [DONE]"
    found = []
    for block in blocks:
        lines = block.split("\n")
        body = json.loads(lines[-1].removeprefix("data: "))
        assert lines == ([f"event: {body['type']}", lines[-1]] if path in NAMED_EVENTS else [lines[-1]])
        assert lines[-1].startswith("data: ")
        found.append(body)
    return found


def put_together(path: str, events: list[Json]) -> Json | list[Json]:
    """The whole answer that `events` make."""
    match path:
        case "/v1/completions":
            return _choices(events, _add_completion)
        case "/v1/chat/completions":
            return _choices(events, _add_chat)
        case "/v1/messages":
            return _message(events)
        case "/v1/responses":
            return _response(events)
        case _:
            return _generated(events)


def stable(value: Any) -> Any:
    """`value` without what differs between two answers to one request, at any depth."""
    if isinstance(value, dict):
        return {name: stable(item) for name, item in value.items() if name not in VOLATILE}
    return [stable(item) for item in value] if isinstance(value, list) else value


def _choices(events: list[Json], add: Any) -> Json:
    made: dict[int, Json] = {}
    whole: Json = {"object": events[0]["object"].removesuffix(".chunk"), "model": events[0]["model"]}
    assert len({event["id"] for event in events}) == 1
    for event in events:
        if event.get("usage") is not None:
            whole["usage"] = event["usage"]
        if "prompt_token_ids" in event:
            whole["prompt_token_ids"] = event["prompt_token_ids"]
        for choice in event["choices"]:
            known = made.setdefault(choice["index"], {})
            assert known.get("finish_reason") is None, "a choice goes on after its end"
            add(known, choice)
            known |= {name: choice.get(name) for name in ("index", "finish_reason")}
            known["stop_reason"] = choice.get("stop_reason")
            if "token_ids" in choice:
                known["token_ids"] = known.get("token_ids", []) + choice["token_ids"]
    whole["choices"] = [made[index] for index in sorted(made)]
    return whole


def _add_completion(known: Json, choice: Json) -> None:
    known["text"] = known.get("text", "") + choice["text"]
    known.setdefault("logprobs", None)
    if choice["logprobs"] is not None:
        columns = known["logprobs"] or {name: [] for name in choice["logprobs"]}
        known["logprobs"] = {name: column + choice["logprobs"][name] for name, column in columns.items()}
    known |= {name: choice[name] for name in ("prompt_token_ids", "prompt_logprobs") if name in choice}


def _add_chat(known: Json, choice: Json) -> None:
    delta = choice["delta"]
    message = known.setdefault("message", {"content": None, "refusal": None})
    message |= {"role": delta["role"]} if "role" in delta else {}
    for name in ("content", "reasoning_content"):
        if name in delta:
            message[name] = (message.get(name) or "") + delta[name]
    for piece in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if "id" in piece:
            assert piece["index"] == len(calls)
            calls.append({"id": piece["id"], "type": piece["type"], "function": {**piece["function"], "arguments": ""}})
        calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None
    known.setdefault("logprobs", None)
    if choice["logprobs"] is not None:
        entries = (known["logprobs"] or {"content": []})["content"]
        known["logprobs"] = {"content": entries + choice["logprobs"]["content"], "refusal": None}


def _message(events: list[Json]) -> Json:
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    message = dict(events[0]["message"])
    assert message["content"] == []
    blocks: list[Json] = []
    is_open = False
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "said": ""})
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                (said,) = (value for name, value in event["delta"].items() if name != "type")
                blocks[-1]["said"] += said
            case "content_block_stop":
                assert is_open
                is_open = False
            case other:
                raise AssertionError(other)
    assert not is_open
    for block in blocks:
        said = block.pop("said")
        match block["type"]:
            case "tool_use":
                block["input"] = _object(said)
            case kind:
                block[kind] = said
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"], "content": blocks}


def _object(text: str) -> object:
    """What clients make of a call's pieces: nothing at all, or nothing whole, is {}."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}


def _response(events: list[Json]) -> Json:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    response: Json = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    said: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            said[event["output_index"]] = said.get(event["output_index"], "") + event["delta"]
    for at, item in enumerate(response["output"]):
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert said.get(at, "{}" if item["type"] == "function_call" else "") == text
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    return response


def _generated(events: list[Json]) -> Json | list[Json]:
    latest: dict[int, Json] = {}
    for event in events:
        place = event.get("index", 0)
        before = latest.get(place)
        assert before is None or before["meta_info"]["finish_reason"] is None, "a sequence goes on after its end"
        assert before is None or event["text"].startswith(before["text"]), "what was shown is taken back"
        latest[place] = event
    whole = [{name: value for name, value in latest[at].items() if name != "index"} for at in sorted(latest)]
    return whole if "index" in events[0] else whole[0]
