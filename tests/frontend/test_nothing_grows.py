"""Long runs: no table of the frontend and no memory grows with the number of requests served."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import pytest
from frontend_rig import frontend
from scripted_engine import ScriptedEngine

from tokenspeed.frontend.generation import GenerationInput
from tokenspeed.plane.messages import SamplingParams, frozen_tokens

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ONE = GenerationInput(prompt_ids=frozen_tokens([1, 2, 3]), sampling=SamplingParams(max_new_tokens=1), stop=("zz",))


async def test_twenty_thousand_requests_need_no_more_memory_than_two_thousand() -> None:
    engine = ScriptedEngine()
    async with frontend(engine) as rig:

        async def serve(count: int) -> None:
            for _ in range(count // 20):
                tasks = [asyncio.create_task(rig.service.run(ONE)) for _ in range(20)]
                while not all(task.done() for task in tasks):
                    await asyncio.sleep(0)
                    engine.step()
                await asyncio.gather(*tasks)
                engine.received.clear()

        await serve(2000)
        gc.collect()
        tracemalloc.start()
        await serve(2000)
        gc.collect()
        first, _ = tracemalloc.get_traced_memory()
        await serve(18_000)
        gc.collect()
        second, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert second - first < 64 * 1024  # under 4 bytes a request
        assert rig.client.state.routes == {}
        assert not rig.client.state.incoming
        assert rig.service.gate.live == 0
