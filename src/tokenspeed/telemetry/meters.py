"""Writers of the metrics: one for rounds, one for loads, one for requests, one for HTTP.

Each holds its labelled children, so that recording is a few locked additions and no look-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs
from prometheus_client import Gauge

from tokenspeed.plane.messages import EngineInfo, LoadReport
from tokenspeed.plane.results import Sizes
from tokenspeed.plane.storage import StorageTraffic
from tokenspeed.telemetry.events import Adds, Instruments, Observes, Sets
from tokenspeed.telemetry.plain_counts import PlainHistogram
from tokenspeed.telemetry.registry import MetricRegistry

FINISH_REASONS = ("stop", "length", "abort", "error")
GRAMMAR_STATUSES = (400, 429, 500)


@attrs.frozen(kw_only=True, eq=False)
class NullMeter:
    """A `Meter` for an engine that exports nothing."""

    def round(self, *, sizes: Sizes, load: LoadReport, tokens: int, prompt_tokens: int) -> None:
        pass

    def committed(
        self,
        *,
        decode_tokens: int,
        jit_compiles: int,
        jit_seconds: float,
        async_steps: int = 0,
        sync_fallback_steps: int = 0,
    ) -> None:
        pass

    def queued(self, seconds: float) -> None:
        pass

    def preempted(self, count: int) -> None:
        pass

    def finished(self, *, prefill_s: float, decode_s: float) -> None:
        pass

    def grammars_waiting(self, count: int) -> None:
        pass

    def grammar_decided(self, *, waited_s: float, compile_s: float | None, status: int) -> None:
        pass

    def storage(self, traffic: StorageTraffic) -> None:
        pass

    def reported(self, load: LoadReport) -> None:
        pass


@attrs.frozen(kw_only=True, eq=False)
class GrammarInstruments:
    """Of the queue ahead of the scheduler. `refused` is by HTTP status."""

    waiting: Sets
    decided: Adds
    hits: Adds
    refused: Mapping[int, Adds]
    queue_time: Observes
    compile_time: Observes


@attrs.frozen(kw_only=True, eq=False)
class StorageInstruments:
    """Of the storage tier. `counts` are by field of `StorageTraffic`."""

    counts: Mapping[str, Adds]
    failing: Sets

    def add(self, traffic: StorageTraffic) -> None:
        self.failing.set(int(traffic.failing))
        for name, counter in self.counts.items():
            if more := getattr(traffic, name):
                counter.inc(more)


@attrs.frozen(kw_only=True, eq=False)
class PrometheusMeter:
    """The `Meter` of a rank: iteration records of the control thread (KM-4, KM-7, KM-10..14).

    Attributes:
        gauges: of the rank's load; None where the frontend writes them from the load reports.
    """

    instruments: Instruments
    gauges: LoadGauges | None
    iteration_tokens: Observes
    prompt_tokens: Adds
    decode_tokens: Adds
    queue_time: Observes
    prefill_time: Observes
    decode_time: Observes
    inference_time: Observes
    preemptions: Adds
    jit_compiles: Adds
    jit_seconds: Adds
    async_steps: Adds
    sync_fallback_steps: Adds
    grammars: GrammarInstruments
    tier: StorageInstruments

    def round(self, *, sizes: Sizes, load: LoadReport, tokens: int, prompt_tokens: int) -> None:
        """Record one round; a round without a forward has no tokens and is no iteration."""
        del sizes, load  # gauges follow the load reports
        if tokens:
            self.iteration_tokens.observe(tokens)
        if prompt_tokens:
            self.prompt_tokens.inc(prompt_tokens)

    def committed(
        self,
        *,
        decode_tokens: int,
        jit_compiles: int,
        jit_seconds: float,
        async_steps: int = 0,
        sync_fallback_steps: int = 0,
    ) -> None:
        if decode_tokens:
            self.decode_tokens.inc(decode_tokens)
        if jit_compiles:
            self.jit_compiles.inc(jit_compiles)
            self.jit_seconds.inc(jit_seconds)
        if async_steps:
            self.async_steps.inc(async_steps)
        if sync_fallback_steps:
            self.sync_fallback_steps.inc(sync_fallback_steps)

    def queued(self, seconds: float) -> None:
        self.queue_time.observe(seconds)

    def preempted(self, count: int) -> None:
        if count:
            self.preemptions.inc(count)

    def finished(self, *, prefill_s: float, decode_s: float) -> None:
        self.prefill_time.observe(prefill_s)
        self.decode_time.observe(decode_s)
        self.inference_time.observe(prefill_s + decode_s)

    def grammars_waiting(self, count: int) -> None:
        self.grammars.waiting.set(count)

    def grammar_decided(self, *, waited_s: float, compile_s: float | None, status: int) -> None:
        ours = self.grammars
        ours.decided.inc()
        ours.queue_time.observe(waited_s)
        if compile_s is not None:
            ours.compile_time.observe(compile_s)
        if status:
            ours.refused[status if status in ours.refused else 500].inc()
        elif compile_s is None:
            ours.hits.inc()

    def storage(self, traffic: StorageTraffic) -> None:
        self.tier.add(traffic)

    def reported(self, load: LoadReport) -> None:
        if self.gauges is not None:
            self.gauges.show(load)
        self.instruments.flush()


def prometheus_meter(
    instruments: Instruments, *, engine: str = "0", gauges: LoadGauges | None = None
) -> PrometheusMeter:
    return PrometheusMeter(
        instruments=instruments,
        gauges=gauges,
        iteration_tokens=instruments.histogram("iteration_tokens_total", engine=engine),
        prompt_tokens=instruments.counter("iteration_prompt_tokens_total", engine=engine),
        decode_tokens=instruments.counter("decode_tokens_total", engine=engine),
        queue_time=instruments.histogram("request_queue_time_seconds", engine=engine),
        prefill_time=instruments.histogram("request_prefill_time_seconds", engine=engine),
        decode_time=instruments.histogram("request_decode_time_seconds", engine=engine),
        inference_time=instruments.histogram("request_inference_time_seconds", engine=engine),
        preemptions=instruments.counter("num_preemptions_total", engine=engine),
        jit_compiles=instruments.counter("jit_serving_compiles_total", engine=engine),
        jit_seconds=instruments.counter("jit_serving_compile_seconds_total", engine=engine),
        async_steps=instruments.counter("async_steps_total", engine=engine),
        sync_fallback_steps=instruments.counter("sync_fallback_steps_total", engine=engine),
        grammars=_grammar_instruments(instruments, engine),
        tier=_storage_instruments(instruments, engine),
    )


def _storage_instruments(instruments: Instruments, engine: str) -> StorageInstruments:
    def counter(name: str, **labels: str) -> Adds:
        return instruments.counter(f"storage_{name}_total", engine=engine, **labels)

    counts: dict[str, Adds] = {name: counter(name) for name in ("queried_tokens", "hit_tokens")}
    counts |= {name: counter("blocks", outcome=name) for name in ("fetched", "stored", "failed", "damaged")}
    for field, direction in (("read", "read"), ("written", "write")):
        counts[f"{field}_bytes"] = counter("bytes", direction=direction)
    for direction in ("read", "write"):
        counts[f"{direction}_s"] = counter("seconds", direction=direction)
    counts["late"] = counter("late_operations")
    return StorageInstruments(
        counts=MappingProxyType(counts), failing=instruments.gauge("storage_failing", engine=engine)
    )


def _grammar_instruments(instruments: Instruments, engine: str) -> GrammarInstruments:
    refused = {
        status: instruments.counter("num_grammar_aborted_total", engine=engine, status=str(status))
        for status in GRAMMAR_STATUSES
    }
    return GrammarInstruments(
        waiting=instruments.gauge("num_grammar_queue_reqs", engine=engine),
        decided=instruments.counter("num_grammar_total", engine=engine),
        hits=instruments.counter("num_grammar_cache_hit_total", engine=engine),
        refused=MappingProxyType(refused),
        queue_time=instruments.histogram("grammar_queue_time_seconds", engine=engine),
        compile_time=instruments.histogram("grammar_compilation_time_seconds", engine=engine),
    )


@attrs.frozen(kw_only=True, eq=False)
class LoadGauges:
    """Gauges of one engine, written from its load reports (KM-15..18).

    Attributes:
        token_capacity: tokens the whole pool can hold, 0 if not told; pages are counted in parents of
            the pool and scaled by it, since a parent is not a fixed number of tokens in every layout.
    """

    token_capacity: int
    running: Sets
    waiting: Sets
    usage: Sets
    active: Sets
    cached: Sets
    empty: Sets
    used_tokens: Sets
    free_tokens: Sets

    def show(self, load: LoadReport) -> None:
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        total = load.total_blocks
        if not total:  # no snapshot of the pool
            return
        self.usage.set(load.active_blocks / total)
        self.active.set(load.active_blocks)
        self.cached.set(load.resident_blocks - load.active_blocks)
        self.empty.set(total - load.resident_blocks)
        self.used_tokens.set(load.resident_blocks * self.token_capacity // total)
        self.free_tokens.set((total - load.active_blocks) * self.token_capacity // total)


def load_gauges(instruments: Instruments, info: EngineInfo) -> LoadGauges:
    """The gauges of the engine that registered as `info`; also publishes its pool's geometry."""
    instruments.gauge("cache_config_info", block_size=str(info.block_size), num_blocks=str(info.num_blocks)).set(1)
    engine = str(info.engine_index)
    return LoadGauges(
        token_capacity=info.kv_capacity_tokens,
        running=instruments.gauge("num_requests_running", engine=engine),
        waiting=instruments.gauge("num_requests_waiting", engine=engine),
        usage=instruments.gauge("kv_cache_usage_perc", engine=engine),
        active=instruments.gauge("kv_pages_active", engine=engine),
        cached=instruments.gauge("kv_pages_cached", engine=engine),
        empty=instruments.gauge("kv_pages_empty", engine=engine),
        used_tokens=instruments.gauge("kv_used_tokens", engine=engine),
        free_tokens=instruments.gauge("kv_free_tokens", engine=engine),
    )


