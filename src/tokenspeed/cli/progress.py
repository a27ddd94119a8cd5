"""Progress of downloads, loading and warm-up: a bar on a terminal, lines elsewhere, JSON where the log is."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import TextIO

import attrs

from tokenspeed.settings.model import LogFormat

BAR_WIDTH = 28
REDRAW_S = 0.1
LINE_S = 5.0
"""Plain lines of one activity come no closer together than this."""


@attrs.define(eq=False)
class ProgressState:
    """Writer: the progress that owns it, under its lock.

    Attributes:
        what: the activity under way, "" between activities.
        shown_s: when it was last shown.
    """

    what: str = ""
    shown_s: float = 0.0
    width: int = 0
    lock: threading.Lock = attrs.field(factory=threading.Lock)


@attrs.frozen(kw_only=True, eq=False)
class BarProgress:
    """One line that is drawn over; a finished activity leaves its line behind. Any thread."""

    stream: TextIO
    now_s: Callable[[], float] = time.monotonic
    state: ProgressState = attrs.field(factory=ProgressState)

    def step(self, what: str, done: int, total: int) -> None:
        with self.state.lock:
            state, now_s = self.state, self.now_s()
            over = total > 0 and done >= total
            if what != state.what:
                self._end_line()
                state.what = what
            elif not over and now_s - state.shown_s < REDRAW_S:
                return
            state.shown_s = now_s
            line = _bar(what, done, total)
            padding = " " * max(0, state.width - len(line))
            self.stream.write(f"\r{line}{padding}")
            state.width = len(line)
            if over:
                self._end_line()
            self.stream.flush()

    def close(self) -> None:
        """Leave the cursor on a line of its own."""
        with self.state.lock:
            self._end_line()

    def _end_line(self) -> None:
        if self.state.what:
            self.stream.write("\n")
            self.state.what, self.state.width = "", 0


@attrs.frozen(kw_only=True, eq=False)
class LineProgress:
    """A line when an activity begins, every few seconds, and when it ends. Any thread.

    Attributes:
        form: the line for a text.
    """

    stream: TextIO
    form: Callable[[str], str] = str
    now_s: Callable[[], float] = time.monotonic
    state: ProgressState = attrs.field(factory=ProgressState)

    def step(self, what: str, done: int, total: int) -> None:
        with self.state.lock:
            state, now_s = self.state, self.now_s()
            over = total > 0 and done >= total
            if what == state.what and not over and now_s - state.shown_s < LINE_S:
                return
            state.what = "" if over else what
            state.shown_s = now_s
            self.stream.write(self.form(f"{what}: {_amount(done, total)}") + "\n")
            self.stream.flush()

    def close(self) -> None:
        return None


def progress_on(stream: TextIO, log_format: LogFormat = LogFormat.TEXT) -> BarProgress | LineProgress:
    """The kind that suits `stream`, and whoever reads a log on it."""
    if log_format is LogFormat.JSON:
        return LineProgress(stream=stream, form=_json_line)
    return BarProgress(stream=stream) if stream.isatty() else LineProgress(stream=stream)


def _json_line(text: str) -> str:
    """As the log's own lines begin."""
    line = {"ts": round(time.time(), 6), "level": "info", "logger": "tokenspeed.progress", "message": text}
    return json.dumps(line, ensure_ascii=False, separators=(",", ":"))


def _bar(what: str, done: int, total: int) -> str:
    if total <= 0:
        return f"{what}: {_amount(done, total)}"
    filled = min(BAR_WIDTH, BAR_WIDTH * done // total)
    return f"{what} [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {_amount(done, total)}"


def _amount(done: int, total: int) -> str:
    """Bytes from a megabyte on, else a count."""
    if max(done, total) >= 1 << 20:
        shown = [f"{value / (1 << 20):.1f}" for value in (done, total)]
        return f"{shown[0]} of {shown[1]} MiB" if total > 0 else f"{shown[0]} MiB"
    return f"{done} of {total}" if total > 0 else f"{done}"
