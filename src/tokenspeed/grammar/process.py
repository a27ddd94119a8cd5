"""Our end of the compiler's process: start, try one grammar within a time, kill."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Protocol

import attrs
import msgspec

from tokenspeed.grammar.backend import GrammarRefused
from tokenspeed.grammar.child import LENGTH, Begin, Job
from tokenspeed.grammar.limits import GrammarLimits
from tokenspeed.grammar.vocabulary import Vocabulary
from tokenspeed.plane.grammar import GrammarSource

COMMAND = (sys.executable, "-m", "tokenspeed.grammar.child")
START_S = 300.0
"""For the start of the process: it imports the library, on a machine that may be busy."""


class Trial(Protocol):
    """Tries grammars before they are compiled in the engine. One worker thread; `kill` is for any."""

    def start(self) -> None:
        """Begin to start, without waiting for it."""
        ...

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Wait until the next attempt would begin at once. Raises: GrammarRefused: it cannot."""
        ...

    def attempt(self, source: GrammarSource, vocabulary: Vocabulary) -> None:
        """Raises: GrammarRefused: it cannot be compiled, or not within the limits."""
        ...

    def kill(self) -> None:
        """End what it does; the next attempt starts anew."""
        ...

    def close(self) -> None:
        """End what it does; further attempts are refused."""
        ...


class Gone(Exception):
    """The process ended without an answer."""


@attrs.define(eq=False)
class ProcessState:
    """Writer: the worker thread, under `lock`."""

    process: subprocess.Popen[bytes] | None = None
    begun: bool = False
    closed: bool = False
    lock: threading.Lock = attrs.field(factory=threading.Lock)


@attrs.frozen(kw_only=True, eq=False)
class CompileProcess:
    """`Trial` in a process of its own, with a limit of time and of memory."""

    limits: GrammarLimits
    command: tuple[str, ...] = COMMAND
    state: ProcessState = attrs.field(factory=ProcessState)

    def start(self) -> None:
        with self.state.lock:
            if self.state.closed:
                return
            if self.state.process is None or self.state.process.poll() is not None:
                self._reap()
                self.state.process = subprocess.Popen(  # noqa: S603 - our own module
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
                self.state.begun = False

    def prepare(self, vocabulary: Vocabulary) -> None:
        self._told(vocabulary, None)

    def attempt(self, source: GrammarSource, vocabulary: Vocabulary) -> None:
        self._told(vocabulary, Job(kind=source.kind, text=source.text))

    def _told(self, vocabulary: Vocabulary, job: Job | None) -> None:
        """Begin, unless it has, and do `job`."""
        self.start()
        process = self.state.process
        if process is None:
            raise GrammarRefused("the compiler was closed")
        answer = ""
        try:
            if not self.state.begun:
                begin = Begin(
                    tokens=list(vocabulary.tokens),
                    stops=list(vocabulary.stops),
                    whitespace=self.limits.whitespace,
                    memory_bytes=self.limits.memory_bytes,
                )
                _ask(process, msgspec.msgpack.encode(begin), START_S)
                self.state.begun = True
            if job is not None:
                answer = _ask(process, msgspec.msgpack.encode(job), self.limits.compile_s)
        except TimeoutError:
            self.kill()
            what = f"it takes longer than {self.limits.compile_s:g} s (grammar.compile_s)"
            raise GrammarRefused(f"cannot be compiled: {what}") from None
        except (Gone, BrokenPipeError):
            self.kill()
            most = self.limits.memory_bytes >> 20
            what = f"its compiler ended, most likely for more than {most} MiB of memory (grammar.memory_mib)"
            raise GrammarRefused(f"cannot be compiled: {what}") from None
        if answer:
            raise GrammarRefused(answer)

    def kill(self) -> None:
        with self.state.lock:
            self._reap()

    def close(self) -> None:
        with self.state.lock:
            self.state.closed = True
            self._reap()

    def _reap(self) -> None:
        process, self.state.process = self.state.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # what was not written yet
                    stream.close()


def _ask(process: subprocess.Popen[bytes], body: bytes, timeout_s: float) -> str:
    """Send a message and wait for the answer.

    Raises: TimeoutError, Gone, BrokenPipeError.
    """
    if process.stdin is None or process.stdout is None:
        raise Gone
    until_s = time.monotonic() + timeout_s
    process.stdin.write(LENGTH.pack(len(body)) + body)
    process.stdin.flush()
    got = _read(process, LENGTH.size, until_s)
    (size,) = LENGTH.unpack(got)
    return _read(process, size, until_s).decode("utf-8", "replace")


def _read(process: subprocess.Popen[bytes], size: int, until_s: float) -> bytes:
    if process.stdout is None:
        raise Gone
    got, fd = b"", process.stdout.fileno()
    while len(got) < size:
        ready, _, _ = select.select([fd], [], [], max(0.0, until_s - time.monotonic()))
        if not ready:
            raise TimeoutError
        some = os.read(fd, size - len(got))
        if not some:
            raise Gone
        got += some
    return got
