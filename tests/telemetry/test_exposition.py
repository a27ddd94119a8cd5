"""What `/metrics` shows: the table and nothing else, in Prometheus' own reading, and within bounds."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from frontend_rig import LiveServer, live_server
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tokenspeed.telemetry.registry import MetricRegistry, new_registry
from tokenspeed.telemetry.table import METRICS, Kind, MetricSpec, Writer

REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
    *(640, 2560),
)
BETWEEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
FORWARD = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ONE_TWO_FIVE = tuple(lead * 10**power for power in range(6) for lead in (1, 2, 5))

VLLM: dict[str, tuple[str, frozenset[str], tuple[float, ...]]] = {
    "num_requests_running": ("gauge", frozenset(), ()),
    "num_requests_waiting": ("gauge", frozenset(), ()),
    "kv_cache_usage_perc": ("gauge", frozenset(), ()),
    "prompt_tokens_total": ("counter", frozenset(), ()),
    "generation_tokens_total": ("counter", frozenset(), ()),
    "request_success_total": ("counter", frozenset({"finished_reason"}), ()),
    "prefix_cache_queries_total": ("counter", frozenset(), ()),
    "prefix_cache_hits_total": ("counter", frozenset(), ()),
    "num_preemptions_total": ("counter", frozenset(), ()),
    "iteration_tokens_total": ("histogram", frozenset(), FORWARD),
    "time_to_first_token_seconds": ("histogram", frozenset(), FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("histogram", frozenset(), BETWEEN_S),
    "request_time_per_output_token_seconds": ("histogram", frozenset(), BETWEEN_S),
    "e2e_request_latency_seconds": ("histogram", frozenset(), REQUEST_S),
    "request_queue_time_seconds": ("histogram", frozenset(), REQUEST_S),
    "request_prefill_time_seconds": ("histogram", frozenset(), REQUEST_S),
    "request_decode_time_seconds": ("histogram", frozenset(), REQUEST_S),
    "request_inference_time_seconds": ("histogram", frozenset(), REQUEST_S),
    "request_prompt_tokens": ("histogram", frozenset(), ONE_TWO_FIVE),
    "request_generation_tokens": ("histogram", frozenset(), ONE_TWO_FIVE),
    "request_max_num_generation_tokens": ("histogram", frozenset(), ONE_TWO_FIVE),
    "request_params_n": ("histogram", frozenset(), (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("histogram", frozenset(), ONE_TWO_FIVE),
}
"""vLLM's metrics of a text engine, without its prefix: type, labels beside model_name and engine, buckets."""

CONTRACT = {
    "num_preemptions_total": Kind.COUNTER,
    "request_queue_time_seconds": Kind.HISTOGRAM,
    "jit_serving_compiles_total": Kind.COUNTER,
    "jit_serving_compile_seconds_total": Kind.COUNTER,
    "async_steps_total": Kind.COUNTER,
    "sync_fallback_steps_total": Kind.COUNTER,
}
"""Names that the contract fixes."""


def families(text: str) -> dict[str, Family]:
    found = list(text_string_to_metric_families(text))
    names = [family.name for family in found]
    assert len(names) == len(set(names)), "a family is there twice"
    return {family.name: family for family in found}


def touch(registry: MetricRegistry, spec: MetricSpec) -> None:
    labels = dict.fromkeys(spec.labels, "x")
    match spec.kind:
        case Kind.COUNTER:
            registry.counter(spec.name, **labels).inc()
        case Kind.GAUGE:
            registry.gauge(spec.name, **labels).set(1)
        case Kind.HISTOGRAM:
            registry.histogram(spec.name, **labels).observe(1)


def check_family(spec: MetricSpec, family: Family) -> None:
    """Name, type, help, labels and buckets are the table's."""
    assert (family.type, family.documentation) == (spec.kind.value, spec.help), spec.name
    suffixes = {Kind.COUNTER: {"_total"}, Kind.GAUGE: {""}, Kind.HISTOGRAM: {"_bucket", "_sum", "_count"}}[spec.kind]
    assert {sample.name.removeprefix(spec.family) for sample in family.samples} == suffixes
    for sample in family.samples:
        assert set(sample.labels) - {"le"} == {"model_name", *spec.labels}, spec.name
    if spec.buckets:
        bounds = [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]
        assert bounds == [*spec.buckets, float("inf")]


