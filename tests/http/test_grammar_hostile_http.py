"""Hostile grammars over HTTP: each is refused in words, and health, streams and later grammars go on meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import attrs
import httpx
import pytest
from ops_rig import tiny_settings
from ops_server import OpsServer, ops_server

from tokenspeed.settings.grammar import GrammarSettings
from tokenspeed.settings.model import ServerSettings

WAIT_S = 120.0
INT = {"type": "integer"}


@pytest.fixture(scope="module")
def server() -> Iterator[OpsServer]:
    settings = tiny_settings(
        pool_tokens=1024,
        grammar=GrammarSettings(compile_s=2.0, timeout_s=600.0),
        server=ServerSettings(port=0, max_body_mib=24.0),
    )
    with ops_server(settings) as running:
        yield running


def schema(value: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": value}}}


def nested(levels: int, branch: str = "") -> object:
    made: object = INT
    for _ in range(levels):
        made = {branch: [{"type": "array", "items": made}, made]} if branch else {"type": "array", "items": made}
    return made


RING = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [INT, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "deep": (schema(nested(100)), "deep"),
    "deeper than the parser goes": (schema(nested(900)), "deep"),
    "branches that double": (schema(nested(14, "anyOf")), "grammar.max_source_kib"),
    "oneOf that doubles": (schema(nested(8, "oneOf")), "oneOf"),
    "a giant enum": (schema({"enum": list(range(20_000))}), "10000 values"),
    "a giant text": (schema({"enum": ["x" * 300_000]}), "grammar.max_source_kib"),
    "twenty megabytes": (schema({"description": "x" * (20 << 20)}), "grammar.max_source_kib"),
    "twenty megabytes of a regex": ({"structured_outputs": {"regex": "a" * (20 << 20)}}, "grammar.max_source_kib"),
    "an endless text": (schema({"type": "string", "maxLength": 100_000}), "maxLength"),
    "references in a ring": (schema(RING), "leads back to itself"),
    "a reference elsewhere": (schema({"$ref": "http://127.0.0.1/schema"}), "within this schema"),
    "a regular expression of Unicode classes": ({"structured_outputs": {"regex": r"\p{L}+"}}, "Unicode class"),
    "look-ahead": ({"structured_outputs": {"regex": "(?=a)a"}}, "look-ahead"),
    "a giant repetition": ({"structured_outputs": {"regex": "(a{9999}){10001}"}}, "repeats more than"),
    "brackets without end": ({"structured_outputs": {"grammar": "root ::= " + "(" * 5000}}, "ebnf"),
    "an undefined rule": ({"structured_outputs": {"grammar": "root ::= nothing"}}, "ebnf"),
    "a pattern in a tag": (
        {"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": r"(a)\1"}}},
        "back reference",
    ),
}


def body(fields: dict[str, object], **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, **fields, **more}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_grammar_is_a_short_400_with_its_reason_whole_or_streamed(server: OpsServer, name: str) -> None:
    fields, words = REFUSED[name]
    for stream in (False, True):
        answer = server.user.post("/v1/chat/completions", json=body(fields, stream=stream), timeout=WAIT_S)
        assert answer.status_code == 400, (stream, answer.text[:300])
        assert words in answer.json()["error"]["message"]
        assert len(answer.content) < 2000
    assert server.user.get("/health").status_code == 200


CATASTROPHES = ("(a+)+$", "(a|aa)+b", "(.*a){20}", "(a|b)*a(a|b){16}", "(a?){30}a{30}")


def test_regular_expressions_that_ruin_others_are_served(server: OpsServer) -> None:
    with ThreadPoolExecutor(len(CATASTROPHES)) as pool:
        found = pool.map(
            lambda regex: server.user.post(
                "/v1/chat/completions", json=body({"structured_outputs": {"regex": regex}}), timeout=WAIT_S
            ),
            CATASTROPHES,
        )
        for answer in found:
            assert answer.status_code == 200, answer.text


@attrs.define(eq=False)
class Stream:
    """A plain stream that is read on a thread, from its first piece on."""

    url: str
    pieces: list[str] = attrs.field(factory=list)
    began: threading.Event = attrs.field(factory=threading.Event)
    stop: threading.Event = attrs.field(factory=threading.Event)
    rounds: int = 0

    def read(self) -> None:
        """One request after another until `stop`."""
        fields = {"prompt": "x", "max_tokens": 60, "stream": True, "ignore_eos": True}
        with httpx.Client(base_url=self.url, timeout=WAIT_S) as http:
            while not self.stop.is_set():
                with http.stream("POST", "/v1/completions", json=fields) as answer:
                    assert answer.status_code == 200
                    lines = []
                    for line in answer.iter_lines():
                        lines.append(line)
                        self.pieces.append(line)
                        self.began.set()
                    assert "data: [DONE]" in lines
                self.rounds += 1


@contextmanager
def plain_stream(url: str) -> Iterator[Stream]:
    """It has begun; at the end it has gone on without a fault."""
    plain = Stream(url)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(plain.read)
        try:
            assert plain.began.wait(WAIT_S)
            yield plain
        finally:
            plain.stop.set()
        reading.result()


ENDLESS = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string", "maxLength": 50} for i in range(600)},
    "minProperties": 300,
}
"""Passes every look at it, and compiles for far longer than the limit."""


def test_while_grammars_compile_without_end_streams_and_health_go_on_and_who_leaves_is_forgotten(
    server: OpsServer,
) -> None:
    def post(fields: dict[str, object], timeout_s: float = WAIT_S) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/chat/completions", json=body(fields), timeout=timeout_s)

    with ThreadPoolExecutor(4) as pool, plain_stream(server.url) as plain:
        endless = pool.submit(post, schema(ENDLESS))
        for number in range(6):
            with pytest.raises(httpx.ReadTimeout):
                post(schema({**ENDLESS, "title": str(number)}), 0.05)
        behind = pool.submit(post, schema({"enum": ["fine"]}))
        before, healthy = len(plain.pieces), 0
        while not endless.done():
            assert server.user.get("/health").status_code == 200
            healthy += 1
        answer = endless.result()
        assert answer.status_code == 400, answer.text
        assert "grammar.compile_s" in answer.json()["error"]["message"]
        assert healthy > 1
        assert len(plain.pieces) > before + 10
        assert behind.result().json()["choices"][0]["message"]["content"] == '"fine"'
    assert server.engine.loop.grammar.waiting() == ()
    assert server.engine.loop.table.live == 0


def test_a_grammar_of_many_readings_ends_and_the_stream_beside_it_does_not(server: OpsServer) -> None:
    fields = {"structured_outputs": {"regex": "((a{1,50}){1,50}){1,50}"}, "min_tokens": 100}
    with plain_stream(server.url):
        answer = server.user.post("/v1/chat/completions", json=body(fields, max_tokens=100), timeout=WAIT_S)
        assert answer.status_code == 400, answer.text
        assert "grammar.token_ms" in answer.json()["error"]["message"]


def test_afterwards_a_grammar_is_served_as_before(server: OpsServer) -> None:
    answer = server.user.post("/v1/chat/completions", json=body(schema({"enum": ["fine"]})), timeout=WAIT_S)
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == "fine"
