"""Health in its shades: whether the server answers, whether requests can be served, whether one really is."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.errors import RequestError
from tokenspeed.frontend.calls import CallName
from tokenspeed.frontend.generation import GenerationInput
from tokenspeed.frontend.http.api import Api
from tokenspeed.frontend.http.info import json_reply
from tokenspeed.frontend.http.replies import Health
from tokenspeed.plane.messages import SamplingParams, frozen_tokens

PROBE_S = 20.0


async def health(api: Api, _request: Request) -> Response:
    """200 while some engine is alive and, with work pending, making progress; else 503. Never waits."""
    if trouble := api.trouble():
        raise RequestError(trouble, status=503)
    return json_reply(Health())


async def live(_api: Api, _request: Request) -> Response:
    """200 while the HTTP server itself answers."""
    return json_reply(Health())


async def health_generate(api: Api, _request: Request) -> Response:
    """200 once an engine has been seen to generate.

    With requests in flight their progress shows it; without any, one token is generated.
    """
    if trouble := api.trouble():
        raise RequestError(trouble, status=503)
    if not api.service.in_flight:
        token = next(iter(api.service.info.eos_token_ids), 0)
        probe = GenerationInput(
            prompt_ids=frozen_tokens([token]), sampling=SamplingParams(max_new_tokens=1, temperature=0.0)
        )
        limit_s = min(PROBE_S, api.settings.stall_timeout_s)
        try:
            async with asyncio.timeout(limit_s):
                await api.service.run(probe, CallName(answer="health_generate"))
        except TimeoutError:
            raise RequestError(f"one token was not generated within {limit_s:g} s", status=503) from None
    return json_reply(Health())
