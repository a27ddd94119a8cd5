"""Threads for tokenizing and templating, so that a large prompt does not hold up the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import attrs

from tokenspeed.errors import RequestError

T = TypeVar("T")

INLINE_CHARS = 4096
"""Work on fewer characters is done at once: it takes less than the way to a thread and back."""


@attrs.define(eq=False)
class WorkerState:
    """Writer: TextWorkers, on the loop. `pending` counts jobs handed to the pool and not finished."""

    pending: int = 0


@attrs.frozen(kw_only=True, eq=False)
class TextWorkers:
    """A small pool with a bounded queue. Close it to join the threads."""

    pool: ThreadPoolExecutor
    limit: int
    state: WorkerState = attrs.field(factory=WorkerState)

    async def run(self, chars: int, job: Callable[[], T]) -> T:
        """The result of `job`, which handles about `chars` characters.

        Raises: RequestError: 429, too many jobs are queued; and whatever `job` raises.
        """
        if chars <= INLINE_CHARS:
            return job()
        if self.state.pending >= self.limit:
            raise RequestError(f"{self.limit} large prompts are already being tokenized; retry later", status=429)
        loop = asyncio.get_running_loop()
        self.state.pending += 1
        future = self.pool.submit(job)
        # Counted until the thread is done with it, not until the caller stops waiting.
        future.add_done_callback(lambda _: self._finished(loop))
        try:
            return await asyncio.wrap_future(future)
        finally:
            # A failure's traceback has this frame: with the future in it, the whole request would be a cycle.
            del future

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)

    def _finished(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._done)

    def _done(self) -> None:
        self.state.pending -= 1


def text_workers(*, threads: int = 2, limit: int = 64) -> TextWorkers:
    return TextWorkers(pool=ThreadPoolExecutor(threads, thread_name_prefix="ts-text"), limit=limit)
