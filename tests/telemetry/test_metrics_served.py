"""Metrics and traces of a whole deployment: ranks, relay and frontend in processes of their own."""

from __future__ import annotations

import gzip
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO

import attrs
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from source_tree import ROOT

SETTINGS = """
model: {{source: "random:tiny-llama"}}
device: {{threads: 1, memory_gib: 0.25}}
scheduler: {{max_num_seqs: 4}}
server: {{port: 0}}
tracing: {{endpoint: "{collector}"}}
metrics:
  port: 0
  outputs:
    - jsonl={scratch}/metrics.jsonl
    - slow_metric_output:HeldOutput={scratch}
"""


@attrs.define(eq=False)
class SpanCollector:
    """An OTLP/HTTP collector: by span name, its trace, parent and own id, in hex, and its integer attributes."""

    server: ThreadingHTTPServer
    spans: dict[str, tuple[str, str, str, dict[str, int]]] = attrs.field(factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    numbers = {a.key: a.value.int_value for a in span.attributes}
                    self.spans[span.name] = (
                        span.trace_id.hex(),
                        span.parent_span_id.hex(),
                        span.span_id.hex(),
                        numbers,
                    )


@pytest.fixture
def collector() -> Generator[SpanCollector, None, None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return None

    found = SpanCollector(server=ThreadingHTTPServer(("127.0.0.1", 0), Handler))
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join(20.0)
    found.server.server_close()


@attrs.define(eq=False)
class Lines:
    """What a stream says, read on a thread."""

    stream: IO[str]
    seen: queue.Queue[str] = attrs.field(factory=queue.Queue)

    def read(self) -> None:
        for line in self.stream:
            self.seen.put(line)

    def wait_for(self, text: str) -> str:
        while text not in (line := self.seen.get(timeout=30.0)):
            pass
        return line


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@attrs.frozen(kw_only=True)
class Served:
    process: subprocess.Popen[str]
    url: str
    ranks_url: str
    scratch: Path
    errors: Lines


@pytest.fixture
def served(tmp_path: Path, collector: SpanCollector) -> Generator[Served, None, None]:
    """A deployment whose second output holds its first message until `release` is written to."""
    os.mkfifo(tmp_path / "release")
    (tmp_path / "s.yaml").write_text(SETTINGS.format(scratch=tmp_path, collector=collector.url))
    process = subprocess.Popen(
        [sys.executable, "-m", "tokenspeed", "serve", str(tmp_path / "s.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests' / 'telemetry'}"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors = Lines(stream=process.stderr)
    reader = threading.Thread(target=errors.read)
    reader.start()
    ranks_url = ""
    try:
        for line in process.stdout:
            if found := re.search(r"metrics of the ranks at (\S+)", line):
                ranks_url = found[1]
            if found := re.search(r"serving \S+ at (\S+)", line):
                yield Served(process=process, url=found[1], ranks_url=ranks_url, scratch=tmp_path, errors=errors)
                break
        else:
            pytest.fail("the deployment did not come up")
    finally:
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        process.stdout.close()
        process.wait(60.0)
        reader.join(60.0)
        process.stderr.close()


TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60.0) as answer:
        return str(answer.read().decode())


def complete(url: str, tokens: int) -> None:
    body = {"model": "tiny-llama", "prompt": "hi", "max_tokens": tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "traceparent": f"00-{TRACE}-{CALLER}-01"},
    )
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == tokens


def samples(text: str) -> dict[str, float]:
    return {
        sample.name + ("{engine=0}" if sample.labels.get("engine") == "0" else ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


@pytest.mark.contract("KM-25", "KM-27")
def test_ranks_numbers_are_on_metrics_and_a_held_output_delays_no_round(
    served: Served, collector: SpanCollector
) -> None:
    complete(served.url, 6)
    complete(served.url, 6)
    # The output holds the relay at its first message all this time.
    for text in (get(f"{served.url}/metrics"), get(served.ranks_url)):
        now = samples(text)
        assert now["tokenspeed:decode_tokens_total{engine=0}"] == 10  # the first token of each comes out of prefill
        assert now["tokenspeed:request_queue_time_seconds_count{engine=0}"] == 2
        assert now["tokenspeed:request_inference_time_seconds_count{engine=0}"] == 2
    frontend, ranks = samples(get(f"{served.url}/metrics")), samples(get(served.ranks_url))
    assert frontend["tokenspeed:generation_tokens_total"] == 12
    assert frontend["tokenspeed:frontend_allocations"] > 10_000  # an interpreter's own, at least
    assert "tokenspeed:generation_tokens_total" not in ranks
    assert ranks["tokenspeed:num_requests_running{engine=0}"] == 0
    assert (served.scratch / "made_in").exists()
    assert not (served.scratch / "batches").exists()

    made_by = int((served.scratch / "made_in").read_text())
    (rank,) = [pid for pid in children(served.process.pid) if "rank_main" in command(pid) and pid != made_by]
    os.kill(rank, signal.SIGUSR1)
    assert '"rows":[]' in served.errors.wait_for("tokenspeed.state: state: ")

    (served.scratch / "release").write_text("go on")  # a named pipe: until the output reads
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60.0) == 0
    assert int((served.scratch / "batches").read_text()) > 1
    made_in = int((served.scratch / "made_in").read_text())
    assert made_in != os.getpid()
    lines = [json.loads(line) for line in (served.scratch / "metrics.jsonl").read_text().splitlines()]
    decoded = sum(e[2] for line in lines for e in line["events"] if e[0] == "decode_tokens_total")
    assert decoded == 10
    assert {line["dropped"] for line in lines} == {0}
    # Only the relay imported the output's module.
    assert (served.scratch / "imported_by").read_text().split() == [str(made_in)]

    # Spans of frontend and engine lie within each other, in the trace of whoever called.
    spans = collector.spans
    assert set(spans) == {"llm_request", "engine", "queue", "prefill", "prefill chunk", "decode"}
    assert {trace for trace, *_ in spans.values()} == {TRACE}
    parents = {name: parent for name, (_, parent, _, _) in spans.items()}
    ids = {own: name for name, (_, _, own, _) in spans.items()}
    assert parents["llm_request"] == CALLER
    assert {name: ids[parent] for name, parent in parents.items() if name != "llm_request"} == {
        "engine": "llm_request",
        "queue": "engine",
        "prefill": "engine",
        "prefill chunk": "prefill",
        "decode": "engine",
    }
    assert spans["engine"][3]["tokenspeed.output_tokens"] == 6
    assert spans["llm_request"][3]["gen_ai.usage.completion_tokens"] == 6
