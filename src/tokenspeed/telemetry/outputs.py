"""Outputs of metric events: found by name, created in the relay process, kept apart from each other's faults."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, TextIO, runtime_checkable

import attrs
import msgspec

from tokenspeed.errors import SettingsError
from tokenspeed.telemetry.events import EventBatch

GROUP = "tokenspeed.metric_outputs"
"""Entry-point group; each entry is an `OutputFactory`."""

log = logging.getLogger("tokenspeed.metrics")


@runtime_checkable
class MetricOutput(Protocol):
    """Takes what ranks measured. Called on the relay's one thread: slow outputs cost events, never a round."""

    def write(self, batch: EventBatch) -> None: ...

    def close(self) -> None: ...


OutputFactory = Callable[[str], MetricOutput]
"""Gets what stands behind ``=`` in ``metrics.outputs``, "" if nothing does."""


@attrs.frozen(kw_only=True, eq=False)
class JsonLines:
    """One JSON object a batch, appended to a file: engine, time, dropped, events as [name, kind, value, labels]."""

    file: TextIO

    def write(self, batch: EventBatch) -> None:
        line = {
            "engine": batch.engine,
            "ts": round(batch.sent_s, 6),
            "dropped": batch.dropped,
            "events": [[e.name, e.kind.value, e.value, dict(e.labels)] for e in batch.events],
        }
        self.file.write(msgspec.json.encode(line).decode() + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def json_lines(path: str) -> JsonLines:
    """Raises: SettingsError: `path` is missing or cannot be written."""
    if not path:
        raise SettingsError("metrics.outputs: jsonl needs a file, as in jsonl=metrics.jsonl")
    try:
        return JsonLines(file=Path(path).open("a", encoding="utf-8"))
    except OSError as exc:
        raise SettingsError(f"metrics.outputs: jsonl={path}: {exc.strerror or exc}") from exc


@attrs.define(eq=False)
class Faults:
    """Writer: GuardedOutput."""

    count: int = 0


@attrs.frozen(kw_only=True, eq=False)
class GuardedOutput:
    """An output whose exceptions stay its own: the first is logged with its traceback, all are counted."""

    name: str
    inner: MetricOutput
    faults: Faults = attrs.field(factory=Faults)

    def write(self, batch: EventBatch) -> None:
        try:
            self.inner.write(batch)
        except Exception:
            self.faults.count += 1
            if self.faults.count == 1:
                log.exception("metric output %s failed; later failures of it are only counted", self.name)

    def close(self) -> None:
        if self.faults.count:
            log.warning("metric output %s failed %d times", self.name, self.faults.count)
        try:
            self.inner.close()
        except Exception:
            log.exception("metric output %s failed to close", self.name)


def open_outputs(wanted: Iterable[str]) -> tuple[GuardedOutput, ...]:
    """Create the outputs that ``metrics.outputs`` lists: ``NAME`` or ``package.module:attribute``, then ``=ARGUMENT``.

    Raises: SettingsError: unknown, not importable, or it refused its argument; those already made are closed.
    """
    made: list[GuardedOutput] = []
    try:
        for text in wanted:
            name, _, argument = text.partition("=")
            made.append(GuardedOutput(name=name, inner=_made(name, argument)))
    except Exception:
        for output in made:
            output.close()
        raise
    return tuple(made)


def _made(name: str, argument: str) -> MetricOutput:
    output = _factory(name)(argument)
    if not isinstance(output, MetricOutput):
        raise SettingsError(f"metrics.outputs: {name} made a {type(output).__name__}, which has no write or close")
    return output


def _factory(name: str) -> OutputFactory:
    if name == "jsonl":
        return json_lines
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as exc:
            raise SettingsError(f"metrics.outputs: {name}: {exc}") from exc
        return _callable(name, found)
    registered = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in registered:
        known = ", ".join(("jsonl", *sorted(registered)))
        raise SettingsError(f"metrics.outputs: unknown output {name!r}; there are {known}, or package.module:attribute")
    return _callable(name, registered[name].load())


def _callable(name: str, found: object) -> OutputFactory:
    if not callable(found):
        raise SettingsError(f"metrics.outputs: {name} is a {type(found).__name__}, not a callable that makes an output")
    return found


__all__: Sequence[str] = ("GROUP", "GuardedOutput", "JsonLines", "MetricOutput", "OutputFactory", "open_outputs")
