"""Write the tables of docs/metrics.md from the table of metrics. Run it after a change there (`make docs`)."""

from __future__ import annotations

from pathlib import Path

from regions import filled, table

from tokenspeed.telemetry.table import METRICS, MetricSpec

FILE = Path(__file__).parents[1] / "docs" / "metrics.md"


def row(spec: MetricSpec) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    return f"`{spec.full_name}`", spec.kind.value, labels, spec.writer.value, spec.help


def metrics() -> str:
    return table(("metric", "type", "labels", "known to", "meaning"), [row(spec) for spec in METRICS])


def buckets() -> str:
    by_bounds: dict[tuple[float, ...], list[str]] = {}
    for spec in METRICS:
        if spec.buckets:
            by_bounds.setdefault(spec.buckets, []).append(spec.name)
    rows = [
        (", ".join(f"`{name}`" for name in names), ", ".join(f"{bound:.12g}" for bound in bounds))
        for bounds, names in by_bounds.items()
    ]
    return table(("histogram", "upper bounds of its buckets, besides infinity"), rows)


def text() -> str:
    return filled(FILE.read_text(encoding="utf-8"), {"metrics": metrics(), "buckets": buckets()})


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
