"""The operator's line about each call: from an answer's id or a client's to the engine's names, and back."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator

import httpx
import pytest
from doc_snippets import snippets
from frontend_rig import LiveServer, live_server
from scripted_engine import ScriptedEngine
from source_tree import ROOT

from tokenspeed.frontend.calls import SHOWN_RIDS, CallLines, CallName
from tokenspeed.settings.model import ServerSettings
from tokenspeed.telemetry.logs import JsonFormatter

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 3, "n": 2},
    "/v1/chat/completions": {**CHAT, "max_tokens": 3},
    "/v1/messages": {**CHAT, "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 3}},
}


class Ear(logging.Handler):
    """Tells when there is a record."""

    def __init__(self, heard: threading.Event) -> None:
        super().__init__()
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self._heard.set()


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    settings = ServerSettings(port=0, admin_key="key")
    with live_server(ScriptedEngine(), settings=settings, calls=CallLines()) as server:
        yield server


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="tokenspeed.call")
    return caplog


def told(lines: pytest.LogCaptureFixture, live: LiveServer) -> dict[str, object]:
    """The fields of the one line there is, once every call has ended."""
    live.on_loop(lambda: None)
    (record,) = [record for record in lines.records if record.name == "tokenspeed.call"]
    found = json.loads(JsonFormatter().format(record))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_line_names_the_answer_the_clients_id_and_the_engines_sequences(
    live: LiveServer, lines: pytest.LogCaptureFixture, path: str, stream: bool
) -> None:
    before = len(live.engine.requests)
    answer = httpx.post(
        live.url + path, json={**BODIES[path], "stream": stream}, headers={"X-Request-Id": "mine"}, timeout=20
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == "mine"
    line = told(lines, live)
    assert (line["request_id"], line["status"]) == ("mine", 200)
    assert line["rids"] == [request.rid for request in live.engine.requests[before:]]
    ident = str(line["answer_id"])
    assert f'"id":"{ident}' in answer.text
    assert str(line["message"]).startswith(f"{ident}: 200, request id mine, rids {line['rids'][0]}")


@pytest.mark.parametrize("path", BODIES)
def test_a_request_with_a_wrong_field_has_a_line_that_names_it_without_its_value(
    live: LiveServer, lines: pytest.LogCaptureFixture, path: str
) -> None:
    wrong: dict[str, object] = {"input_ids": ["secret"]} if path == "/generate" else {"top_p": "secret"}
    answer = httpx.post(live.url + path, json={**BODIES[path], **wrong}, headers={"X-Request-Id": "mine"}, timeout=20)
    assert answer.status_code == 400
    line = told(lines, live)
    assert (line["path"], line["status"], line["code"], line["request_id"]) == (path, 400, "invalid_value", "mine")
    assert line["field"] == answer.json()["error"]["param"]
    assert "secret" not in str(line)


def test_a_call_that_did_not_fit_has_a_line_without_sequences(
    live: LiveServer, lines: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": ["a"] * 100, "n": 16, "max_tokens": 3}
    assert httpx.post(f"{live.url}/v1/completions", json=body, timeout=20).status_code == 400
    line = told(lines, live)
    assert (line["status"], line["request_id"], line["rids"]) == (400, None, [])


def test_a_client_that_leaves_has_a_line(live: LiveServer, lines: pytest.LogCaptureFixture) -> None:
    live.engine.allow(2)
    ended = threading.Event()
    ear = Ear(ended)
    logging.getLogger("tokenspeed.call").addHandler(ear)
    try:
        body = {"prompt": "a", "max_tokens": 50, "stream": True}
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=20) as answer:
            next(answer.iter_lines())
        assert ended.wait(10)
        assert told(lines, live)["status"] == 499
    finally:
        logging.getLogger("tokenspeed.call").removeHandler(ear)
        live.engine.allow(None)


@pytest.mark.parametrize("which", ["answer", "client"])
def test_a_running_call_can_be_ended_by_the_id_in_its_answer_or_the_clients(
    live: LiveServer, lines: pytest.LogCaptureFixture, which: str
) -> None:
    live.engine.allow(2)
    try:
        with (
            httpx.Client(base_url=live.url, timeout=20, headers={"X-Request-Id": "mine-2"}) as http,
            http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 50, "stream": True}) as answer,
        ):
            events = answer.iter_lines()
            first = json.loads(next(events).removeprefix("data: "))
            ident = first["id"] if which == "answer" else "mine-2"
            reply = httpx.post(
                f"{live.url}/abort_request", json={"rid": ident}, headers={"Authorization": "Bearer key"}, timeout=20
            )
            assert reply.json()["aborted"] == 1
            rest = [json.loads(event.removeprefix("data: ")) for event in events if "{" in event]
        assert rest[-1]["choices"][0]["finish_reason"] == "abort"
    finally:
        live.engine.allow(None)


def test_ids_in_a_line_are_bounded_and_cannot_forge_another(lines: pytest.LogCaptureFixture) -> None:
    rids = [f"r-{number}" for number in range(100)]
    CallLines().ended(
        CallName(answer="cmpl-1", client="x\nERROR tokenspeed: forged" + "y" * 9999), rids=rids, status=200, seconds=1.5
    )
    (record,) = lines.records
    message = record.getMessage()
    assert "\n" not in message
    assert "x?ERROR?tokenspeed:?forged" in message
    assert len(message) < 600
    assert f"and {100 - SHOWN_RIDS} more" in message
    assert json.loads(JsonFormatter().format(record))["rids"] == rids


def test_the_line_in_the_document_has_the_fields_of_a_line(lines: pytest.LogCaptureFixture) -> None:
    CallLines().ended(CallName(answer="cmpl-1"), rids=["r-0"], status=200, seconds=1.5)
    (record,) = lines.records
    shown = [json.loads(s.text) for s in snippets(ROOT / "docs" / "logs.md") if s.language == "json"]
    (shown_call,) = [line for line in shown if line["logger"] == "tokenspeed.call"]
    assert list(shown_call) == list(json.loads(JsonFormatter().format(record)))
