"""Access, health, metrics, the document of the API, and a server's start and stop."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading

import attrs
import httpx
import pytest
from frontend_rig import LiveServer, frontend, live_server, sample
from piece_tokenizer import PieceTokenizer, piece_tokenizer
from scripted_engine import ScriptedEngine, engine_info

from tokenspeed.errors import RequestError, SettingsError
from tokenspeed.frontend.http.errors import failure
from tokenspeed.frontend.http.routes import ROUTES, UNSUPPORTED
from tokenspeed.frontend.server import address_of, bind_socket, serving
from tokenspeed.settings.model import ServerSettings
from tokenspeed.testing import HandClock

pytestmark = pytest.mark.anyio


# ---- access ----


def test_the_key_opens_everything_and_without_it_only_health_and_metrics_are_open() -> None:
    with (
        live_server(settings=ServerSettings(port=0, api_key="kéy")) as live,
        httpx.Client(base_url=live.url, timeout=20) as http,
    ):
        paths = [(re.sub(r"{.*}", "x", spec.path), spec.methods[0]) for spec in ROUTES]
        paths += [(path, "POST") for path in UNSUPPORTED] + [("/openapi.json", "GET"), ("/none", "GET")]
        wrong = [{b"Authorization": given.encode()} for given in ("Bearer wrong", "kéy", "Basic kéy", "Bearer")]
        for path, method in paths:
            for headers in ({}, *wrong):
                answer = http.request(method, path, headers=headers)
                if path in {"/health", "/readiness", "/liveness", "/metrics"}:
                    assert answer.status_code == 200
                else:
                    assert answer.status_code == 401, path
                    assert answer.headers["www-authenticate"] == "Bearer"
                    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        good = {b"Authorization": "bearer kéy".encode()}
        assert http.get("/v1/models", headers=good).status_code == 200
        assert live.engine.requests == []


# ---- health and metrics ----


async def test_health_is_bad_while_work_is_pending_and_nothing_happens() -> None:
    clock = HandClock()
    async with frontend(clock=clock, settings=ServerSettings(stall_timeout_s=30)) as rig:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(rig.app), base_url="http://x") as http:
            clock.advance(1000)
            assert (await http.get("/health")).status_code == 200
            waiting = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
            while not rig.engine.requests:  # noqa: ASYNC110 - the request is on its way through the loop
                await asyncio.sleep(0)
            clock.advance(29)
            assert (await http.get("/health")).status_code == 200
            clock.advance(2)
            answer = await http.get("/health")
            assert answer.status_code == 503
            assert "no progress for 31 s" in answer.json()["error"]["message"]
            rig.engine.step()
            await asyncio.sleep(0)
            assert (await http.get("/health")).status_code == 200
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


@attrs.frozen(kw_only=True, eq=False)
class SlowTokenizer(PieceTokenizer):
    """Blocks in `encode` until the test lets it go, like a huge prompt."""

    entered: threading.Event = attrs.field(factory=threading.Event)
    release: threading.Event = attrs.field(factory=threading.Event)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 5000:
            self.entered.set()
            self.release.wait(20)
        return super().encode(text[:100], add_special_tokens=add_special_tokens)


def test_health_and_other_requests_are_answered_while_a_large_prompt_is_tokenized() -> None:
    slow = SlowTokenizer(pieces=piece_tokenizer().pieces)
    engine = ScriptedEngine(info=engine_info(max_model_len=100_000))
    with live_server(engine, tokenizer=slow) as live, httpx.Client(base_url=live.url, timeout=20) as http:
        big: list[httpx.Response] = []
        body = {"prompt": "x" * 50_000}
        thread = threading.Thread(
            target=lambda: big.append(httpx.post(f"{live.url}/v1/completions", json=body, timeout=30))
        )
        thread.start()
        assert slow.entered.wait(10)
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        slow.release.set()
        thread.join(20)
        assert big[0].status_code == 200


def test_metrics_tell_of_requests_load_and_http() -> None:
    with live_server() as live, httpx.Client(base_url=live.url, timeout=20) as http:
        http.post("/v1/completions", json={"prompt": "hello", "n": 2, "max_tokens": 3})
        http.post("/v1/completions", json={"prompt": ""})
        http.get("/nothing/here")
        http.request("PATCH", "/v1/models")
        assert live.engine.wait_until(lambda: live.engine.quiet)
        answer = http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = answer.text
        labels = {"model_name": "scripted"}
        assert sample(text, "generation_tokens_total", **labels) == 6
        assert sample(text, "prompt_tokens_total", **labels) == 1
        assert sample(text, "request_success_total", finished_reason="length") == 2
        assert sample(text, "num_requests_running", engine="0") == 0
        assert sample(text, "kv_cache_usage_perc", engine="0") == 0
        assert sample(text, "cache_config_info", block_size="16", num_blocks="64") == 1
        assert sample(text, "http_requests_total", handler="/v1/completions", method="POST", status="200") == 1
        assert sample(text, "http_requests_total", handler="/v1/completions", method="POST", status="400") == 1
        assert sample(text, "http_requests_total", handler="other", method="GET", status="404") == 1
        assert sample(text, "http_requests_total", method="other", status="405") == 1


def test_an_unexpected_failure_is_a_500_without_details_and_the_server_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with live_server(tokenizer=BrokenTokenizer(pieces=piece_tokenizer().pieces)) as live:
        with httpx.Client(base_url=live.url, timeout=20) as http:
            answer = http.post("/v1/completions", json={"prompt": "boom"})
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "internal_error"
            assert "secret" not in answer.text
            assert "secret detail" in caplog.text
            assert http.post("/v1/completions", json={"prompt": "fine"}).status_code == 200


@attrs.frozen(kw_only=True, eq=False)
class BrokenTokenizer(PieceTokenizer):
    """Fails on one text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if text == "boom":
            raise ZeroDivisionError("secret detail")
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_every_error_body_is_valid_json_whatever_the_words() -> None:
    for message in ("\ud800", "\x00", "x" * 100_000, 'quote " and \\'):
        body = failure(RequestError(message, field=message)).encoded()
        json.loads(body, parse_constant=lambda _: pytest.fail("not JSON"))
        assert len(body) < 20_000


