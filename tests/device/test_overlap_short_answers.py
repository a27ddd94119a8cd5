"""Full batches of short answers on the simulated device's own clock: overlap never makes them slower."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import attrs
import pytest
from rig import SPECS, Rig, hand_rig, request
from sim_rig import HandDevice, hand_device

from tokenspeed.device.backends.simulated_model import SimulatedLogprobs, SimulatedModel, SimulatedSampler
from tokenspeed.device.backends.simulated_roofline import FixedStep
from tokenspeed.device.executors.futures.executor import futures_executor
from tokenspeed.device.executors.streams import stream_executor
from tokenspeed.device.gc_hooks import AutomaticCollection
from tokenspeed.device.handle import StreamDeviceHandle, cache_ops_from_plan
from tokenspeed.device.on_stream import on_stream
from tokenspeed.device.profile import TraceProfiler
from tokenspeed.plane.plan import Dispatch, ExecutionPlan
from tokenspeed.plane.ports import Landing, Ticket
from tokenspeed.plane.results import ForwardResult
from tokenspeed.testing import ScriptedPlane, hash_continuation

REQUESTS, SLOTS = 48, 8
T_S = 0.010
"""What a forward takes, whatever is in it."""
HOST_S = (0.0, 0.001, 0.004, 0.010, 0.030)
"""What the host does for each forward."""


@attrs.define(eq=False)
class ClockedPlane(ScriptedPlane):
    """A `DataPlane` on one thread: a dispatch costs `host_s`, a commit waits until the device is there."""

    device: HandDevice = None  # type: ignore[assignment]
    handle: StreamDeviceHandle = None  # type: ignore[assignment]
    host_s: float = 0.0
    flying: dict[int, tuple[Landing, float]] = attrs.field(factory=dict)

    def now_s(self) -> float:
        return self.device.clock.at_s - self.device.log.origin_s

    def execute(self, plan: ExecutionPlan, dispatch: Dispatch) -> Ticket:
        ticket = super().execute(plan, dispatch)
        self.device.advance(self.host_s)
        landing = self.handle.execute(plan, dispatch, cache_ops_from_plan(plan).device)
        self.flying[ticket] = landing, max(end for *_, end in self.device.log.jobs)
        return ticket

    def commit(self, ticket: Ticket) -> ForwardResult:
        landing, end_s = self.flying.pop(ticket)
        self.device.advance_to(max(end_s, self.now_s()))
        return landing.result()

    def release(self, rows: tuple[int, ...], slots: tuple[int, ...]) -> None:
        self.handle.release(rows, slots)


@contextmanager
def clocked(executor: str, *, overlap: bool, host_s: float) -> Iterator[Rig]:
    spare = SLOTS if overlap else 0
    specs = attrs.evolve(SPECS, max_num_seqs=SLOTS, spare_slots=spare, num_pages=257, max_batched_tokens=64)
    with hand_device() as device:
        model = SimulatedModel(
            work=device.work, time=FixedStep(T_S), weight_bytes=0, vocab_size=specs.vocab_size, seed=0, max_tokens=256
        )
        bound = model.bind(None, num_pages=specs.num_pages, page_tokens=specs.page_tokens)
        parts = {
            "backend": device.backend,
            "step": bound.step,
            "pool": bound.pool,
            "sampler": SimulatedSampler(),
            "logprobs": SimulatedLogprobs(vocab_size=specs.vocab_size),
            "request_slots": specs.request_slots,
            "max_model_len": specs.max_model_len,
            "num_pages": specs.num_pages,
            "groups": specs.groups,
        }

        @contextmanager
        def until_the_device_is_there(_why: str) -> Iterator[None]:
            device.advance_to_end()
            yield

        make = partial(futures_executor, host_sync=until_the_device_is_there)
        if executor == "streams":
            make = stream_executor
        handle = StreamDeviceHandle(
            backend=device.backend,
            executor=on_stream(device.backend.exec_stream, lambda: make(**parts), "make"),
            profiler=TraceProfiler(stream=device.backend.exec_stream),
            rounds=AutomaticCollection(),
        )
        plane = ClockedPlane(device=device, handle=handle, host_s=host_s)
        try:
            yield hand_rig(specs=specs, overlap=overlap, plane=plane)
        finally:
            handle.close()


def duration(executor: str, *, overlap: bool, host_s: float, lengths: list[int]) -> tuple[float, int]:
    """(seconds until all have ended, forwards), with more requests waiting than there are slots."""
    with clocked(executor, overlap=overlap, host_s=host_s) as rig:
        prompts = [[1 + i, 2, 3, 4] for i in range(len(lengths))]
        rig.put(*(request(f"r{i}", prompts[i], max_new=lengths[i]) for i in range(len(lengths))))
        rig.settle()
        for i, length in enumerate(lengths):
            assert rig.link.tokens(f"r{i}") == hash_continuation(prompts[i], length, vocab_size=1000)
        return rig.plane.now_s(), rig.plane.executed


@pytest.mark.contract("DO-5", "AF-8")
@pytest.mark.parametrize("length", [1, 2, 3, 4, 8, None], ids=lambda length: f"of-{length}" if length else "mixed")
@pytest.mark.parametrize("executor", ["streams", "futures"])
def test_a_full_batch_of_short_answers_takes_no_longer_with_overlap(executor: str, length: int | None) -> None:
    """What has reached its length is in no further forward, and another is there in its place at once: before its
    last result is known. So there are as many forwards as without overlap, and the host's work hides but once."""
    dice = random.Random(0)
    lengths = [length or dice.randint(2, 6) for _ in range(REQUESTS)]
    for host_s in HOST_S:
        without, forwards = duration(executor, overlap=False, host_s=host_s, lengths=lengths)
        with_overlap, with_forwards = duration(executor, overlap=True, host_s=host_s, lengths=lengths)
        assert without == pytest.approx(forwards * (T_S + host_s))
        assert with_forwards == forwards
        assert with_overlap == pytest.approx(forwards * max(T_S, host_s) + min(T_S, host_s))
