"""Which threads of a process wake although nobody gave them work: counted by the kernel."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import attrs

PROC = Path("/proc")


@attrs.frozen
class ThreadWakes:
    """Attributes: `wakes`, how often the thread gave up the processor by itself: each is a return from a wait."""

    pid: int
    tid: int
    name: str
    wakes: int


def threads_of(pid: int) -> Iterator[ThreadWakes]:
    for task in sorted((PROC / str(pid) / "task").iterdir(), key=lambda path: int(path.name)):
        status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        yield ThreadWakes(pid, int(task.name), status["Name"], int(status["voluntary_ctxt_switches"]))


def family_of(pid: int) -> list[int]:
    """The process and all that it started."""
    found = [pid]
    for task in (PROC / str(pid) / "task").iterdir():
        for child in (task / "children").read_text().split():
            found += family_of(int(child))
    return found


def wakes(pids: list[int], window_s: float, *, apart_from: frozenset[int] = frozenset()) -> list[ThreadWakes]:
    """Threads that woke within the window, with how often; the calling thread and `apart_from` left out."""
    ours = apart_from | {threading.get_native_id()}
    before = {thread.tid: thread.wakes for pid in pids for thread in threads_of(pid)}
    threading.Event().wait(window_s)  # a window is time, and nothing else
    after = [thread for pid in pids for thread in threads_of(pid) if thread.tid not in ours]
    grown = [attrs.evolve(thread, wakes=thread.wakes - before.get(thread.tid, 0)) for thread in after]
    return [thread for thread in grown if thread.wakes]


def named_here(found: list[ThreadWakes]) -> list[str]:
    """Their names in words, Python's where the thread is of this process."""
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    return [
        f"{python.get(t.tid, t.name) if t.pid == os.getpid() else t.name} (process {t.pid}): {t.wakes} times"
        for t in found
    ]