# ---- the document ----


def test_the_document_describes_every_route_with_bounds_and_errors() -> None:
    with live_server() as live, httpx.Client(base_url=live.url, timeout=20) as http:
        document = http.get("/openapi.json").json()
        assert document["openapi"].startswith("3.1")
        described = {(path, method.upper()) for path, ops in document["paths"].items() for method in ops}
        assert described == {(spec.path.replace(":path", ""), method) for spec in ROUTES for method in spec.methods}
        request = document["components"]["schemas"]["CompletionRequest"]
        assert request["required"] == ["prompt"]
        assert "additionalProperties" not in request  # unknown fields are ignored
        assert request["properties"]["top_p"]["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
        answers = document["paths"]["/v1/completions"]["post"]["responses"]
        assert {"200", "400", "404", "408", "413", "415", "429", "500", "503"} == set(answers)
        references = json.dumps(document).count('"$ref": "#/components/schemas/')
        assert references > 10
        for name in {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}:
            assert name in document["components"]["schemas"]


def test_the_document_lists_exactly_the_fields_that_are_accepted() -> None:
    with live_server() as live, httpx.Client(base_url=live.url, timeout=20) as http:
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
        for name in schemas["ChatRequest"]["properties"]:
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, name: None}
            if name != "messages":
                assert http.post("/v1/chat/completions", json=body).status_code == 200, name


# ---- start and stop ----


def test_port_zero_is_a_free_port_and_the_address_is_known_before_serving() -> None:
    sock = bind_socket("127.0.0.1", 0, stalled_s=60)
    try:
        assert address_of(sock).startswith("http://127.0.0.1:")
        port = sock.getsockname()[1]
        assert port > 0
        sock.listen()
        with pytest.raises(SettingsError, match=rf"server.port: cannot listen on 127.0.0.1:{port}: .*in use"):
            bind_socket("127.0.0.1", port, stalled_s=60)
    finally:
        sock.close()
    with pytest.raises(SettingsError, match=r"server.host: cannot listen on 192.0.2.1:0"):
        bind_socket("192.0.2.1", 0, stalled_s=60)
    with pytest.raises(SettingsError, match="server"):
        bind_socket("no.such.host.invalid", 0, stalled_s=60)


