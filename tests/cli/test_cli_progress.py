"""Progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import json

import attrs

from tokenspeed.checkpoint.progress import Progress
from tokenspeed.cli.progress import BarProgress, LineProgress, progress_on
from tokenspeed.settings.model import LogFormat


@attrs.define(eq=False)
class HandTime:
    at_s: float = 0.0

    def __call__(self) -> float:
        return self.at_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_a_file_gets_lines() -> None:
    assert isinstance(progress_on(Terminal()), BarProgress)
    assert isinstance(progress_on(io.StringIO()), LineProgress)
    watched: Progress = progress_on(io.StringIO())
    watched.step("load", 1, 1)


def test_where_the_log_is_json_progress_is_json_too_on_a_terminal_as_well() -> None:
    for stream in (io.StringIO(), Terminal()):
        progress = progress_on(stream, LogFormat.JSON)
        progress.step("weights", 1, 2)
        progress.step("weights", 2, 2)
        progress.close()
        lines = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert [line["message"] for line in lines] == ["weights: 1 of 2", "weights: 2 of 2"]
        assert all({"ts", "level", "logger"} < set(line) for line in lines)


def test_lines_come_at_the_start_every_few_seconds_and_at_the_end() -> None:
    stream, now = io.StringIO(), HandTime()
    progress = LineProgress(stream=stream, now_s=now)
    for done in range(101):
        now.at_s += 0.125
        progress.step("download", done << 20, 100 << 20)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "download: 0.0 of 100.0 MiB"
    assert lines[-1] == "download: 100.0 of 100.0 MiB"
    assert len(lines) == 4


def test_a_bar_is_drawn_over_and_left_behind_when_full() -> None:
    stream, now = Terminal(), HandTime()
    progress = BarProgress(stream=stream, now_s=now)
    progress.step("load", 0, 10)
    progress.step("load", 1, 10)  # too soon to redraw
    now.at_s = 1.0
    progress.step("load", 5, 10)
    progress.step("load", 10, 10)
    progress.step("warm-up", 0, 0)
    progress.close()
    text = stream.getvalue()
    assert text.count("\r") == 4
    assert "load [" + "#" * 14 + "." * 14 + "] 5 of 10" in text
    assert "#" * 28 + "] 10 of 10\n" in text
    assert text.endswith("warm-up: 0\n")
    assert "1 of 10" not in text.replace("10 of 10", "")


def test_a_shorter_line_erases_the_longer_one_before_it() -> None:
    stream, now = Terminal(), HandTime()
    progress = BarProgress(stream=stream, now_s=now)
    progress.step("x", 1234567, 0)
    now.at_s = 1.0
    progress.step("x", 5, 0)
    last = stream.getvalue().split("\r")[-1]
    assert len(last) == len("x: 1.2 MiB")
