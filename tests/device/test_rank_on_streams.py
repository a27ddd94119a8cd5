"""Event loop, scheduler, data plane, executor and CPU streams together, with the hash model at the bottom."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest
from device_doubles import CountingWakeup, cpu_backend
from rig import SPECS, Rig, hand_rig, request
from toy_rig import toy_logprobs

from tokenspeed.device.capture import Strict
from tokenspeed.device.data_plane import open_data_plane
from tokenspeed.device.executors.streams import StreamExecutor, stream_executor
from tokenspeed.device.gc_hooks import AutomaticCollection
from tokenspeed.device.handle import StreamDeviceHandle
from tokenspeed.device.on_stream import on_stream
from tokenspeed.device.profile import TraceProfiler
from tokenspeed.device.toy import ToyModel, ToySampler
from tokenspeed.plane.specs import DeviceSpecs
from tokenspeed.telemetry.meters import NullMeter
from tokenspeed.testing import hash_continuation


@contextmanager
def rank(specs: DeviceSpecs = SPECS, *, overlap: bool = True, **parts: object) -> Iterator[Rig]:
    with cpu_backend() as backend:
        model = ToyModel(vocab_size=specs.vocab_size)

        def make() -> StreamExecutor:
            bound = model.bind(None, num_pages=specs.num_pages, page_tokens=specs.page_tokens)
            return stream_executor(
                backend=backend,
                step=bound.step,
                pool=bound.pool,
                sampler=ToySampler(),
                logprobs=toy_logprobs,
                request_slots=specs.request_slots,
                max_model_len=specs.max_model_len,
                num_pages=specs.num_pages,
                groups=specs.groups,
            )

        handle = StreamDeviceHandle(
            backend=backend,
            executor=on_stream(backend.exec_stream, make, "make"),
            profiler=TraceProfiler(stream=backend.exec_stream),
            rounds=AutomaticCollection(),
        )
        plane = open_data_plane(handle, CountingWakeup(), check=Strict())
        try:
            yield hand_rig(specs=specs, overlap=overlap, plane=plane, **parts)
        finally:
            plane.close()


@attrs.frozen(eq=False)
class CountingMeter(NullMeter):
    """Counts retractions in `retracted`."""

    retracted: Counter[str] = attrs.field(factory=Counter)

    def preempted(self, count: int) -> None:
        self.retracted["requests"] += count

    def finished(self, **_: object) -> None:
        return None

    def reported(self, load: object) -> None:
        return None


@pytest.mark.contract("DO-1", "DO-5", "DP-1", "DP-49")
@pytest.mark.parametrize("overlap", [False, True], ids=["depth-0", "depth-1"])
@pytest.mark.parametrize("pages", [65, 20], ids=["roomy", "tight"])
def test_random_requests_get_the_models_tokens_at_every_depth_and_under_pressure(overlap: bool, pages: int) -> None:
    draw = random.Random(pages)
    system = [draw.randrange(1000) for _ in range(40)]
    prompts = {
        f"r{i}": system * draw.randint(0, 1) + [draw.randrange(1000) for _ in range(draw.randint(1, 60))]
        for i in range(24)
    }
    lengths = {rid: draw.randint(1, 40) for rid in prompts}
    waiting = list(prompts)
    meter = CountingMeter()
    with rank(attrs.evolve(SPECS, num_pages=pages), overlap=overlap, meter=meter) as rig:
        while waiting:
            arriving = [waiting.pop() for _ in range(min(len(waiting), draw.randint(0, 3)))]
            rig.put(*(request(rid, prompts[rid], max_new=lengths[rid]) for rid in arriving))
            rig.rounds(draw.randint(1, 4))
        rig.settle()
        outputs = {rid: rig.link.tokens(rid) for rid in prompts}
    assert outputs == {
        rid: hash_continuation(prompt, lengths[rid], vocab_size=SPECS.vocab_size) for rid, prompt in prompts.items()
    }
    assert (meter.retracted["requests"] > 0) == (pages == 20)  # the tight pool retracts, the roomy one does not


@pytest.mark.contract("OL-4", "OL-5")
@pytest.mark.parametrize("overlap", [False, True], ids=["depth-0", "depth-1"])
def test_logprobs_of_a_chunked_prompt_reach_the_client_complete_and_in_order(overlap: bool) -> None:
    prompt = [(37 * i) % 1000 for i in range(100)]
    with rank(overlap=overlap) as rig:
        rig.put(request("a", prompt, max_new=3, return_logprob=True, top_logprobs=2, prompt_logprobs=0))
        rig.put(request("b", prompt[:7], max_new=3))
        rig.settle()
        mine = [(batch, batch.rids.index("a")) for batch in rig.link.sent if "a" in batch.rids]
        prompt_values = [value for batch, at in mine for value in batch.prompt_logprobs[at]]
        values = [value for batch, at in mine for value in batch.logprobs[at]]
        tops = [top for batch, at in mine for top in batch.top_logprobs[at]]
        others = [
            value for batch in rig.link.sent if "b" in batch.rids for value in batch.logprobs[batch.rids.index("b")]
        ]
    assert len(prompt_values) == 100
    assert prompt_values[0] is None
    assert all(value < 0.0 for value in prompt_values[1:])
    assert len(values) == 3
    # Greedy: the token drawn is the likeliest alternative.
    assert [top.values[0] for top in tops] == pytest.approx(values)
    assert others == []