async def test_the_server_installs_no_signal_handlers_and_closes_its_socket() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    tasks = asyncio.all_tasks()
    async with frontend() as rig:
        sock = bind_socket("127.0.0.1", 0, stalled_s=60)
        async with serving(rig.app, rig.api, sock) as server:
            assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
            async with httpx.AsyncClient(base_url=server.address) as http:
                assert (await http.get("/version")).json() == {"version": "test"}
        assert sock.fileno() == -1
    assert asyncio.all_tasks() == tasks


def stopper(live: LiveServer) -> threading.Thread:
    thread = threading.Thread(target=lambda: asyncio.run_coroutine_threadsafe(live.server.stop(), live.loop).result(30))
    thread.start()
    return thread


def test_a_stopping_server_refuses_new_work_and_lets_running_streams_finish() -> None:
    engine = ScriptedEngine()
    engine.allow(1)
    with live_server(engine, settings=ServerSettings(port=0, shutdown_timeout_s=20)) as live:
        body = {"prompt": "x", "max_tokens": 5, "stream": True}
        with (
            httpx.Client(base_url=live.url, timeout=20) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            with httpx.Client(base_url=live.url, timeout=20) as other:
                other.get("/ping")  # keeps its connection
                stopping = stopper(live)
                while not live.on_loop(lambda: live.rig.api.state.draining):
                    pass  # each look is a turn of the server's loop
                try:  # within a tick the listening socket is closed; until then the answer is 503
                    late = httpx.post(f"{live.url}/v1/completions", json=body, timeout=5)
                except httpx.TransportError:
                    pass
                else:
                    assert late.status_code == 503
            engine.allow(None)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        stopping.join(20)
        assert engine.aborted == []


async def test_a_draining_server_answers_503_on_connections_it_still_has() -> None:
    async with frontend() as rig:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(rig.app), base_url="http://x") as http:
            rig.api.drain()
            answer = await http.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert (await http.get("/health")).status_code == 503
            assert rig.engine.requests == []


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_what_still_runs_at_the_end_of_the_drain_ends_with_abort(
    caplog: pytest.LogCaptureFixture, *, stream: bool
) -> None:
    caplog.set_level(logging.INFO)
    engine = ScriptedEngine()
    engine.allow(2)
    with live_server(engine, settings=ServerSettings(port=0, shutdown_timeout_s=0.1)) as live:
        answers: list[httpx.Response] = []
        body = {"prompt": "x", "max_tokens": 5, "stream": stream}
        client = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{live.url}/v1/completions", json=body, timeout=20))
        )
        client.start()
        assert engine.wait_until(lambda: engine.steps >= 2 and engine.credit == 0)
        stopping = stopper(live)
        client.join(20)
        stopping.join(20)
        (answer,) = answers
        assert answer.status_code == 200
        if stream:
            events = [part for part in answer.text.split("\n\n") if part]
            assert events[-1] == "data: [DONE]"
            last = json.loads(events[-2].removeprefix("data: "))
        else:
            last = answer.json()
        assert last["choices"][0]["finish_reason"] == "abort"
        assert len(engine.aborted) == 1
        assert [
            record.getMessage() for record in caplog.records if record.name.startswith(("tokenspeed", "uvicorn"))
        ] == [
            f"shutting down: {live.url} refuses connections; 1 sequences have 0.1 s",
            "shutting down: 1 sequences did not end in time and are aborted",
        ]


def test_the_listening_socket_is_closed_after_stop() -> None:
    with live_server() as live:
        host, port = live.url.removeprefix("http://").split(":")
        stopper(live).join(20)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((host, int(port)), timeout=2)


def test_importing_the_frontend_imports_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import tokenspeed.frontend.server, tokenspeed.frontend.http.app, tokenspeed.telemetry.meters\n"
        "import tokenspeed.telemetry.logs\n"
        "assert not [name for name in sys.modules if name.startswith('tokenspeed.device')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
