"""Keeps a folder of pages under its size: what was used longest ago goes first.

One thread of each engine looks through the folder, after it started and whenever the engine has written a
sixteenth of the limit since; so several engines exceed it by that much each, at most. A lock on a file lets
one of them look at a time. It also deletes what was cleared, and what killed processes left half written.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

log = logging.getLogger(__name__)

TEMPORARY, TRASH, LOCK = ".writing-", ".trash-", ".lock"
LEFT_BEHIND_S = 600.0
"""A temporary file of this age has no writer any more."""

KEPT = 0.9
"""Share of the limit that is left when room is made."""

JOIN_S = 5.0


@attrs.define(eq=False)
class LimitState:
    """Writers: workers, and the thread; under the condition."""

    written: int = 0
    due: bool = True
    closing: bool = False
    thread: threading.Thread | None = None


@attrs.frozen(kw_only=True, eq=False)
class SizeLimit:
    """`max_bytes`: of all pages in `folder`, whoever wrote them."""

    folder: Path
    max_bytes: int
    woken: threading.Condition = attrs.field(factory=threading.Condition)
    state: LimitState = attrs.field(factory=LimitState)

    def start(self) -> None:
        self.state.thread = thread = threading.Thread(target=self._run, name="ts-l3-room", daemon=True)
        thread.start()

    def wrote(self, nbytes: int, *, trash: bool = False) -> None:
        with self.woken:
            self.state.written += nbytes
            if trash or self.state.written * 16 > self.max_bytes:
                self.state.due = True
                self.woken.notify()

    def close(self) -> None:
        with self.woken:
            self.state.closing = True
            self.woken.notify()
        if self.state.thread is not None:
            self.state.thread.join(JOIN_S)

    def make_room(self) -> int:
        """Look through the folder once; returns the bytes that are left. Another engine may be at it: 0 then."""
        with self._alone() as alone:
            if not alone:
                return 0
            files = list(self._pages())
            total = sum(size for _, size, _ in files)
            if total <= self.max_bytes:
                return total
            heapq.heapify(files)
            begin = total
            while files and total > self.max_bytes * KEPT and not self.state.closing:
                _, size, path = heapq.heappop(files)
                with contextlib.suppress(OSError):
                    os.unlink(path)
                total -= size
            log.info("storage: %d MiB of pages made room in %s", (begin - total) >> 20, self.folder)
            return total

    def _run(self) -> None:
        while True:
            with self.woken:
                self.woken.wait_for(lambda: self.state.due or self.state.closing)
                if self.state.closing:
                    return
                self.state.due, self.state.written = False, 0
            try:
                self.make_room()
            except OSError as fault:
                log.warning("storage: the size of %s cannot be kept: %s", self.folder, fault)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        with open(self.folder / LOCK, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True  # closing the file lets the lock go, and so does the end of the process

    def _pages(self) -> Iterator[tuple[float, int, str]]:
        """(last use, size, path) of every page; deletes what is none."""
        for namespace in self._entries(str(self.folder)):
            if namespace.name.startswith(TRASH):
                shutil.rmtree(namespace.path, ignore_errors=True)
            elif namespace.is_dir(follow_symlinks=False):
                for folder in self._entries(namespace.path):
                    yield from self._in_folder(folder)

    def _in_folder(self, folder: os.DirEntry[str]) -> Iterator[tuple[float, int, str]]:
        for file in self._entries(folder.path):
            if self.state.closing:
                return
            try:
                facts = file.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if not file.name.startswith(TEMPORARY):
                yield facts.st_mtime, facts.st_size, file.path
            elif time.time() - facts.st_mtime > LEFT_BEHIND_S:
                with contextlib.suppress(OSError):
                    os.unlink(file.path)

    def _entries(self, path: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(path) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
