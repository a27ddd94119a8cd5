"""Metrics that are written for every token: counted in plain numbers, and put into families when they are read.

The library takes a lock for each addition and looks a histogram's bucket up from the first one on. These have one
writer, on one thread; a reader on another may see the sum of a histogram without its latest observation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

import attrs
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tokenspeed.telemetry.table import MetricSpec


@attrs.define(eq=False)
class Count:
    """Writer: PlainCounter."""

    value: float = 0.0


@attrs.frozen(kw_only=True, eq=False)
class PlainCounter(Collector):
    """A counter with the label `model_name` only; an `Adds`."""

    spec: MetricSpec
    model_name: str
    count: Count = attrs.field(factory=Count)

    def inc(self, amount: float = 1) -> None:
        self.count.value += amount

    def collect(self) -> Iterable[Family]:
        family = CounterMetricFamily(self.spec.full_name, self.spec.help, labels=("model_name",))
        family.add_metric((self.model_name,), self.count.value)
        yield family


@attrs.define(eq=False)
class Buckets:
    """Writer: PlainHistogram. `counts` are of each bucket alone, the last of what is above all bounds."""

    counts: list[int]
    total: float = 0.0


@attrs.frozen(kw_only=True, eq=False)
class PlainHistogram(Collector):
    """A histogram with the label `model_name` only."""

    spec: MetricSpec
    model_name: str
    bounds: tuple[float, ...]
    buckets: Buckets

    def observe(self, amount: float, times: int = 1) -> None:
        buckets = self.buckets
        buckets.counts[bisect_left(self.bounds, amount)] += times
        buckets.total += amount * times

    def collect(self) -> Iterable[Family]:
        family = HistogramMetricFamily(self.spec.full_name, self.spec.help, labels=("model_name",))
        names = [floatToGoString(bound) for bound in (*self.bounds, float("inf"))]  # type: ignore[no-untyped-call]
        counts = [float(count) for count in accumulate(self.buckets.counts)]
        family.add_metric((self.model_name,), list(zip(names, counts, strict=True)), self.buckets.total)
        yield family


def plain_histogram(spec: MetricSpec, model_name: str) -> PlainHistogram:
    buckets = Buckets(counts=[0] * (len(spec.buckets) + 1))
    return PlainHistogram(spec=spec, model_name=model_name, bounds=spec.buckets, buckets=buckets)
