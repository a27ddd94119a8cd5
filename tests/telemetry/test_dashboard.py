"""The Grafana dashboard: well-formed, and every query asks for what is exported, in the way its type allows."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql
import pytest
from source_tree import ROOT

from tokenspeed.telemetry.table import METRICS, Kind, MetricSpec

FILE = ROOT / "docs" / "grafana" / "tokenspeed.json"
BY_NAME = {spec.full_name: spec for spec in METRICS}
BOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
TARGETS = [(panel, target) for panel in PANELS for target in panel["targets"]]
WINDOW = "$__rate_interval"
"""Grafana puts a duration in its place."""


def named(word: str) -> MetricSpec | None:
    """The metric that a name in an expression belongs to."""
    if word in BY_NAME:
        return BY_NAME[word]
    found = BY_NAME.get(re.sub(r"_(bucket|sum|count)$", "", word))
    return found if found is not None and found.kind is Kind.HISTOGRAM else None


def parsed(target: dict[str, Any]) -> promql.Expr:
    return promql.parse(target["expr"].replace(WINDOW, "5m"))


def selectors(
    expr: promql.Expr, within: tuple[str, ...] = ()
) -> Iterator[tuple[promql.VectorSelector, tuple[str, ...]]]:
    """Every selector with the calls it stands in, the outermost first."""
    match expr:
        case promql.VectorSelector():
            yield expr, within
        case promql.MatrixSelector():
            yield expr.vector_selector, within
        case promql.Call():
            for argument in expr.args:
                yield from selectors(argument, (*within, expr.func.name))
        case promql.AggregateExpr():
            yield from selectors(expr.expr, (*within, "aggregate"))
        case promql.BinaryExpr():
            yield from itertools.chain(selectors(expr.lhs, within), selectors(expr.rhs, within))
        case promql.ParenExpr():
            yield from selectors(expr.expr, within)


def groupings(expr: promql.Expr) -> Iterator[list[str]]:
    """The labels that aggregations keep."""
    if isinstance(expr, promql.AggregateExpr):
        yield list(expr.modifier.labels) if expr.modifier else []
        yield from groupings(expr.expr)
    elif isinstance(expr, promql.Call):
        for argument in expr.args:
            yield from groupings(argument)


@pytest.mark.parametrize("target", [t for _, t in TARGETS], ids=[f"{p['title']}-{t['refId']}" for p, t in TARGETS])
def test_a_query_uses_exported_metrics_as_their_types_allow(target: dict[str, Any]) -> None:
    expr = parsed(target)
    found = list(selectors(expr))
    assert found
    for selector, within in found:
        spec = named(selector.name)
        assert spec is not None, f"{selector.name} is not exported"
        assert ("rate" in within) is (spec.kind is not Kind.GAUGE), selector.name
        # A histogram is never asked for by its bare name, a counter always.
        assert (selector.name == spec.full_name) is (spec.kind is not Kind.HISTOGRAM), selector.name
        assert ("histogram_quantile" in within) is selector.name.endswith("_bucket")
        assert [(m.name, m.value) for m in selector.matchers.matchers] == [("model_name", "$model")]
        known = {"model_name", *spec.labels} | ({"le"} if selector.name.endswith("_bucket") else set())
        kept = set(itertools.chain.from_iterable(groupings(expr)))
        assert kept <= known
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= (kept if "aggregate" in within else known), target["legendFormat"]


def test_panels_have_ids_of_their_own_and_do_not_lie_on_each_other() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(ids) == len(set(ids))
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in PANELS
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    for panel in PANELS:
        letters = [target["refId"] for target in panel["targets"]]
        assert letters
        assert len(letters) == len(set(letters))


def test_units_are_those_that_grafana_scales_or_say_that_they_are_our_own() -> None:
    units = {panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS}
    assert {unit for unit in units if not unit.startswith("suffix:")} == {
        "s",
        "short",
        "percentunit",
        "ops",
        "reqps",
        "Bps",
    }


def test_every_panel_and_variable_takes_the_chosen_data_source() -> None:
    variables = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    asking = [*PANELS, *(variable for variable in variables.values() if variable["type"] == "query")]
    assert {json.dumps(part["datasource"]) for part in asking} == {
        json.dumps({"type": "prometheus", "uid": "$datasource"})
    }
    (asked,) = re.findall(r"label_values\((\S+), model_name\)", variables["model"]["query"])
    assert asked in BY_NAME
    used = set(re.findall(r"\$(\w+)", FILE.read_text())) - {"__rate_interval", "__all"}
    assert used == set(variables)


def test_the_dashboard_shows_every_metric_an_operator_alerts_on() -> None:
    asked = {named(selector.name) for _, target in TARGETS for selector, _ in selectors(parsed(target))}
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
        "num_grammar_queue_reqs",
    ):
        assert BY_NAME[f"tokenspeed:{name}"] in asked, name
