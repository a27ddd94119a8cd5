"""POST /tokenize and /detokenize."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.http.api import Api
from tokenspeed.frontend.http.body import read_json
from tokenspeed.frontend.http.common import check_model
from tokenspeed.frontend.http.conversation import tool_object
from tokenspeed.frontend.http.errors import JSON, faulty
from tokenspeed.frontend.http.messages import template_ready
from tokenspeed.frontend.http.parse import shape_of
from tokenspeed.frontend.http.replies import Detokenized, Tokenized
from tokenspeed.frontend.http.schema import DetokenizeRequest, TokenizeRequest
from tokenspeed.plane.checks import fault, token_faults

TOKENIZE = shape_of(TokenizeRequest)
DETOKENIZE = shape_of(DetokenizeRequest)


async def tokenize(api: Api, request: Request) -> Response:
    """Token ids of a text of any length, or of a conversation."""
    fields = TOKENIZE.read(await read_json(request, max_bytes=api.max_body_bytes, workers=api.prompts.workers))
    check_model(api, fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise faulty([fault("prompt", fields.prompt, "either prompt or messages")])
    if fields.prompt is not None:
        special = True if fields.add_special_tokens is None else fields.add_special_tokens
        ids = await api.prompts.any_text(fields.prompt, add_special_tokens=special)
    else:
        messages, faults = template_ready(fields.messages or [])
        if faults:
            raise faulty(faults)
        ids = await api.prompts.from_messages(
            messages,
            add_generation_prompt=fields.add_generation_prompt,
            extra=fields.chat_template_kwargs,
            tools=[tool_object(tool) for tool in fields.tools],
            add_special_tokens=bool(fields.add_special_tokens),
        )
    body = Tokenized(count=len(ids), max_model_len=api.service.info.max_model_len, tokens=ids)
    if fields.return_token_strs:
        body.token_strs = [api.words.text(token) for token in ids]
    return Response(msgspec.json.encode(body), media_type=JSON)


async def detokenize(api: Api, request: Request) -> Response:
    """The text of token ids, special tokens shown."""
    fields = DETOKENIZE.read(await read_json(request, max_bytes=api.max_body_bytes, workers=api.prompts.workers))
    check_model(api, fields.model)
    prompts = api.prompts
    if found := token_faults("tokens", fields.tokens, vocab_size=prompts.tokenizer.vocab_size):
        raise faulty(found)
    text = await prompts.workers.run(
        len(fields.tokens), lambda: prompts.tokenizer.decode(fields.tokens, skip_special_tokens=False)
    )
    return Response(msgspec.json.encode(Detokenized(prompt=text)), media_type=JSON)
