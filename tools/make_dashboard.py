"""Write docs/grafana/tokenspeed.json, a dashboard of what `/metrics` exports; run it after a change (`make docs`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "docs" / "grafana" / "tokenspeed.json"
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
SELECT = '{model_name=~"$model"}'
QUANTILES = (0.5, 0.9, 0.99)

Query = tuple[str, str]
"""PromQL and legend; ``$s`` stands for the selection."""


def rate(counter: str, legend: str, by: str = "") -> Query:
    return f"sum{by}(rate(tokenspeed:{counter}$s[$__rate_interval]))", legend


def quantiles(histogram: str) -> list[Query]:
    return [
        (
            f"histogram_quantile({q}, sum by (le) (rate(tokenspeed:{histogram}_bucket$s[$__rate_interval])))",
            f"p{round(q * 100)}",
        )
        for q in QUANTILES
    ]


def ratio(part: str, whole: str) -> str:
    window = "$s[$__rate_interval]"
    return f"sum(rate(tokenspeed:{part}{window})) / sum(rate(tokenspeed:{whole}{window}))"


PANELS: Sequence[tuple[str, str, Sequence[Query]]] = (
    # what clients feel
    ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
    ("Between tokens", "s", quantiles("inter_token_latency_seconds")),
    ("Whole request", "s", quantiles("e2e_request_latency_seconds")),
    ("Tokens", "suffix: tok/s", [rate("generation_tokens_total", "generated"), rate("prompt_tokens_total", "prompts")]),
    (
        "Requests ended",
        "reqps",
        [rate("request_success_total", "{{finished_reason}}", " by (finished_reason) ")],
    ),
    ("HTTP answers", "reqps", [rate("http_requests_total", "{{handler}} {{status}}", " by (handler, status) ")]),
    # the engine
    (
        "Requests",
        "short",
        [
            ("sum by (engine) (tokenspeed:num_requests_running$s)", "running, engine {{engine}}"),
            ("sum by (engine) (tokenspeed:num_requests_waiting$s)", "waiting, engine {{engine}}"),
        ],
    ),
    ("KV pool in use", "percentunit", [("tokenspeed:kv_cache_usage_perc$s", "engine {{engine}}")]),
    (
        "KV pages",
        "short",
        [
            ("sum(tokenspeed:kv_pages_active$s)", "active"),
            ("sum(tokenspeed:kv_pages_cached$s)", "cached"),
            ("sum(tokenspeed:kv_pages_empty$s)", "empty"),
        ],
    ),
    (
        "Prefix cache hits",
        "percentunit",
        [(ratio("prefix_cache_hits_total", "prefix_cache_queries_total"), "of tokens")],
    ),
    ("Preemptions", "reqps", [rate("num_preemptions_total", "engine {{engine}}", " by (engine) ")]),
    (
        "Tokens of a forward",
        "short",
        [
            (ratio("iteration_tokens_total_sum", "iteration_tokens_total_count"), "mean"),
            *quantiles("iteration_tokens_total"),
        ],
    ),
    # where a request's time goes
    ("Queued", "s", quantiles("request_queue_time_seconds")),
    ("Prefill", "s", quantiles("request_prefill_time_seconds")),
    ("Decode", "s", quantiles("request_decode_time_seconds")),
    (
        "Forwards of the futures executor",
        "ops",
        [rate("async_steps_total", "fed by futures"), rate("sync_fallback_steps_total", "fed by the host")],
    ),
    ("HTTP answer time", "s", quantiles("http_request_duration_seconds")),
    ("Compilations while serving", "ops", [rate("jit_serving_compiles_total", "engine {{engine}}", " by (engine) ")]),
    (
        "Grammars",
        "reqps",
        [
            rate("num_grammar_total", "decided"),
            rate("num_grammar_cache_hit_total", "compiled before"),
            rate("num_grammar_aborted_total", "refused, {{status}}", " by (status) "),
        ],
    ),
    ("Waiting for grammars", "s", quantiles("grammar_queue_time_seconds")),
    (
        "Requests that wait for grammars",
        "short",
        [("sum by (engine) (tokenspeed:num_grammar_queue_reqs$s)", "engine {{engine}}")],
    ),
    (
        "Blocks of the storage tier",
        "ops",
        [rate("storage_blocks_total", "{{outcome}}", " by (outcome) ")],
    ),
    ("Bytes of the storage tier", "Bps", [rate("storage_bytes_total", "{{direction}}", " by (direction) ")]),
    (
        "Storage that fails or is late",
        "short",
        [
            ("max by (engine) (tokenspeed:storage_failing$s)", "engine {{engine}} fails"),
            rate("storage_late_operations_total", "given up"),
        ],
    ),
    (
        "Prompt and output lengths",
        "short",
        [
            (ratio("request_prompt_tokens_sum", "request_prompt_tokens_count"), "prompt"),
            (ratio("request_generation_tokens_sum", "request_generation_tokens_count"), "output"),
        ],
    ),
)


def panel(number: int, title: str, unit: str, queries: Sequence[Query]) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "gridPos": {"x": number % COLUMNS * WIDTH, "y": number // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expr.replace("$s", SELECT), "legendFormat": legend}
            for i, (expr, legend) in enumerate(queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    model = {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "query": "label_values(tokenspeed:num_requests_running, model_name)",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "title": "TokenSpeed",
        "uid": "tokenspeed",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "graphTooltip": 1,  # the hair of one panel is shown in all
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, model]},
        "panels": [panel(number, *spec) for number, spec in enumerate(PANELS)],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
