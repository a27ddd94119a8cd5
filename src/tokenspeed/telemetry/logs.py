"""Logging that never makes its caller wait: records pass a bounded queue to one writer thread.

A record that finds the queue full is counted and lost (KM-32); the writer says how many were.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import queue
import sys
import threading
import time
from typing import TextIO

import attrs
import msgspec

from tokenspeed.settings.model import LogFormat, LogSettings

QUEUE_RECORDS = 4096
TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
LOGGERS = ("tokenspeed", "uvicorn")
"""Whose records the pipe takes: ours and our HTTP server's; a host program's loggers are left alone."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts (seconds since the epoch), level, logger, message, and exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _encodable(record.getMessage()),
        }
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
            record.msg = record.getMessage()
            record.args = None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._drops.add()


@attrs.frozen(kw_only=True, eq=False)
class LogPipe:
    """Owns the writer thread and the places the handler was put at; close it before the process ends."""

    handler: BoundedHandler
    records: queue.Queue[logging.LogRecord | None]
    drops: DropCount
    thread: threading.Thread
    before: tuple[tuple[logging.Logger, int, bool], ...]

    @property
    def dropped(self) -> int:
        return self.drops.total

    def close(self, timeout_s: float = 2.0) -> bool:
        """Take the handler away, write what is queued, join the writer.

        Bounded in time, since the stream may be stalled for good (KM-35). Returns False if the
        writer was still stuck; it is a daemon thread, and ends with the process.
        """
        for logger, level, propagate in self.before:
            logger.removeHandler(self.handler)
            logger.setLevel(level)
            logger.propagate = propagate
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


def start_logging(
    settings: LogSettings,
    stream: TextIO | None = None,
    *,
    loggers: tuple[str, ...] = LOGGERS,
    queue_records: int = QUEUE_RECORDS,
) -> LogPipe:
    """Send the records of `loggers` through a bounded queue to `stream` (default: stderr)."""
    records: queue.Queue[logging.LogRecord | None] = queue.Queue(queue_records)
    drops = DropCount()
    handler = BoundedHandler(records, drops)
    out = logging.StreamHandler(stream if stream is not None else sys.stderr)
    out.setFormatter(JsonFormatter() if settings.format is LogFormat.JSON else logging.Formatter(TEXT_FORMAT))
    thread = threading.Thread(target=_write, args=(records, drops, out), name="ts-log", daemon=True)
    thread.start()
    found = tuple(logging.getLogger(name) for name in loggers)
    before = tuple((logger, logger.level, logger.propagate) for logger in found)
    for logger in found:
        logger.addHandler(handler)
        logger.setLevel(settings.level.upper())
        logger.propagate = False
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
    return LogPipe(handler=handler, records=records, drops=drops, thread=thread, before=before)


def _write(
    records: queue.Queue[logging.LogRecord | None], drops: DropCount, out: logging.StreamHandler[TextIO]
) -> None:
    told = 0
    while (record := records.get()) is not None:
        out.handle(record)
        lost = drops.total
        if lost > told:
            notice = logging.LogRecord(
                "tokenspeed.telemetry", logging.WARNING, __file__, 0, "%d log records were lost", (lost - told,), None
            )
            out.handle(notice)
            told = lost
