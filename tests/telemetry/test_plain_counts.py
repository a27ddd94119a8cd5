"""Metrics written for every token read like the library's own."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from tokenspeed.telemetry.plain_counts import PlainCounter, plain_histogram
from tokenspeed.telemetry.registry import WithoutCreated, new_registry
from tokenspeed.telemetry.table import BETWEEN_TOKENS_S, METRICS, Kind, MetricSpec, Writer

TIMES = MetricSpec(
    name="times", kind=Kind.HISTOGRAM, writer=Writer.FRONTEND, help="Of something.", buckets=BETWEEN_TOKENS_S
)
THINGS = MetricSpec(name="things_total", kind=Kind.COUNTER, writer=Writer.FRONTEND, help="Of something else.")
GAPS = st.floats(0, 100) | st.sampled_from(BETWEEN_TOKENS_S)


def scraped(registry: CollectorRegistry) -> str:
    return generate_latest(WithoutCreated(inner=registry)).decode()


@settings(max_examples=50, deadline=None)
@given(gaps=st.lists(st.tuples(GAPS, st.integers(1, 3)), max_size=20))
def test_a_plain_histogram_is_scraped_as_the_librarys(gaps: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain = plain_histogram(TIMES, "m")
    ours.register(plain)
    library = Histogram(TIMES.full_name, TIMES.help, ("model_name",), buckets=TIMES.buckets, registry=theirs)
    child = library.labels(model_name="m")
    for gap, times in gaps:
        plain.observe(gap, times)
        for _ in range(times):
            child.observe(gap)
    mine, other = scraped(ours).splitlines(), scraped(theirs).splitlines()
    assert [line for line in mine if "_sum" not in line] == [line for line in other if "_sum" not in line]
    sums = [float(line.split()[-1]) for line in (*mine, *other) if "_sum" in line]
    assert abs(sums[0] - sums[1]) <= 1e-9 * max(sums[1], 1)


def test_a_plain_counter_is_scraped_as_the_librarys() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain = PlainCounter(spec=THINGS, model_name="m")
    ours.register(plain)
    child = Counter(THINGS.full_name, THINGS.help, ("model_name",), registry=theirs).labels(model_name="m")
    assert scraped(ours) == scraped(theirs)
    for amount in (1, 255):
        plain.inc(amount)
        child.inc(amount)
    assert scraped(ours) == scraped(theirs)


def test_what_is_written_for_every_token_has_no_label_of_its_own() -> None:
    plain = [spec for spec in METRICS if spec.each_token]
    assert {spec.name for spec in plain} == {"generation_tokens_total", "inter_token_latency_seconds"}
    assert [spec.labels for spec in plain] == [(), ()]
    registry = new_registry("m", process=False)
    registry.counter("generation_tokens_total").inc(3)
    assert b'tokenspeed:generation_tokens_total{model_name="m"} 3.0' in registry.scrape()