def test_the_exposition_is_the_table_and_nothing_else() -> None:
    registry = new_registry("m")
    for spec in METRICS:
        touch(registry, spec)
    text = registry.scrape().decode()
    found = families(text)
    assert {name for name in found if not name.startswith("process_")} == {spec.family for spec in METRICS}
    for spec in METRICS:
        check_family(spec, found[spec.family])
    said = {line.split(" ", 3)[2] for line in text.splitlines() if line.startswith("# HELP ")}
    typed = {line.split(" ", 3)[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    assert said == typed == {spec.full_name for spec in METRICS} | {n for n in said if n.startswith("process_")}


@pytest.mark.parametrize("name", sorted(VLLM))
def test_a_metric_of_vllm_has_its_type_labels_and_buckets(name: str) -> None:
    kind, labels, buckets = VLLM[name]
    (spec,) = [spec for spec in METRICS if spec.name == name]
    assert spec.kind.value == kind
    assert frozenset(spec.labels) - {"engine"} == labels
    assert spec.buckets == tuple(float(bound) for bound in buckets)


def test_the_names_that_the_contract_fixes_are_there() -> None:
    kinds = {spec.name: spec.kind for spec in METRICS}
    assert {name: kinds.get(name) for name in CONTRACT} == CONTRACT


RANK = """
import sys
import threading
from tokenspeed.telemetry.meters import prometheus_meter
from tokenspeed.telemetry.registry import new_registry
meter = prometheus_meter(new_registry("m", process=False), engine="0")
meter.committed(decode_tokens=int(sys.argv[1]), jit_compiles=0, jit_seconds=0.0)
meter.queued(0.5)
"""


def test_counters_of_an_engine_that_was_restarted_go_on_from_where_they_were(tmp_path: Path) -> None:
    registry = new_registry("m", process=False, ranks_dir=str(tmp_path))
    seen = []
    for tokens in (4, 3):
        command = [sys.executable, "-c", RANK, str(tokens)]
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(command, check=True, timeout=60, env=environment)
        found = families(registry.scrape().decode())
        seen.append(
            (
                found["tokenspeed:decode_tokens"].samples[0].value,
                [s.value for s in found["tokenspeed:request_queue_time_seconds"].samples if s.name.endswith("_count")],
            )
        )
    assert seen == [(4.0, [1.0]), (7.0, [2.0])]
    by_family = {spec.family: spec for spec in METRICS}
    for name, family in found.items():
        assert family.documentation == by_family[name].help  # also of what comes from files
    ranks = {spec.family for spec in METRICS if spec.writer is Writer.ENGINE and spec.kind is not Kind.GAUGE}
    assert ranks <= set(found)


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


def test_no_client_can_add_series_without_bound(live: LiveServer) -> None:
    def labels() -> set[tuple[tuple[str, str], ...]]:
        text = httpx.get(f"{live.url}/metrics").text
        return {tuple(sorted(s.labels.items())) for f in text_string_to_metric_families(text) for s in f.samples}

    verbs = ("PATCH", "TRACE", "PROPFIND", "LINK", "COPY", "LOCK")

    def torment(number: int) -> None:
        with httpx.Client(base_url=live.url) as client:
            client.get(f"/nowhere/{number}")
            client.request(verbs[number % len(verbs)], "/v1/models")
            client.get(f"/v1/models/model-{number}")
            client.get(f"/v1/responses/resp_{number}")
            client.get("/health", params={"n": number}, headers={"X-Request-Id": f"id-{number}"})
            client.post("/v1/completions", json={"model": f"m{number}", "prompt": f"{number}", "max_tokens": 1})
            client.post("/v1/completions", content=b"{" * number)

    labels()  # a scrape counts itself
    torment(0)
    before = labels()
    for number in range(1, 20):
        torment(number)
    assert labels() == before


class Held(Collector):
    """Collects nothing, once it was released."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def collect(self) -> Iterable[Family]:
        self.entered.set()
        assert self.release.wait(20.0)
        return ()


def test_a_scrape_that_takes_long_delays_nobody_else() -> None:
    held = Held()
    with live_server() as server, ThreadPoolExecutor(1) as pool:
        server.rig.registry.collector.register(held)
        scrape = pool.submit(httpx.get, f"{server.url}/metrics", timeout=30.0)
        assert held.entered.wait(20.0)
        assert httpx.get(f"{server.url}/health", timeout=10.0).status_code == 200
        assert not scrape.done()
        held.release.set()
        assert scrape.result(20.0).status_code == 200
