"""What web pages of other origins get: preflights, answers that a script may read, refusals, and no control routes."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from frontend_rig import LiveServer, frontend, live_server
from starlette.types import Message, Receive, Scope, Send

from tokenspeed.frontend.http.admin import ADMIN_METHODS
from tokenspeed.frontend.http.origins import page_origins
from tokenspeed.settings.model import ServerSettings

pytestmark = pytest.mark.anyio

PAGE, OTHER = "https://chat.example", "https://evil.example"
ASK = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def sharing(answer: httpx.Response) -> list[str]:
    """Names of the headers that let a page's script see the answer."""
    return [name for name in answer.headers if name.startswith("access-control-allow")]


@pytest.fixture(scope="module")
def anyone() -> Iterator[LiveServer]:
    """As it is by default, with both keys."""
    with live_server(settings=ServerSettings(port=0, api_key="key", admin_key="admin")) as live:
        yield live


@pytest.fixture(scope="module")
def listed() -> Iterator[LiveServer]:
    with live_server(settings=ServerSettings(port=0, admin_key="admin", allowed_origins=(PAGE,))) as live:
        yield live


@pytest.fixture
def http(anyone: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=anyone.url, timeout=20, headers={"origin": OTHER}) as client:
        yield client


def test_a_preflight_needs_no_key_and_allows_whatever_headers_a_client_library_sends(http: httpx.Client) -> None:
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("DELETE", "/v1/responses/x")):
        answer = http.options(path, headers={**ASK, "access-control-request-method": method})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "*"
        assert answer.headers["access-control-allow-headers"] == ASK["access-control-request-headers"]
        assert method in answer.headers["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_page_reads_answers_and_their_ids_and_refusals_too(http: httpx.Client, stream: bool) -> None:
    for key, status in (("key", 200), ("wrong", 401)):
        answer = http.post(
            "/v1/chat/completions", json={**CHAT, "stream": stream}, headers={"authorization": f"Bearer {key}"}
        )
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    assert http.get("/nowhere", headers={"authorization": "Bearer key"}).headers["access-control-allow-origin"] == "*"


def test_what_no_page_sent_is_answered_without_a_word_about_pages(anyone: LiveServer) -> None:
    with httpx.Client(base_url=anyone.url, headers={"authorization": "Bearer key"}) as plain:
        answer = plain.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control") or name == "vary"]
        assert plain.options("/v1/models").status_code == 405


@pytest.mark.parametrize("path", sorted(ADMIN_METHODS))
def test_no_page_gets_to_a_control_route(anyone: LiveServer, listed: LiveServer, path: str) -> None:
    for live in (anyone, listed):
        with httpx.Client(base_url=live.url, headers={"origin": PAGE}) as page:
            asked = page.options(f"/{path}", headers=ASK)
            assert (asked.status_code >= 400, sharing(asked)) == (True, [])
            # What a page may send without asking: text, a form, or nothing, and no key.
            for kind in ("text/plain", "application/x-www-form-urlencoded", None):
                told = {} if kind is None else {"content-type": kind}
                blind = page.post(f"/{path}", content=b"{}", headers=told)
                assert (blind.status_code, sharing(blind)) == (401, [])
            assert sharing(page.get(f"/{path}")) == []


def test_a_list_serves_its_pages_and_refuses_all_others_whatever_name_they_got_here_by(listed: LiveServer) -> None:
    with httpx.Client(base_url=listed.url, timeout=20) as http:
        ours = http.post("/v1/chat/completions", json=CHAT, headers={"origin": PAGE})
        assert (ours.status_code, ours.headers["access-control-allow-origin"]) == (200, PAGE)
        assert ours.headers["vary"] == "Origin"
        assert http.options("/v1/models", headers={**ASK, "origin": PAGE}).status_code == 200
        before = len(listed.engine.requests)
        # The last: a page whose name leads to this address takes it for its own server.
        for origin in (OTHER, "null", PAGE.upper(), f"{PAGE}:8443", "http://rebound.example"):
            headers = {"origin": origin, "host": origin.rpartition("/")[2]}
            for answer in (
                http.options("/v1/models", headers={**ASK, **headers}),
                http.get("/v1/models", headers=headers),
                http.post("/v1/chat/completions", json=CHAT, headers=headers),
                http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "", **headers}),
            ):
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
                assert sharing(answer) == []
        assert len(listed.engine.requests) == before
        client = openai.OpenAI(base_url=f"{listed.url}/v1", api_key="none", max_retries=0)
        with client:
            assert client.chat.completions.create(model="scripted", **CHAT).choices  # type: ignore[call-overload]
        document = http.get("/openapi.json").json()
        assert all(
            "403" in operation["responses"] for path in document["paths"].values() for operation in path.values()
        )


async def test_an_empty_list_serves_no_page() -> None:
    async with frontend(settings=ServerSettings(port=0, allowed_origins=())) as rig:
        transport = httpx.ASGITransport(app=rig.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            assert (await http.get("/v1/models")).status_code == 200
            assert (await http.get("/v1/models", headers={"origin": "http://here"})).status_code == 403


async def test_what_no_page_sent_is_passed_on_with_the_servers_own_send() -> None:
    seen: list[Send] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        seen.append(send)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_message: Message) -> None: ...

    wrapped = page_origins(app, ("*",), closed=frozenset())
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"here")]}
    await wrapped(scope, receive, send)
    assert seen == [send]