@attrs.frozen(kw_only=True, eq=False)
class PrometheusRequestMeter:
    """What the frontend records of requests.

    One rule for several choices: what is about a prompt or about waiting (prompt tokens, cache
    look-ups, first token, whole latency, parameters) counts once a request; what is about generated
    tokens (their number and spacing, the reason of the end) counts once a choice.
    """

    prompt_tokens: Adds
    generation_tokens: Adds
    success: Mapping[str, Adds]
    cache_queries: Adds
    cache_hits: Adds
    ttft: Observes
    between: PlainHistogram
    per_token: Observes
    e2e: Observes
    request_prompt_tokens: Observes
    request_generation_tokens: Observes
    most_tokens: Observes
    params_n: Observes
    params_max_tokens: Observes
    live: Gauge

    def admitted(self, *, choices: int, max_tokens: int | None) -> None:
        self.live.inc(choices)
        self.params_n.observe(choices)
        if max_tokens is not None:
            self.params_max_tokens.observe(max_tokens)

    def first_token(self, *, seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        self.ttft.observe(seconds)
        self.prompt_tokens.inc(prompt_tokens)
        self.request_prompt_tokens.observe(prompt_tokens)
        self.cache_queries.inc(prompt_tokens)
        self.cache_hits.inc(cached_tokens)

    def tokens(self, count: int, gap_s: float | None) -> None:
        """`count` new tokens of a choice; `gap_s` since its previous ones, None for the first."""
        self.generation_tokens.inc(count)
        if gap_s is not None:
            self.between.observe(gap_s / count, count)

    def choice_ended(self, *, reason: str, tokens: int, decode_s: float) -> None:
        """`decode_s`: between the first and the last of its `tokens`."""
        self.live.dec()
        if tokens > 1:
            self.per_token.observe(decode_s / (tokens - 1))
        self.success[reason].inc()
        if tokens:
            self.request_generation_tokens.observe(tokens)

    def request_ended(self, *, seconds: float, most_tokens: int) -> None:
        self.e2e.observe(seconds)
        if most_tokens:
            self.most_tokens.observe(most_tokens)


def prometheus_request_meter(registry: MetricRegistry) -> PrometheusRequestMeter:
    reasons = {reason: registry.counter("request_success_total", finished_reason=reason) for reason in FINISH_REASONS}
    return PrometheusRequestMeter(
        prompt_tokens=registry.counter("prompt_tokens_total"),
        generation_tokens=registry.counter("generation_tokens_total"),
        success=MappingProxyType(reasons),
        cache_queries=registry.counter("prefix_cache_queries_total"),
        cache_hits=registry.counter("prefix_cache_hits_total"),
        ttft=registry.histogram("time_to_first_token_seconds"),
        between=registry.plain_histogram("inter_token_latency_seconds"),
        per_token=registry.histogram("request_time_per_output_token_seconds"),
        e2e=registry.histogram("e2e_request_latency_seconds"),
        request_prompt_tokens=registry.histogram("request_prompt_tokens"),
        request_generation_tokens=registry.histogram("request_generation_tokens"),
        most_tokens=registry.histogram("request_max_num_generation_tokens"),
        params_n=registry.histogram("request_params_n"),
        params_max_tokens=registry.histogram("request_params_max_tokens"),
        live=registry.gauge("frontend_live_sequences"),
    )


@attrs.define(eq=False)
class Answers:
    """Writer: PrometheusHttpMeter. The labelled metrics of answers by route, method and status."""

    by_kind: dict[tuple[str, str, int], tuple[Adds, Observes]] = attrs.field(
        factory=dict[tuple[str, str, int], "tuple[Adds, Observes]"]
    )


@attrs.frozen(kw_only=True, eq=False)
class PrometheusHttpMeter:
    """Counts answered HTTP requests. Label values come from our route table, so they are bounded."""

    registry: MetricRegistry
    known: Answers = attrs.field(factory=Answers)

    def answered(self, *, handler: str, method: str, status: int, seconds: float) -> None:
        kind = (handler, method, status)
        found = self.known.by_kind.get(kind)
        if found is None:
            found = self.known.by_kind[kind] = (
                self.registry.counter("http_requests_total", handler=handler, method=method, status=str(status)),
                self.registry.histogram("http_request_duration_seconds", handler=handler, method=method),
            )
        count, duration = found
        count.inc()
        duration.observe(seconds)
