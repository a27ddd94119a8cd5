"""The table as live prometheus-client objects, in a registry of our own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

import attrs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from tokenspeed.errors import InvariantBroken
from tokenspeed.telemetry.plain_counts import PlainCounter, PlainHistogram, plain_histogram
from tokenspeed.telemetry.table import METRICS, Kind, MetricSpec, Writer

Metric: TypeAlias = Counter | Gauge | Histogram | PlainCounter | PlainHistogram


@attrs.frozen(kw_only=True, eq=False)
class MetricRegistry:
    """All metrics of one process. Never the library's global registry: two engines may share a process.

    Attributes:
        model_name: value of the label every metric carries.
    """

    model_name: str
    collector: CollectorRegistry
    metrics: Mapping[str, Metric]

    def counter(self, name: str, **labels: str) -> Counter | PlainCounter:
        metric = self.metrics[name]
        if isinstance(metric, PlainCounter):
            return metric
        if not isinstance(metric, Counter):
            raise InvariantBroken("not a counter", name=name)
        return metric.labels(model_name=self.model_name, **labels)

    def gauge(self, name: str, **labels: str) -> Gauge:
        metric = self.metrics[name]
        if not isinstance(metric, Gauge):
            raise InvariantBroken("not a gauge", name=name)
        return metric.labels(model_name=self.model_name, **labels)

    def histogram(self, name: str, **labels: str) -> Histogram | PlainHistogram:
        metric = self.metrics[name]
        if isinstance(metric, PlainHistogram):
            return metric
        if not isinstance(metric, Histogram):
            raise InvariantBroken("not a histogram", name=name)
        return metric.labels(model_name=self.model_name, **labels)

    def plain_histogram(self, name: str) -> PlainHistogram:
        metric = self.metrics[name]
        if not isinstance(metric, PlainHistogram):
            raise InvariantBroken("not a plain histogram", name=name)
        return metric

    def flush(self) -> None:
        """Nothing waits to be sent: numbers are read where they are, see `telemetry.events.Instruments`."""

    def scrape(self) -> bytes:
        """The exposition in text format 0.0.4."""
        return generate_latest(WithoutCreated(inner=self.collector))


@attrs.frozen(kw_only=True, eq=False)
class WithoutCreated(Collector):
    """What `inner` collects, but for the library's moments of creation: a gauge beside each counter and histogram."""

    inner: Collector

    def collect(self) -> Iterable[Family]:
        for family in self.inner.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


@attrs.frozen(kw_only=True, eq=False)
class RankFiles(Collector):
    """What the ranks of a deployment wrote, from the files they keep in `directory`; summed over ranks.

    Attributes:
        names: families shown, as scraped without a counter's ``_total``.
    """

    directory: str
    names: frozenset[str]

    def collect(self) -> Iterable[Family]:
        collector: Collector = MultiProcessCollector(None, path=self.directory)  # type: ignore[no-untyped-call]
        found = collector.collect()
        return (family for family in found if family.name in self.names)


def new_registry(model_name: str, *, process: bool = True, ranks_dir: str | None = None) -> MetricRegistry:
    """A registry with every metric of the table; `process` adds CPU, memory and file counts of the process.

    Args:
        ranks_dir: where ranks of other processes keep what they know; None: those metrics are written here.
    """
    collector = CollectorRegistry(auto_describe=False)
    if process:
        ProcessCollector(registry=collector)
    ours = [spec for spec in METRICS if ranks_dir is None or spec.writer is not Writer.ENGINE]
    metrics = {
        spec.name: _plain(spec, collector, model_name) if spec.each_token else _build(spec, collector) for spec in ours
    }
    if ranks_dir is not None:
        names = frozenset(spec.family for spec in METRICS if spec.writer is Writer.ENGINE)
        collector.register(RankFiles(directory=ranks_dir, names=names))
    return MetricRegistry(model_name=model_name, collector=collector, metrics=MappingProxyType(metrics))


def rank_files_registry(directory: str) -> CollectorRegistry:
    """Everything the ranks wrote to `directory`, their loads included."""
    collector = CollectorRegistry(auto_describe=False)
    collector.register(RankFiles(directory=directory, names=frozenset(spec.family for spec in METRICS)))
    return collector


def _plain(spec: MetricSpec, collector: CollectorRegistry, model_name: str) -> Metric:
    counter = spec.kind is Kind.COUNTER
    metric = PlainCounter(spec=spec, model_name=model_name) if counter else plain_histogram(spec, model_name)
    collector.register(metric)
    return metric


def _build(spec: MetricSpec, collector: CollectorRegistry) -> Metric:
    labels = ("model_name", *spec.labels)
    if spec.kind is Kind.COUNTER:
        return Counter(spec.full_name, spec.help, labels, registry=collector)
    if spec.kind is Kind.GAUGE:
        # Ranks' files differ in the label `engine`; of one engine's, the latest value counts.
        mode: Literal["mostrecent", "max"] = "mostrecent" if "engine" in spec.labels else "max"
        return Gauge(spec.full_name, spec.help, labels, registry=collector, multiprocess_mode=mode)
    return Histogram(spec.full_name, spec.help, labels, buckets=spec.buckets, registry=collector)
