"""Every metric this package exports, in one table; ``docs/metrics.md`` describes the same rows.

Names, types, buckets and meanings follow vLLM under our own prefix, so that a dashboard made for
it works after a search and replace of the prefix.
"""

from __future__ import annotations

import enum

import attrs

PREFIX = "tokenspeed:"


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Writer(enum.Enum):
    """Which side of the wire knows the number."""

    FRONTEND = "frontend"
    ENGINE = "engine"


TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
HTTP_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 600.0)
COMPILE_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0)
TOKENS = tuple(float(lead * 10**power) for power in range(6) for lead in (1, 2, 5))
ROUND_TOKENS = tuple(float(2**power) for power in (0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


@attrs.frozen(kw_only=True)
class MetricSpec:
    """One metric.

    Attributes:
        name: as scraped, so a counter's ends in ``_total``; without the prefix.
        labels: besides ``model_name``, which every metric has.
        buckets: upper bounds of a histogram.
        each_token: written for every token, so it is counted plainly (`telemetry.plain_counts`).
    """

    name: str
    kind: Kind
    writer: Writer
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    each_token: bool = False

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def family(self) -> str:
        """As the exposition's TYPE line has it: a counter's without ``_total``."""
        return self.full_name.removesuffix("_total") if self.kind is Kind.COUNTER else self.full_name


def _counter(name: str, writer: Writer, text: str, *labels: str, each_token: bool = False) -> MetricSpec:
    return MetricSpec(name=name, kind=Kind.COUNTER, writer=writer, help=text, labels=labels, each_token=each_token)


def _gauge(name: str, writer: Writer, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name=name, kind=Kind.GAUGE, writer=writer, help=text, labels=labels)


def _histogram(
    name: str, writer: Writer, text: str, buckets: tuple[float, ...], *labels: str, each_token: bool = False
) -> MetricSpec:
    return MetricSpec(
        name=name,
        kind=Kind.HISTOGRAM,
        writer=writer,
        help=text,
        labels=labels,
        buckets=buckets,
        each_token=each_token,
    )


_F, _E = Writer.FRONTEND, Writer.ENGINE

METRICS: tuple[MetricSpec, ...] = (
    # the engine's load, as its reports say it
    _gauge("num_requests_running", _F, "Sequences resident on the device.", "engine"),
    _gauge("num_requests_waiting", _F, "Sequences queued in the engine.", "engine"),
    _gauge("kv_cache_usage_perc", _F, "Share of the KV pool used by live requests, 0 to 1.", "engine"),
    _gauge("kv_pages_active", _F, "KV pages used by live requests.", "engine"),
    _gauge("kv_pages_cached", _F, "KV pages that hold only findable prefixes.", "engine"),
    _gauge("kv_pages_empty", _F, "KV pages that hold nothing.", "engine"),
    _gauge("kv_used_tokens", _F, "Token capacity of the resident KV pages.", "engine"),
    _gauge("kv_free_tokens", _F, "Token capacity of the KV pages no live request uses.", "engine"),
    _gauge("cache_config_info", _F, "Always 1; the KV pool's geometry is in the labels.", "block_size", "num_blocks"),
    # requests
    _counter("prompt_tokens_total", _F, "Prompt tokens of requests that produced output."),
    _counter("generation_tokens_total", _F, "Tokens generated, over all choices.", each_token=True),
    _counter("request_success_total", _F, "Choices that ended, by the reason.", "finished_reason"),
    _counter("prefix_cache_queries_total", _F, "Prompt tokens looked up in the prefix cache."),
    _counter("prefix_cache_hits_total", _F, "Prompt tokens found in the prefix cache."),
    _histogram("time_to_first_token_seconds", _F, "From arrival to a request's first token.", TTFT_S),
    _histogram(
        *("inter_token_latency_seconds", _F, "Between successive tokens of a choice.", BETWEEN_TOKENS_S),
        each_token=True,
    ),
    _histogram(
        "request_time_per_output_token_seconds", _F, "Mean time between the tokens of a choice.", BETWEEN_TOKENS_S
    ),
    _histogram("e2e_request_latency_seconds", _F, "From arrival to the end of a request.", REQUEST_S),
    _histogram("request_prompt_tokens", _F, "Prompt tokens of a request.", TOKENS),
    _histogram("request_generation_tokens", _F, "Tokens generated for a choice.", TOKENS),
    _histogram("request_max_num_generation_tokens", _F, "Tokens of a request's longest choice.", TOKENS),
    _histogram("request_params_n", _F, "Choices a request asked for.", CHOICES),
    _histogram("request_params_max_tokens", _F, "max_tokens of requests that gave one.", TOKENS),
    _gauge("frontend_live_sequences", _F, "Sequences the frontend keeps state for."),
    _gauge("frontend_tasks", _F, "asyncio tasks of the HTTP server, its own few included."),
    _gauge("frontend_allocations", _F, "Pieces of memory that Python objects of the HTTP server's process hold."),
    # HTTP
    _counter("http_requests_total", _F, "HTTP requests answered.", "handler", "method", "status"),
    _histogram("http_request_duration_seconds", _F, "From headers to the last byte.", HTTP_S, "handler", "method"),
    # rounds
    _counter("num_preemptions_total", _E, "Requests taken off the device before their end.", "engine"),
    _histogram(
        "request_queue_time_seconds", _E, "From submission to the first forward, once a request.", REQUEST_S, "engine"
    ),
    _histogram("iteration_tokens_total", _E, "Tokens of one forward.", ROUND_TOKENS, "engine"),
    _counter("iteration_prompt_tokens_total", _E, "Prompt tokens computed by forwards.", "engine"),
    _histogram("request_prefill_time_seconds", _E, "From the first forward to the first token.", REQUEST_S, "engine"),
    _histogram("request_decode_time_seconds", _E, "From the first token to the last.", REQUEST_S, "engine"),
    _histogram("request_inference_time_seconds", _E, "From the first forward to the last token.", REQUEST_S, "engine"),
    _counter("decode_tokens_total", _E, "Tokens committed by decode forwards.", "engine"),
    _counter("jit_serving_compiles_total", _E, "Kernel compilations while serving.", "engine"),
    _counter("jit_serving_compile_seconds_total", _E, "Seconds spent in them.", "engine"),
    _counter("async_steps_total", _E, "Forwards fed with the future of the forward before.", "engine"),
    _counter("sync_fallback_steps_total", _E, "Forwards of the futures executor fed by the host.", "engine"),
    # storage tier
    _counter("storage_queried_tokens_total", _E, "Token spans of the blocks looked up in storage.", "engine"),
    _counter("storage_hit_tokens_total", _E, "Token spans of those found; groups may cover the same tokens.", "engine"),
    _counter("storage_blocks_total", _E, "Blocks fetched, stored, failed; damaged: failed, too.", "engine", "outcome"),
    _counter("storage_bytes_total", _E, "Bytes of blocks fetched (read) and stored (write).", "engine", "direction"),
    _counter("storage_seconds_total", _E, "Seconds that storage workers fetched and stored.", "engine", "direction"),
    _counter("storage_late_operations_total", _E, "Storage operations given up at their time limit.", "engine"),
    _gauge("storage_failing", _E, "1 while the store fails and is not waited for.", "engine"),
    # grammars
    _gauge("num_grammar_queue_reqs", _E, "Requests that wait for their grammar to be compiled.", "engine"),
    _counter("num_grammar_total", _E, "Requests whose grammar was decided, compiled or not.", "engine"),
    _counter("num_grammar_cache_hit_total", _E, "Those of them that another's compilation served.", "engine"),
    _counter("num_grammar_aborted_total", _E, "Those refused for their grammar, by HTTP status.", "engine", "status"),
    _histogram("grammar_queue_time_seconds", _E, "From admission to the grammar's verdict.", COMPILE_S, "engine"),
    _histogram("grammar_compilation_time_seconds", _E, "Of one compilation, with its trial.", COMPILE_S, "engine"),
)
