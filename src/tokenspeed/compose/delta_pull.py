"""The deltas of one stream, taken from another thread that may be interrupted while it waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import attrs

from tokenspeed.frontend.generation import ChoiceDelta


@attrs.define(eq=False)
class DeltaPull:
    """Coroutines for the loop that `deltas` run on. Writer: that loop.

    Attributes:
        waiting: the task that waits for the next delta. An interrupt (Ctrl-C) takes away the thread that asked,
            not the task; a generator cannot be closed while one runs in it.
    """

    deltas: AsyncGenerator[ChoiceDelta, None]
    waiting: asyncio.Task[object] | None = None

    async def next(self) -> ChoiceDelta | None:
        """The next delta; None at the end."""
        self.waiting = asyncio.current_task()
        try:
            return await anext(self.deltas, None)
        finally:
            self.waiting = None

    async def close(self) -> None:
        """End the request, if it still runs."""
        if self.waiting is not None:
            self.waiting.cancel()
            await asyncio.wait((self.waiting,))
        await self.deltas.aclose()
