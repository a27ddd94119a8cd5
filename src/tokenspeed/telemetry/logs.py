"""Logging that never makes its caller wait: records pass a bounded queue to one writer thread.

A record that finds the queue full is counted and lost (KM-32); the writer says how many were. With
``log.async_logging: false`` whoever logs also writes, and waits for the stream.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import queue
import sys
import threading
import time
from typing import Protocol, TextIO

import attrs
import msgspec

from tokenspeed.settings.model import LogFormat, LogSettings

QUEUE_RECORDS = 4096
CLOSE_S = 2.0
TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
LOGGERS = ("tokenspeed", "uvicorn")
"""Whose records are taken: ours and our HTTP server's; a host program's loggers are left alone."""
ROOT = ""
"""Python's root logger, taken too in processes of our own: a library that logs must not wait there either."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts (seconds since the epoch), level, logger, message, and exception if any.

    A record's `fields` (``extra={"fields": {…}}``) stand beside them.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _encodable(record.getMessage()),
        }
        for name, value in getattr(record, "fields", {}).items():
            line[name] = _encodable(value) if isinstance(value, str) else value
        if record.exc_info:
            line["exception"] = _encodable(self.formatException(record.exc_info))
        return msgspec.json.encode(line).decode()


def _encodable(text: str) -> str:
    """Text with lone surrogates escaped: they come from clients and have no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


@attrs.define(eq=False)
class DropCount:
    """Records lost since the start. Written by any logging thread, under the lock."""

    lock: threading.Lock = attrs.field(factory=threading.Lock)
    total: int = 0

    def add(self) -> None:
        with self.lock:
            self.total += 1


class BoundedHandler(logging.handlers.QueueHandler):
    """Puts records into a bounded queue, or counts them as lost; never blocks."""

    def __init__(self, records: queue.Queue[logging.LogRecord | None], drops: DropCount) -> None:
        super().__init__(records)
        self._records = records
        self._drops = drops

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Merge the arguments now, since they may change; the writer formats the exception."""
        if record.args:
            try:
                record.msg = record.getMessage()
            except Exception:  # a wrong call of ours: it is told, by the writer, and not raised here
                record.msg = f"{record.msg} (arguments that do not fit: {record.args!r})"
            record.args = None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._drops.add()


@attrs.frozen(kw_only=True, eq=False)
class Attached:
    """A handler at some loggers, and what those were before.

    Attributes:
        warnings: Python's warnings are records, too.
    """

    handler: logging.Handler
    before: tuple[tuple[logging.Logger, int, bool], ...]
    warnings: bool

    def detach(self) -> None:
        for logger, level, propagate in self.before:
            logger.removeHandler(self.handler)
            logger.setLevel(level)
            logger.propagate = propagate
        if self.warnings:
            logging.captureWarnings(False)


class Logs(Protocol):
    """Logging of one process; close it before the process ends."""

    @property
    def dropped(self) -> int: ...

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Write what is queued, within `timeout_s`; False: not all of it. Works twice."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class LogPipe:
    """Owns the writer thread."""

    attached: Attached
    records: queue.Queue[logging.LogRecord | None]
    drops: DropCount
    thread: threading.Thread

    @property
    def dropped(self) -> int:
        return self.drops.total

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Take the handler away, write what is queued, join the writer.

        Bounded in time, since the stream may be stalled for good (KM-35). Returns False if the
        writer was still stuck; it is a daemon thread, and ends with the process.
        """
        self.attached.detach()
        deadline = time.monotonic() + timeout_s
        try:
            self.records.put(None, timeout=timeout_s)
        except queue.Full:
            with contextlib.suppress(queue.Empty):
                self.records.get_nowait()
                self.drops.add()
            with contextlib.suppress(queue.Full):  # nobody else puts: the handler was taken away
                self.records.put_nowait(None)
        self.thread.join(max(0.0, deadline - time.monotonic()))
        return not self.thread.is_alive()


@attrs.frozen(kw_only=True, eq=False)
class DirectLogs:
    """Whoever logs also writes."""

    attached: Attached

    @property
    def dropped(self) -> int:
        return 0

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        del timeout_s
        self.attached.detach()
        return True


def start_logging(
    settings: LogSettings,
    stream: TextIO | None = None,
    *,
    own_process: bool = False,
    loggers: tuple[str, ...] = LOGGERS,
    queue_records: int = QUEUE_RECORDS,
) -> Logs:
    """Send the records of `loggers` to `stream` (default: stderr), by way of a bounded queue.

    Args:
        own_process: nobody else's program runs here; the root logger and Python's warnings are taken, too.
    """
    out = stream if stream is not None else sys.stderr
    formatter = JsonFormatter() if settings.format is LogFormat.JSON else logging.Formatter(TEXT_FORMAT)
    taken = (*loggers, *((ROOT,) if own_process else ()))
    if not settings.async_logging:
        direct = logging.StreamHandler(out)
        direct.setFormatter(formatter)
        return DirectLogs(attached=_attach(direct, taken, settings.level, warnings=own_process))
    records: queue.Queue[logging.LogRecord | None] = queue.Queue(queue_records)
    drops = DropCount()
    writer = Writer(records=records, drops=drops, formatter=formatter, stream=out)
    thread = threading.Thread(target=writer.run, name="ts-log", daemon=True)
    thread.start()
    attached = _attach(BoundedHandler(records, drops), taken, settings.level, warnings=own_process)
    return LogPipe(attached=attached, records=records, drops=drops, thread=thread)


def _attach(handler: logging.Handler, names: tuple[str, ...], level: str, *, warnings: bool) -> Attached:
    found = tuple(logging.getLogger(name) for name in names)
    before = tuple((logger, logger.level, logger.propagate) for logger in found)
    for logger in found:
        logger.addHandler(handler)
        if logger.name != "root":  # other people's records stay those that they were
            logger.setLevel(level.upper())
            logger.propagate = False
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
    if warnings:
        logging.captureWarnings(True)
    return Attached(handler=handler, before=before, warnings=warnings)


@attrs.frozen(kw_only=True, eq=False)
class Writer:
    """The thread ``ts-log``. Not a `logging.Handler`: the end of Python waits for the locks of handlers."""

    records: queue.Queue[logging.LogRecord | None]
    drops: DropCount
    formatter: logging.Formatter
    stream: TextIO

    def run(self) -> None:
        told = 0
        while (record := self.records.get()) is not None:
            self._put(record)
            lost = self.drops.total
            if lost > told:
                self._put(_notice(lost - told))
                told = lost

    def _put(self, record: logging.LogRecord) -> None:
        """A record that cannot be written, or has no text, is lost like one that found no place."""
        try:
            self.stream.write(self.formatter.format(record) + "\n")
            self.stream.flush()
        except Exception:
            self.drops.add()


def _notice(lost: int) -> logging.LogRecord:
    text = "%d log records were lost"
    return logging.LogRecord("tokenspeed.telemetry", logging.WARNING, __file__, 0, text, (lost,), None)
