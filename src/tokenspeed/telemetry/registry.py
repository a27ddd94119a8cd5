"""The table as live prometheus-client objects, in a registry of our own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

import attrs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tokenspeed.errors import InvariantBroken
from tokenspeed.telemetry.table import METRICS, Kind, MetricSpec

Metric: TypeAlias = Counter | Gauge | Histogram

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


@attrs.frozen(kw_only=True, eq=False)
class MetricRegistry:
    """All metrics of one process. Never the library's global registry: two engines may share a process.

    Attributes:
        model_name: value of the label every metric carries.
    """

    model_name: str
    collector: CollectorRegistry
    metrics: Mapping[str, Metric]

    def counter(self, name: str, **labels: str) -> Counter:
        metric = self.metrics[name]
        if not isinstance(metric, Counter):
            raise InvariantBroken("not a counter", name=name)
        return metric.labels(model_name=self.model_name, **labels)

    def gauge(self, name: str, **labels: str) -> Gauge:
        metric = self.metrics[name]
        if not isinstance(metric, Gauge):
            raise InvariantBroken("not a gauge", name=name)
        return metric.labels(model_name=self.model_name, **labels)

    def histogram(self, name: str, **labels: str) -> Histogram:
        metric = self.metrics[name]
        if not isinstance(metric, Histogram):
            raise InvariantBroken("not a histogram", name=name)
        return metric.labels(model_name=self.model_name, **labels)

    def scrape(self) -> bytes:
        """The exposition text; :data:`CONTENT_TYPE` names its format."""
        return generate_latest(self.collector)


def new_registry(model_name: str, *, process: bool = True) -> MetricRegistry:
    """A registry with every metric of the table; `process` adds CPU, memory and file counts of the process."""
    collector = CollectorRegistry(auto_describe=False)
    if process:
        ProcessCollector(registry=collector)
    metrics = {spec.name: _build(spec, collector) for spec in METRICS}
    return MetricRegistry(model_name=model_name, collector=collector, metrics=MappingProxyType(metrics))


def _build(spec: MetricSpec, collector: CollectorRegistry) -> Metric:
    labels = ("model_name", *spec.labels)
    if spec.kind is Kind.COUNTER:
        return Counter(spec.full_name, spec.help, labels, registry=collector)
    if spec.kind is Kind.GAUGE:
        return Gauge(spec.full_name, spec.help, labels, registry=collector)
    return Histogram(spec.full_name, spec.help, labels, buckets=spec.buckets, registry=collector)
