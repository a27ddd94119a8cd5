"""Metrics: one table, one registry an engine, meters that record what they say."""

from __future__ import annotations

import attrs
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from tokenspeed.plane.messages import EngineInfo, LoadReport
from tokenspeed.plane.ports import Meter
from tokenspeed.plane.results import Sizes
from tokenspeed.telemetry.meters import (
    NullMeter,
    PrometheusHttpMeter,
    load_gauges,
    prometheus_meter,
    prometheus_request_meter,
)
from tokenspeed.telemetry.registry import MetricRegistry, new_registry
from tokenspeed.telemetry.table import METRICS, Kind

INFO = EngineInfo(
    model="m",
    dtype="float32",
    vocab_size=10,
    max_model_len=64,
    num_blocks=10,
    block_size=16,
    max_num_seqs=4,
    max_batched_tokens=64,
    max_waiting=4,
    max_logprobs=5,
    eos_token_ids=(0,),
    kv_capacity_tokens=1003,
)


def scraped(registry: MetricRegistry) -> dict[str, float]:
    """Sample name with its labels (without model_name) -> value."""
    found = {}
    for family in text_string_to_metric_families(registry.scrape().decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_names_are_unique_counters_end_in_total_and_histograms_have_rising_buckets() -> None:
    names = [m.name for m in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.endswith("_total") or metric.kind is not Kind.COUNTER
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert bool(metric.buckets) is (metric.kind is Kind.HISTOGRAM)


def test_every_metric_of_the_table_is_scraped_under_its_documented_name_and_type() -> None:
    registry = new_registry("m", process=False)
    for spec in METRICS:
        labels = dict.fromkeys(spec.labels, "x")
        match spec.kind:
            case Kind.COUNTER:
                registry.counter(spec.name, **labels).inc()
            case Kind.GAUGE:
                registry.gauge(spec.name, **labels).set(1)
            case Kind.HISTOGRAM:
                registry.histogram(spec.name, **labels).observe(1)
    families = {f.name: f for f in text_string_to_metric_families(registry.scrape().decode())}
    for spec in METRICS:
        base = spec.full_name.removesuffix("_total") if spec.kind is Kind.COUNTER else spec.full_name
        assert families[base].type == spec.kind.value
        sample = families[base].samples[0]
        assert sample.labels["model_name"] == "m"
        assert set(sample.labels) - {"le"} == {"model_name", *spec.labels}


def test_two_registries_in_one_process_do_not_share_numbers() -> None:
    one, two = new_registry("a"), new_registry("b")
    one.counter("prompt_tokens_total").inc(5)
    assert scraped(one)["tokenspeed:prompt_tokens_total"] == 5
    assert "tokenspeed:prompt_tokens_total" not in scraped(two)
    assert isinstance(one.collector, CollectorRegistry)


@pytest.mark.contract("KM-15", "KM-16", "KM-17", "KM-18")
def test_page_gauges_come_from_the_load_report_and_round_down_after_scaling() -> None:
    registry = new_registry("m", process=False)
    gauges = load_gauges(registry, attrs.evolve(INFO, kv_capacity_tokens=1000))
    gauges.show(LoadReport(running=2, waiting=3, resident_blocks=5, active_blocks=3, total_blocks=10))
    now = scraped(registry)
    assert now["tokenspeed:num_requests_running{engine=0}"] == 2
    assert now["tokenspeed:num_requests_waiting{engine=0}"] == 3
    assert now["tokenspeed:kv_cache_usage_perc{engine=0}"] == 0.3
    assert now["tokenspeed:kv_pages_active{engine=0}"] == 3
    assert now["tokenspeed:kv_pages_cached{engine=0}"] == 2
    assert now["tokenspeed:kv_pages_empty{engine=0}"] == 5
    assert now["tokenspeed:kv_used_tokens{engine=0}"] == 500
    assert now["tokenspeed:kv_free_tokens{engine=0}"] == 700

    load_gauges(registry, INFO).show(LoadReport(total_blocks=10))
    assert scraped(registry)["tokenspeed:kv_free_tokens{engine=0}"] == 1003


def test_a_report_without_a_snapshot_of_the_pool_leaves_the_page_gauges_alone() -> None:
    registry = new_registry("m", process=False)
    gauges = load_gauges(registry, INFO)
    gauges.show(LoadReport(running=1, resident_blocks=5, active_blocks=5, total_blocks=10))
    gauges.show(LoadReport())
    now = scraped(registry)
    assert now["tokenspeed:num_requests_running{engine=0}"] == 0
    assert now["tokenspeed:kv_cache_usage_perc{engine=0}"] == 0.5


@pytest.mark.contract("KM-7", "KM-10", "KM-11", "KM-14")
def test_the_meter_of_a_rank_records_rounds_commits_queue_times_and_preemptions() -> None:
    registry = new_registry("m", process=False)
    meter: Meter = prometheus_meter(registry)
    meter.round(sizes=Sizes(), load=LoadReport(), tokens=24, prompt_tokens=20)
    meter.round(sizes=Sizes(), load=LoadReport(), tokens=0, prompt_tokens=0)
    meter.committed(decode_tokens=4, jit_compiles=1, jit_seconds=0.2)
    meter.committed(decode_tokens=0, jit_compiles=0, jit_seconds=0.0)
    meter.queued(2.5)
    meter.preempted(2)
    meter.finished(prefill_s=0.5, decode_s=1.5)
    now = scraped(registry)
    assert now["tokenspeed:iteration_tokens_total_count{engine=0}"] == 1
    assert now["tokenspeed:iteration_tokens_total_sum{engine=0}"] == 24
    assert now["tokenspeed:iteration_prompt_tokens_total{engine=0}"] == 20
    assert now["tokenspeed:decode_tokens_total{engine=0}"] == 4
    assert now["tokenspeed:jit_serving_compiles_total{engine=0}"] == 1
    assert now["tokenspeed:jit_serving_compile_seconds_total{engine=0}"] == pytest.approx(0.2)
    assert now["tokenspeed:request_queue_time_seconds_count{engine=0}"] == 1
    assert now["tokenspeed:request_queue_time_seconds_sum{engine=0}"] == 2.5
    assert now["tokenspeed:num_preemptions_total{engine=0}"] == 2
    assert now["tokenspeed:request_prefill_time_seconds_sum{engine=0}"] == 0.5
    assert now["tokenspeed:request_decode_time_seconds_sum{engine=0}"] == 1.5
    assert now["tokenspeed:request_inference_time_seconds_sum{engine=0}"] == 2.0


def test_the_null_meter_is_a_meter() -> None:
    meter: Meter = NullMeter()
    meter.round(sizes=Sizes(), load=LoadReport(), tokens=1, prompt_tokens=1)
    meter.committed(decode_tokens=1, jit_compiles=0, jit_seconds=0.0)
    meter.queued(1.0)
    meter.preempted(1)
    meter.finished(prefill_s=1.0, decode_s=1.0)
    meter.reported(LoadReport())
    assert isinstance(meter, Meter)


def test_several_choices_of_one_request_count_the_prompt_once_and_their_tokens_each() -> None:
    registry = new_registry("m", process=False)
    meter = prometheus_request_meter(registry)
    meter.admitted(choices=2, max_tokens=7)
    meter.first_token(seconds=0.5, prompt_tokens=11, cached_tokens=8)
    meter.tokens(count=1, gap_s=None)
    meter.tokens(count=1, gap_s=None)
    meter.tokens(count=2, gap_s=0.4)
    meter.choice_ended(reason="stop", tokens=3, decode_s=0.4)
    meter.choice_ended(reason="abort", tokens=1, decode_s=0.0)
    meter.request_ended(seconds=2.0, most_tokens=3)
    now = scraped(registry)
    assert now["tokenspeed:prompt_tokens_total"] == 11
    assert now["tokenspeed:prefix_cache_queries_total"] == 11
    assert now["tokenspeed:prefix_cache_hits_total"] == 8
    assert now["tokenspeed:generation_tokens_total"] == 4
    assert now["tokenspeed:time_to_first_token_seconds_count"] == 1
    assert now["tokenspeed:inter_token_latency_seconds_count"] == 2
    assert now["tokenspeed:inter_token_latency_seconds_sum"] == pytest.approx(0.4)
    assert now["tokenspeed:request_time_per_output_token_seconds_sum"] == pytest.approx(0.2)
    assert now["tokenspeed:request_time_per_output_token_seconds_count"] == 1
    assert now["tokenspeed:e2e_request_latency_seconds_sum"] == 2.0
    assert now["tokenspeed:request_max_num_generation_tokens_sum"] == 3
    assert now["tokenspeed:request_success_total{finished_reason=stop}"] == 1
    assert now["tokenspeed:request_success_total{finished_reason=abort}"] == 1
    assert now["tokenspeed:request_success_total{finished_reason=error}"] == 0
    assert now["tokenspeed:frontend_live_sequences"] == 0


def test_answered_requests_are_counted_by_handler_method_and_status() -> None:
    registry = new_registry("m", process=False)
    meter = PrometheusHttpMeter(registry=registry)
    for _ in range(2):
        meter.answered(handler="/v1/models", method="GET", status=200, seconds=0.01)
    now = scraped(registry)
    assert now["tokenspeed:http_requests_total{handler=/v1/models,method=GET,status=200}"] == 2
    assert now["tokenspeed:http_request_duration_seconds_count{handler=/v1/models,method=GET}"] == 2
