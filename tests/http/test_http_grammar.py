"""Constrained requests over HTTP: what reaches the engine, and how its refusal comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from frontend_rig import LiveServer, live_server

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
        {"json_schema": SCHEMA},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_form_reaches_the_engine_as_one_grammar(live: LiveServer, path: str, fields: dict[str, object]) -> None:
    body = CHAT if "chat" in path else {"prompt": "hi", "max_tokens": 4}
    answer = httpx.post(f"{live.url}{path}", json={**body, **fields}, timeout=20)
    assert answer.status_code == 200, answer.text
    assert json.loads(live.engine.requests[-1].sampling.json_schema or "") == SCHEMA


def test_words_ids_and_formats_of_text_reach_the_engine(live: LiveServer) -> None:
    body = {**CHAT, "bad_words": ["no"], "allowed_token_ids": [5, 6], "response_format": {"type": "text"}}
    assert httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=20).status_code == 200
    sampling = live.engine.requests[-1].sampling
    assert sampling.allowed_token_ids == (5, 6)
    assert sampling.bad_words
    assert (sampling.json_schema, sampling.regex, sampling.ebnf, sampling.structural_tag) == (None,) * 4


def test_a_grammar_and_a_call_that_must_be_made_exclude_each_other(live: LiveServer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    body = {**CHAT, "tools": [tool], "tool_choice": "required", "response_format": {"type": "json_object"}}
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=20)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"
