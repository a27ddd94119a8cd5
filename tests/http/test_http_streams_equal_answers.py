"""A stream, put together, is the answer that the same request gets whole, however many tokens came at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import attrs
import httpx
import pytest
from direct_pieces import OffersPieces
from frontend_rig import FrontendRig, frontend
from piece_tokenizer import EOS, piece_tokenizer
from scripted_engine import ScriptedEngine, engine_info
from stream_reader import Json, events_of, put_together, stable

from tokenspeed.frontend.text.output.families import OutputFamily
from tokenspeed.frontend.text.output.reasoning import REASONING
from tokenspeed.plane.messages import GenerateRequest

pytestmark = pytest.mark.anyio

TOKENIZER = piece_tokenizer()
TEXT = "hello world, 日本é the end"
CALL = '<tool_call>{"name": "f", "arguments": {"a": "é日本 </", "b": [1]}}</tool_call>'
ANSWERS = {
    "calls": f"<think>\nHm. </thin\n</think>\n\nSo <tool\n{CALL}\n{CALL} done",
    "unknown function": '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
    "no name": '<tool_call>{"arguments": {"a": 1}}</tool_call> then',
    "no JSON": "<tool_call>f(a=1)</tool_call>",
    "broken arguments": '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call> then',
    "never closed": '<think>Hm.</think><tool_call>{"name": "f", "arguments": {"a": "日本',
    "only an opened tag": "<tool_call>",
    "text as arguments": '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
    "a list as arguments": '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    "nested tags": f"<tool_call>{CALL}</tool_call>",
    "closed before opened": f"</tool_call></think>{CALL}",
    "thinks for ever": "<think>Hm. <tool_call>{",
    "half a tag": "So <tool_cal",
}
ODD, ODD_SEED = 'a"\\b/\n\r\t\x00\x1f\x7f\x85\u2028\u2029 {"text": "\\u0041"} 😀é日本\N{COMBINING ACUTE ACCENT}', 99
"""Signs that JSON, or a reader of lines, takes for its own."""
USER = [{"role": "user", "content": "hello"}]
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}}


def script(request: GenerateRequest) -> Sequence[int]:
    """What the last user message names, or the text behind as many letters as the seed says."""
    prompt = TOKENIZER.decode(request.input_ids.tolist())
    asked = prompt.rpartition("<|user|>")[2].partition("\n")[0]
    if request.sampling.seed == ODD_SEED:
        return [*TOKENIZER.encode(ODD), EOS]
    return [*([122] * ((request.sampling.seed or 0) % 10)), *TOKENIZER.encode(ANSWERS.get(asked, TEXT)), EOS]


@attrs.frozen(kw_only=True, eq=False)
class Asker:
    """Posts to a frontend over an engine that is stepped by hand.

    Attributes:
        direct: through a server that takes pieces of a body from where they arrive.
    """

    rig: FrontendRig
    http: httpx.AsyncClient
    direct: httpx.AsyncClient

    async def answer(self, path: str, body: Json, *, steps: int) -> httpx.Response:
        """The engine makes `steps` tokens between two looks of the frontend."""
        http = self.direct if steps == 1 else self.http
        task = asyncio.create_task(http.post(path, json=body))
        while not task.done():
            for _ in range(5):
                await asyncio.sleep(0)
            for _ in range(0 if self.rig.engine.quiet else steps):
                self.rig.engine.step()
        answer = await task
        assert answer.status_code == 200, answer.text
        return answer

    async def same(self, path: str, body: Json, *, steps: Sequence[int] = (1, 5)) -> Any:
        """The whole answer, which came at once and is what streams of so many tokens at a time make; without ids."""
        options = {"stream_options": {"include_usage": True}} if "completions" in path else {}
        plain = stable((await self.answer(path, body, steps=100)).json())
        for at_once in steps:
            streamed = (await self.answer(path, {**body, "stream": True, **options}, steps=at_once)).text
            assert stable(put_together(path, events_of(path, streamed))) == plain, (body, at_once)
        return plain


@pytest.fixture
async def asker() -> AsyncIterator[Asker]:
    engine = ScriptedEngine(script=script, cached=2, info=engine_info(max_model_len=2048))
    family = OutputFamily(calls="hermes", reasoning=REASONING["think"])
    async with frontend(engine, family=family) as rig:
        plain, offering = httpx.ASGITransport(rig.app), httpx.ASGITransport(OffersPieces(app=rig.app))
        async with (
            httpx.AsyncClient(transport=plain, base_url="http://x") as http,
            httpx.AsyncClient(transport=offering, base_url="http://x") as direct,
        ):
            yield Asker(rig=rig, http=http, direct=direct)


CUTS: dict[str, Json] = {
    "the model's own end": {},
    "three choices that end at different places": {"n": 3, "seed": 1, "max_tokens": 8},
    "choices and stop strings": {"n": 3, "seed": 1, "stop": ["rld, 日", "zz"]},
    "a stop string that never comes whole": {"stop": ["é the end!", "日本é the endZ", "world, 日本X"]},
    "a stop string that is kept": {"n": 2, "seed": 0, "stop": ["本é t"], "include_stop_str_in_output": True},
    "a stop token": {"stop_token_ids": [ord(",")], "return_token_ids": True},
    "a stop token that is kept": {"stop_token_ids": [ord(",")], "include_stop_str_in_output": True},
    "no stop before so many tokens": {"stop": ["o", "d"], "min_tokens": 6},
    "half a character": {"max_tokens": 6, "stop": ["ZZ"], "logit_bias": {"1": 1}},
    "special tokens shown": {"ignore_eos": True, "skip_special_tokens": False, "max_tokens": 16},
    "signs that have to be escaped": {"seed": ODD_SEED, "max_tokens": 80},
    "signs that have to be escaped and stop it": {
        "n": 1,
        "seed": ODD_SEED,
        "max_tokens": 80,
        "stop": ["\x00\x1f", "\u2029"],
    },
    "ids": {"return_token_ids": True, "n": 2, "seed": 3, "stop": ["lo w"]},
}
LOGPROBS: dict[str, tuple[Json, Json]] = {
    "/v1/completions": (
        {"prompt": "hello world", "max_tokens": 40},
        {"logprobs": 2},
    ),
    "/v1/chat/completions": ({"messages": USER, "max_tokens": 40}, {"logprobs": True, "top_logprobs": 2}),
}


@pytest.mark.parametrize("path", LOGPROBS)
async def test_text_ids_scores_ends_and_usage_of_a_stream_are_those_of_the_whole_answer(
    asker: Asker, path: str
) -> None:
    body, scored = LOGPROBS[path]
    for cut in CUTS.values():
        for scores in ({}, scored):
            plain = await asker.same(path, {**body, **cut, **scores})
            kept = (
                [choice["logprobs"].get("tokens", choice["logprobs"].get("content")) for choice in plain["choices"]]
                if scores
                else []
            )
            assert not kept or plain["usage"]["completion_tokens"] == sum(map(len, kept))


@pytest.mark.parametrize("truncated", [None, 0, 2, 3, -1])
async def test_an_echoed_and_truncated_prompt_is_scored_alike_in_a_stream(asker: Asker, truncated: int | None) -> None:
    long = "hello world, 日本é hello world"
    for prompt, most in itertools.product((long, TOKENIZER.encode(long), [long, "hi"]), (0, 4)):
        fields: Json = {"prompt": prompt, "n": 2, "max_tokens": most, "echo": True, "logprobs": 1}
        fields |= {"truncate_prompt_tokens": truncated, "return_token_ids": True, "prompt_logprobs": 1, "seed": 0}
        plain = await asker.same("/v1/completions", fields, steps=(1,))
        for choice in plain["choices"]:
            columns, ids = choice["logprobs"], choice["prompt_token_ids"]
            assert len(columns["tokens"]) == len(ids) + most == len(choice["prompt_logprobs"]) + most
            assert columns["token_logprobs"][0] is None
            assert truncated not in (2, 3) or len(ids) <= truncated
            for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
                assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
        assert plain["usage"]["completion_tokens"] == most * len(plain["choices"])


@pytest.mark.parametrize("asked", ANSWERS)
async def test_calls_and_reasoning_split_over_tokens_or_malformed_are_read_alike_on_every_route(
    asker: Asker, asked: str
) -> None:
    user = [{"role": "user", "content": asked}]
    chat = {"messages": user, "tools": [{"type": "function", "function": TOOL}]}
    for stop in (None, ["</think>"], ["<tool_call>"], ["<tool_call", '"name'], ["\n\n", "</"]):
        await asker.same("/v1/chat/completions", {**chat, "stop": stop})
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    message = {"messages": user, "tools": tools, "max_tokens": 400}
    await asker.same("/v1/messages", {**message, "thinking": {"type": "enabled"}}, steps=(1,))
    await asker.same("/v1/messages", {**message, "stop_sequences": ["</think>", "So"]}, steps=(5,))
    response = {"input": asked, "tools": [{"type": "function", **TOOL}]}
    await asker.same("/v1/responses", {**response, "max_output_tokens": 400}, steps=(5,))
    await asker.same("/v1/responses", {**response, "max_output_tokens": 12}, steps=(1,))


async def test_the_native_form_says_the_same_whole_and_at_the_end_of_its_stream(asker: Asker) -> None:
    prompts: list[Json] = [{"text": "hello world"}, {"input_ids": [1, 2]}, {"text": ["hello", "hello world"]}]
    cuts: list[Json] = [
        {},
        {"n": 2, "seed": 2, "stop": ["rld, 日"]},
        {"stop": ["lo w"], "no_stop_trim": True},
        {"stop_token_ids": [ord(",")]},
        {"max_new_tokens": 4, "ignore_eos": True},
    ]
    for prompt, cut, scored in itertools.product(prompts, cuts, (False, True)):
        fields: Json = {**prompt, "sampling_params": cut, "return_logprob": scored, "top_logprobs_num": 2}
        fields |= {"logprob_start_len": 1} if scored else {}
        plain = await asker.same("/generate", fields)
        for one in plain if isinstance(plain, list) else [plain]:
            assert one["meta_info"]["completion_tokens"] == len(one["output_ids"])
            assert not scored or len(one["meta_info"]["output_token_logprobs"]) == len(one["output_ids"])
