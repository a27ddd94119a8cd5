"""The official client against a real server: what users of it do on the first day."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from frontend_rig import LiveServer, live_server
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from piece_tokenizer import EOS, piece_tokenizer
from scripted_engine import ScriptedEngine, logprob_of

from tokenspeed.plane.messages import GenerateRequest
from tokenspeed.settings.model import ServerSettings

TEXT = "hello world, 日本é the end"
TOKENIZER = piece_tokenizer()
USER: Any = [{"role": "user", "content": "hello"}]


def script(request: GenerateRequest) -> list[int]:
    """The text, and an EOS; with a seed, that many letters first."""
    return [*([122] * ((request.sampling.seed or 0) % 10)), *TOKENIZER.encode(TEXT), EOS]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with live_server(
        ScriptedEngine(script=script, cached=4), settings=ServerSettings(port=0, api_key="s3cret")
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="s3cret", max_retries=0, timeout=20) as made:
        yield made


def raw_chunks(live: LiveServer, path: str, body: dict[str, object]) -> list[Any]:
    """The data of every event but the last, which must be [DONE]."""
    headers = {"authorization": "Bearer s3cret"}
    with httpx.Client(base_url=live.url, headers=headers, timeout=20) as http:
        answer = http.post(path, json={**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "scripted"
    assert client.models.retrieve("scripted").id == "scripted"
    assert model.to_dict()["max_model_len"] == 256


def test_a_chat_completion_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="scripted", messages=USER)
    assert whole.choices[0].message.content == TEXT
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(TOKENIZER.encode(TEXT)) + 1
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 3  # of a prompt of 4
    chunks = list(
        client.chat.completions.create(
            model="scripted",
            messages=USER,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({c.id for c in chunks}) == 1


def test_a_completion_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="scripted", prompt="hello", max_tokens=5)
    assert whole.choices[0].text == TOKENIZER.decode(TOKENIZER.encode(TEXT)[:5])
    assert whole.choices[0].finish_reason == "length"
    chunks = list(client.completions.create(model="scripted", prompt="hello", max_tokens=5, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert all(c.usage is None for c in chunks)


def test_completions_without_max_tokens_make_sixteen(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="hello", seed=9, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_every_chat_chunk_passes_the_clients_strict_types(live: LiveServer, n: int, *, logprobs: bool) -> None:
    body = {
        "messages": USER,
        "n": n,
        "seed": 1,
        "stream_options": {"include_usage": True},
        **({"logprobs": True, "top_logprobs": 2} if logprobs else {}),
    }
    chunks = raw_chunks(live, "/v1/chat/completions", body)
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)
    assert chunks[-1]["choices"] == []
    roles: dict[int, list[object]] = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        roles.setdefault(choice["index"], []).append(delta.get("role"))
        said = delta.get("content") or choice["finish_reason"] or choice["logprobs"] or delta.get("role")
        assert said, "a chunk that says nothing"
    assert sorted(roles) == list(range(n))
    for found in roles.values():
        assert found[0] == "assistant"
        assert set(found[1:]) <= {None}


def test_whole_answers_pass_the_clients_strict_types(live: LiveServer) -> None:
    headers = {"authorization": "Bearer s3cret"}
    with httpx.Client(base_url=live.url, headers=headers, timeout=20) as http:
        chat = http.post("/v1/chat/completions", json={"messages": USER, "logprobs": True, "top_logprobs": 3, "n": 2})
        ChatCompletion.model_validate_json(chat.content, strict=True)
        # Without echo: the API has null for an echoed prompt's first token, which these types do not know.
        plain = http.post("/v1/completions", json={"prompt": ["a", "b"], "logprobs": 2})
        Completion.model_validate_json(plain.content, strict=True)


def test_content_parts_are_joined_like_the_plain_text(client: openai.OpenAI, live: LiveServer) -> None:
    parts: Any = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    client.chat.completions.create(model="scripted", messages=[{"role": "developer", "content": parts}])
    prompt = TOKENIZER.decode(live.engine.requests[-1].input_ids.tolist())
    assert prompt == "<|system|>hel\nlo\n<|assistant|>"


def test_stop_strings_and_their_reason(client: openai.OpenAI) -> None:
    for stop in ("lo w", ["zzz", "lo w"]):
        answer = client.chat.completions.create(model="scripted", messages=USER, stop=stop)
        assert answer.choices[0].message.content == "hel"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].to_dict()["stop_reason"] == "lo w"


def test_chat_logprobs_are_one_entry_a_token_streamed_or_not(client: openai.OpenAI) -> None:
    options: Any = {"model": "scripted", "messages": USER, "logprobs": True, "top_logprobs": 5}
    whole = client.chat.completions.create(**options)
    content = whole.choices[0].logprobs.content
    ids = [*TOKENIZER.encode(TEXT), EOS]
    assert [bytes(entry.bytes) for entry in content] == [TOKENIZER.token_bytes(token) for token in ids]
    assert [entry.logprob for entry in content] == [logprob_of(token) for token in ids]
    assert all(entry.token in [top.token for top in entry.top_logprobs] for entry in content)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == content


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI, live: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="scripted", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="not supported"):
        client.embeddings.create(model="scripted", input="x")
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with pytest.raises(openai.AuthenticationError):
            list(stranger.completions.create(model="scripted", prompt="x", stream=True))


def test_the_servers_own_extras_go_through_extra_body(client: openai.OpenAI, live: LiveServer) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "return_token_ids": True}
    answer = client.completions.create(model="scripted", prompt="hello", max_tokens=3, extra_body=extra)
    sampling = live.engine.requests[-1].sampling
    assert (sampling.top_k, sampling.min_p, sampling.min_new_tokens) == (5, 0.1, 2)
    choice = answer.choices[0].to_dict()
    assert choice["token_ids"] == TOKENIZER.encode(TEXT)[:3]
    assert choice["prompt_token_ids"] == TOKENIZER.encode("hello")


def test_a_response_header_echoes_the_clients_request_id(client: openai.OpenAI) -> None:
    given = client.with_options(default_headers={"X-Request-Id": "mine-1"})
    answer = given.completions.with_raw_response.create(model="scripted", prompt="x", max_tokens=1)
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.parse().id.startswith("cmpl-")
    nameless = client.completions.create(model="scripted", prompt="x", max_tokens=1)
    assert nameless._request_id == nameless.id
