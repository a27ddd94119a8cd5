"""Logging through a bounded queue: nothing the stream does may hold up a caller."""

from __future__ import annotations

import io
import json
import logging
import threading

import pytest

from tokenspeed.settings.model import LogFormat, LogSettings
from tokenspeed.telemetry.logs import start_logging


class StuckStream(io.StringIO):
    """Every write waits until released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.release = threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.release.wait(10)
        return super().write(text)


def test_records_are_written_by_the_writer_thread_in_order() -> None:
    out = io.StringIO()
    pipe = start_logging(LogSettings(), out, loggers=("test.logs.order",))
    log = logging.getLogger("test.logs.order.child")
    for number in range(3):
        log.info("line %d", number)
    log.debug("below the level")
    assert pipe.close()
    lines = out.getvalue().splitlines()
    assert [line.rsplit(": ", 1)[1] for line in lines] == ["line 0", "line 1", "line 2"]
    assert all("test.logs.order.child" in line for line in lines)


def test_json_lines_are_objects_with_the_exception_and_no_raw_newline() -> None:
    out = io.StringIO()
    pipe = start_logging(LogSettings(format=LogFormat.JSON), out, loggers=("test.logs.json",))
    log = logging.getLogger("test.logs.json")
    log.error("two\nlines", exc_info=ValueError("boom\n\ud800"))
    pipe.close()
    (line,) = out.getvalue().splitlines()
    record = json.loads(line)
    assert record["level"] == "error"
    assert record["message"] == "two\nlines"
    assert "ValueError: boom" in record["exception"]


@pytest.mark.contract("KM-31", "KM-32", "KM-35")
def test_a_stalled_stream_loses_records_counts_them_and_never_holds_up_the_caller() -> None:
    out = StuckStream()
    pipe = start_logging(LogSettings(), out, loggers=("test.logs.stuck",), queue_records=4)
    log = logging.getLogger("test.logs.stuck")
    log.info("first")
    assert out.entered.wait(10)
    for _ in range(10):
        log.info("more")
    assert pipe.dropped == 6
    assert pipe.close(timeout_s=0.05) is False
    out.release.set()
    pipe.thread.join(10)
    assert not pipe.thread.is_alive()


def test_the_writer_says_how_many_records_were_lost() -> None:
    out = StuckStream()
    pipe = start_logging(LogSettings(), out, loggers=("test.logs.lost",), queue_records=2)
    log = logging.getLogger("test.logs.lost")
    log.info("first")
    assert out.entered.wait(10)
    for _ in range(5):
        log.info("more")
    out.release.set()
    assert pipe.close()
    assert "3 log records were lost" in out.getvalue()


def test_closing_leaves_the_loggers_as_they_were() -> None:
    log = logging.getLogger("test.logs.restore")
    log.setLevel(logging.ERROR)
    before = (log.level, log.propagate, list(log.handlers))
    pipe = start_logging(LogSettings(level="debug"), io.StringIO(), loggers=("test.logs.restore",))
    assert log.level == logging.DEBUG
    pipe.close()
    assert (log.level, log.propagate, list(log.handlers)) == before
    assert not pipe.thread.is_alive()
