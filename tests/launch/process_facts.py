"""What the operating system says of processes that a test started."""

from __future__ import annotations

import os
import select
from pathlib import Path


def pids(scratch: Path) -> dict[str, int]:
    """Process ids that the fakes wrote down, by name."""
    return {path.stem: int(path.read_text()) for path in scratch.glob("*.pid")}


def ended(pid: int, timeout_s: float) -> bool:
    """Whether the process has ended, or ends within the time; waits on the kernel, not on a clock."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(int(timeout_s * 1000)))
    finally:
        os.close(fd)


def all_gone(scratch: Path, timeout_s: float = 0.0) -> bool:
    """Whether no process that the fakes wrote down is left; there must have been one."""
    found = pids(scratch)
    return bool(found) and all(ended(pid, timeout_s) for pid in found.values())
