"""What fails after a stream began is one error event, and then its end, on every route; whole, it is a status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import httpx
import pytest
from direct_pieces import OffersPieces
from frontend_rig import FrontendRig, frontend
from scripted_engine import ScriptedEngine, says
from stream_reader import NAMED_EVENTS

from tokenspeed.frontend.calls import CallName, NoCallLog
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
NO_TOKEN: Any = "secret detail"
"""What no code here expects of an engine."""


@attrs.frozen(kw_only=True, eq=False)
class Calls(NoCallLog):
    """The statuses that were told, one a call."""

    told: list[int] = attrs.field(factory=list)

    def ended(self, name: CallName, *, rids: Sequence[str], status: int, seconds: float) -> None:
        self.told.append(status)


@attrs.frozen(kw_only=True, eq=False)
class Rig:
    front: FrontendRig
    http: httpx.AsyncClient
    calls: Calls

    async def turns(self, count: int = 10) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def begun(self, path: str, *, stream: bool) -> asyncio.Task[httpx.Response]:
        """A request that has got three tokens."""
        task = asyncio.create_task(self.http.post(path, json={**ROUTES[path], "stream": stream}))
        while not self.front.engine.requests:  # noqa: ASYNC110 - the request is on its way through the loop
            await asyncio.sleep(0)
        for _ in range(3):
            self.front.engine.step()
            await self.turns()
        return task


@asynccontextmanager
async def rig(**settings: object) -> AsyncIterator[Rig]:
    calls = Calls()
    engine = ScriptedEngine(script=says([97, 98, 99, NO_TOKEN]))
    async with frontend(
        engine,
        calls=calls,
        settings=ServerSettings(port=0, **settings),  # type: ignore[arg-type]
    ) as front:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(OffersPieces(app=front.app)), base_url="http://x"
        ) as http:
            yield Rig(front=front, http=http, calls=calls)


FAILURES: dict[str, tuple[Callable[[FrontendRig], object], int, str]] = {
    "the engine dies": (lambda front: front.engine.die("lost"), 503, "lost"),
    "the engine gives this request up": (
        lambda front: front.engine.fail(front.engine.requests[0].rid, 500, "no numbers"),
        500,
        "no numbers",
    ),
    "something nobody expected": (lambda front: front.engine.step(), 500, "internal"),
}


def error_of(path: str, text: str) -> dict[str, object]:
    """Of the one error event, which is the last of the stream."""
    *events, last = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
    assert text.endswith("\n\n")
    assert events, "a stream that failed had begun"
    for event in events:
        told = json.loads(event[-1].removeprefix("data: "))
        assert told.get("error") is None
        assert told.get("type") != "error"
        assert 'finish_reason": "' not in event[-1]
    body = json.loads(last[-1].removeprefix("data: "))
    if path in NAMED_EVENTS:
        assert last[0] == "event: error"
        assert body["type"] == "error"
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


@EACH
@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_in_mid_stream_is_one_error_event_in_the_routes_own_form_and_the_end(
    path: str, name: str
) -> None:
    fail, status, words = FAILURES[name]
    async with rig() as made:
        task = await made.begun(path, stream=True)
        fail(made.front)
        answer = await asyncio.wait_for(task, 10)
        assert answer.status_code == 200
        error = error_of(path, answer.text)
        assert words in f"{error['message']} {error['code']}"
        assert "secret" not in answer.text
        assert made.calls.told == [status]
        assert made.front.service.in_flight == made.front.service.gate.live == 0
        assert made.front.api.state.busy == 0
        assert made.front.metric("request_success_total", finished_reason="error") == 1
        assert made.front.metric("http_requests_total", handler=path, status="200") == 1


@EACH
@pytest.mark.parametrize("name", FAILURES)
async def test_the_same_failure_of_a_whole_answer_is_its_status(path: str, name: str) -> None:
    fail, status, words = FAILURES[name]
    async with rig() as made:
        task = await made.begun(path, stream=False)
        fail(made.front)
        answer = await asyncio.wait_for(task, 10)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert words in f"{error['message']} {error['code']}"
        assert "secret" not in answer.text
        assert made.calls.told == [status]
        assert made.front.service.in_flight == made.front.service.gate.live == made.front.api.state.busy == 0
        assert made.front.metric("http_requests_total", handler=path, status=str(status)) == 1


@EACH
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_the_time_limit_ends_what_runs_with_408_or_an_event(path: str, *, stream: bool) -> None:
    async with rig(request_timeout_s=0.1) as made:
        task = await made.begun(path, stream=stream)
        answer = await asyncio.wait_for(task, 10)
        if stream:
            assert error_of(path, answer.text)["code"] == "request_timeout"
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
        assert made.calls.told == [408]
        assert made.front.engine.aborted == [made.front.engine.requests[0].rid]
        assert made.front.service.in_flight == made.front.service.gate.live == made.front.api.state.busy == 0


@EACH
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_what_fails_before_the_first_token_has_its_own_status_in_a_stream_too(path: str, *, stream: bool) -> None:
    refusals = ((429, "full"), (400, "the grammar is none"), (500, "no numbers"), (503, "asleep"))
    async with rig() as made:
        engine = made.front.engine
        for count, (status, message) in enumerate(refusals, 1):
            engine.refuse = lambda _, told=(status, message): told
            headers = {"X-Request-Id": f"mine-{count}"}
            task = asyncio.create_task(made.http.post(path, json={**ROUTES[path], "stream": stream}, headers=headers))
            while len(engine.requests) < count:  # noqa: ASYNC110 - the request is on its way through the loop
                await asyncio.sleep(0)
            engine.step()
            answer = await asyncio.wait_for(task, 10)
            assert answer.status_code == status
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["error"]["message"] == message
            assert ("retry-after" in answer.headers) is (status in (429, 503))
            assert answer.headers["x-request-id"] == f"mine-{count}"
        odd = await made.http.post(path, json={"stream": 3}, headers={"X-Request-Id": "mine"})
        assert (odd.status_code, odd.headers["x-request-id"]) == (400, "mine")
        for name in ("x" * 300, "a b", "é"):
            odd = await made.http.post(path, json={"stream": 3}, headers={b"X-Request-Id": name.encode()})
            assert (odd.status_code, odd.headers.get("x-request-id")) == (400, None)
        assert made.calls.told == [status for status, _ in refusals]


async def test_a_response_that_failed_is_not_kept_and_one_in_the_background_tells_how_it_failed() -> None:
    async with rig() as made:
        task = await made.begun("/v1/responses", stream=True)
        made.front.engine.fail(made.front.engine.requests[0].rid, 500, "no numbers")
        first = json.loads((await asyncio.wait_for(task, 10)).text.split("\n")[1].removeprefix("data: "))
        assert (await made.http.get(f"/v1/responses/{first['response']['id']}")).status_code == 404
        body = {**ROUTES["/v1/responses"], "background": True}
        kept = (await made.http.post("/v1/responses", json=body)).json()
        while len(made.front.engine.requests) < 2:  # noqa: ASYNC110 - the request is on its way through the loop
            await asyncio.sleep(0)
        made.front.engine.step()
        made.front.engine.fail(made.front.engine.requests[1].rid, 500, "no numbers")
        await made.turns(20)
        found = (await made.http.get(f"/v1/responses/{kept['id']}")).json()
        assert (found["status"], found["error"]["message"]) == ("failed", "no numbers")
        assert made.front.api.state.busy == 0
