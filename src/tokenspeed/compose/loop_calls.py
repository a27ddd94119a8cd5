"""Coroutines on another thread's event loop, waited for by threads that may be interrupted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

import attrs

T = TypeVar("T")

ENDING_S = 5.0
"""How long an interrupted thread waits for its work's own end, at most: the loop may be closing meanwhile."""


@attrs.define(eq=False)
class LoopCall(Generic[T]):
    """One coroutine. Writer: the loop's thread.

    Attributes:
        over: it has ended, or never will begin.
    """

    work: Coroutine[Any, Any, T]
    task: asyncio.Task[Any] | None = None
    abandoned: bool = False
    over: threading.Event = attrs.field(factory=threading.Event)

    async def run(self) -> T:
        try:
            if self.abandoned:
                self.work.close()
                raise asyncio.CancelledError
            self.task = asyncio.current_task()
            return await self.work
        finally:
            self.over.set()

    def abandon(self) -> None:
        """Nobody waits any more: cancel it, or keep it from beginning."""
        self.abandoned = True
        if self.task is None:
            self.over.set()
        else:
            self.task.cancel()


def result_of(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises on `loop`, which another thread runs.

    An interrupt (Ctrl-C) of the waiting thread cancels the work, and is raised once that has cleaned up.
    """
    call = LoopCall(work=work)
    try:
        return asyncio.run_coroutine_threadsafe(call.run(), loop).result()
    except BaseException:
        # What the work raised comes when it is over. Anything else was meant for this thread.
        if not call.over.is_set() and not loop.is_closed():
            loop.call_soon_threadsafe(call.abandon)
            call.over.wait(ENDING_S)
        raise


__all__ = ["LoopCall", "result_of"]
