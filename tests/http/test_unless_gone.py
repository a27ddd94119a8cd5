"""Work for a client ends with the client, and nothing else does."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive

from tokenspeed.frontend.http.api import unless_gone
from tokenspeed.frontend.http.errors import CallFailed, ClientGone

pytestmark = pytest.mark.anyio


def client(leaves: asyncio.Event) -> Receive:
    async def receive() -> Message:
        await leaves.wait()
        return {"type": "http.disconnect"}

    return receive


async def test_work_of_a_client_that_leaves_is_cancelled_and_has_cleaned_up_when_that_is_told() -> None:
    leaves, told = asyncio.Event(), list[str]()

    async def work() -> None:
        try:
            leaves.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            told.append("cleaned up")

    with pytest.raises(ClientGone):
        await unless_gone(client(leaves), work())
    assert told == ["cleaned up"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_client_that_leaves_as_its_work_ends_cancels_nothing_that_comes_after() -> None:
    for rounds in range(5):
        leaves = asyncio.Event()

        async def work(rounds: int = rounds, leaves: asyncio.Event = leaves) -> str:
            await asyncio.sleep(0)
            leaves.set()
            for _ in range(rounds % 2):
                await asyncio.sleep(0)
            return "done"

        assert await unless_gone(client(leaves), work()) == "done"
        for _ in range(4):
            await asyncio.sleep(0)


async def test_a_cancellation_from_outside_stays_one() -> None:
    task = asyncio.ensure_future(unless_gone(client(asyncio.Event()), asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_failure_of_the_work_is_told_as_the_calls() -> None:
    async def work() -> None:
        raise ValueError("no")

    with pytest.raises(CallFailed) as found:
        await unless_gone(client(asyncio.Event()), work())
    assert isinstance(found.value.why, ValueError)
