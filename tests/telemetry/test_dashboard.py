"""The Grafana dashboard asks for what is exported, in the way its type allows."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from source_tree import ROOT

from tokenspeed.telemetry.table import METRICS, Kind, MetricSpec

FILE = ROOT / "docs" / "grafana" / "tokenspeed.json"
BY_NAME = {spec.full_name: spec for spec in METRICS}


def expressions() -> list[str]:
    board: dict[str, Any] = json.loads(FILE.read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def named(word: str) -> MetricSpec | None:
    """The metric that a name in an expression belongs to."""
    if word in BY_NAME:
        return BY_NAME[word]
    found = BY_NAME.get(re.sub(r"_(bucket|sum|count)$", "", word))
    return found if found is not None and found.kind is Kind.HISTOGRAM else None


@pytest.mark.parametrize("expr", expressions())
def test_an_expression_uses_exported_metrics_as_their_types_allow(expr: str) -> None:
    words = re.findall(r"tokenspeed:\w+", expr)
    assert words
    for word in words:
        spec = named(word)
        assert spec is not None, f"{word} is not exported"
        gauge = spec.kind is Kind.GAUGE
        assert (f"rate({word}{{" in expr) is not gauge, word
        # A histogram is never asked for by its bare name, a counter always.
        assert (word == spec.full_name) is (spec.kind is not Kind.HISTOGRAM), word
        for labels in re.findall(r"by \(([\w, ]+)\)", expr):
            known = {"le"} if word.endswith("_bucket") else set(spec.labels)
            assert set(labels.split(", ")) <= known | {"model_name"}


def test_the_dashboard_shows_every_request_metric_an_operator_alerts_on() -> None:
    text = "\n".join(expressions())
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_success_total",
        "http_requests_total",
        "num_preemptions_total",
        "prefix_cache_hits_total",
    ):
        assert f"tokenspeed:{name}" in text
