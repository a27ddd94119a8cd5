"""Names of threads as the operating system shows them: in ``top -H``, profilers and ``/proc``."""

from __future__ import annotations

import threading
from pathlib import Path

TASKS = Path("/proc/self/task")
LONGEST = 15
"""Bytes of a name that Linux keeps."""


def tell_thread_names(tasks: Path = TASKS) -> None:
    """Give the process's threads, but the main one, the names that Python knows them by; once, when all have started.

    Does nothing where the system has no such files.
    """
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.native_id is not None:
            try:
                (tasks / str(thread.native_id) / "comm").write_bytes(thread.name.encode()[:LONGEST])
            except OSError:
                continue  # it has ended, or there is no such file system: a name is a convenience
