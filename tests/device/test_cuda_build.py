"""A whole device side over stand-ins for the CUDA driver: the host tier's path, layer marks, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import attrs
import numpy as np
import pytest
import torch
from cuda_stand_in import StandInCuda
from device_doubles import batch, granted, seat
from graph_stand_in import KERNELS, Fixed, Replays

from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.random_models import open_random_checkpoint
from tokenspeed.device.backends.cuda import open_cuda_backend
from tokenspeed.device.backends.cuda_layers import CudaLayersArrived
from tokenspeed.device.backends.cuda_parts import CudaModel, SamplerOnDevice, check_cuda
from tokenspeed.device.build import build_device_side
from tokenspeed.device.graphs import GraphedStep, capture_decodes
from tokenspeed.device.handle import StreamDeviceHandle, cache_ops_from_plan
from tokenspeed.device.kv.block_mover import DriverMover, MemoryMover, TierParts
from tokenspeed.device.machine import Machine
from tokenspeed.device.memory import GIB
from tokenspeed.device.parts import BoundModel, DeviceParts, LoadedWeights
from tokenspeed.device.weights.bind import bind_model
from tokenspeed.device.weights.load import Weights
from tokenspeed.errors import NotSupported, SettingsError
from tokenspeed.plane.plan import Dispatch, ExecutionPlan, GroupBlocks, LoadBackOp, WriteBackOp
from tokenspeed.plane.results import CacheAcks
from tokenspeed.settings.model import (
    CacheSettings,
    DeviceSettings,
    Executor,
    Forward,
    KvDtype,
    SchedulerSettings,
    Settings,
    WeightsMode,
)

MACHINE = Machine(available_bytes=GIB, memory_source="a test", cpus=1, cpu_source="a test")
SETTINGS = Settings(
    device=DeviceSettings(kv_pool_tokens=512, memory_gib=0.25, forward=Forward.TORCH),
    scheduler=SchedulerSettings(max_num_seqs=4, max_batched_tokens=64),
    cache=CacheSettings(host_gib=0.01, images=2),
)
CPU = torch.device("cpu")


@attrs.frozen(eq=False)
class Unmoved(CudaModel):
    """`CudaModel` whose graphs are stand-ins, which need a step with fixed places for its logits."""

    def bind(self, weights: LoadedWeights, *, num_pages: int, page_tokens: int) -> BoundModel:
        assert isinstance(weights, Weights)
        model = bind_model(weights, num_pages=num_pages, page_tokens=page_tokens, kernels=self.kernels)
        width = -(-self.longest // page_tokens)
        step = capture_decodes(Fixed(model.step), sizes=self.sizes, widths=(width,), device=CPU, capture=self.capture())
        return attrs.evolve(model, step=step)


def tiny(kind: str = "tiny-llama") -> object:
    return open_random_checkpoint(kind, served_name="tiny")


def cuda_like(api: StandInCuda, log: list[str]) -> DeviceParts:
    return DeviceParts(
        backend=partial(open_cuda_backend, api=api),
        model=Unmoved(device=CPU, kernels=KERNELS, capture=lambda: Replays(log), longest=128, sizes=(1, 2)),
        sampler=SamplerOnDevice(api=api, kernels=KERNELS),
        machine=MACHINE,
        tier=TierParts(counters=partial(CudaLayersArrived, api=api), mover=DriverMover(), pin=api.pin),
    )


@contextmanager
def built(given: DeviceParts) -> Iterator[StreamDeviceHandle]:
    made = build_device_side(SETTINGS, tiny(), given)
    try:
        yield made.handle
    finally:
        made.handle.close()


def through_the_tier(handle: StreamDeviceHandle) -> list[int]:
    """A prompt, decodes, its first page to the host and back to another place, and the prompt again over it."""
    prompt = [token % 200 for token in range(7, 7 + 19)]

    def execute(plan: ExecutionPlan, slot: int | None = None) -> list[int]:
        seats = () if slot is None else (seat(slot, prompt_len=len(prompt)),)
        return handle.execute(plan, Dispatch(seats=seats), cache_ops_from_plan(plan).device).result().tokens

    tokens = execute(ExecutionPlan(round_id=1, batch=batch((0, 0, prompt)), grants=granted((0, 0, 1), (0, 1, 2))), 0)
    for step in range(3):
        tokens += execute(ExecutionPlan(round_id=2 + step, batch=batch((0, 19 + step, [tokens[-1]]))))
    store = WriteBackOp(op_id=1, group=0, device_blocks=(1,), host_blocks=(4,), stream_ordered=True)
    execute(ExecutionPlan(round_id=8, cache=(store,), pages_to_zero=(GroupBlocks(blocks=(1,)),)))
    load = LoadBackOp(op_id=2, group=0, host_blocks=(4,), device_blocks=(5,))
    again = batch((1, 16, prompt[16:]))
    grants = granted((1, 0, 5), (1, 1, 6))
    tokens += execute(ExecutionPlan(round_id=9, batch=again, grants=grants, cache=(load,)), 1)
    assert tokens[4] == tokens[0]
    assert handle.poll_cache_results() == CacheAcks(write_backs=(1,), load_backs=(2,))
    return tokens


def wrapped(step: object) -> list[type]:
    """The classes of a step and of all that it wraps, outermost first."""
    found = []
    while step is not None:
        found.append(type(step))
        step = getattr(step, "inner", None) or getattr(getattr(step, "state", None), "step", None)
    return found


def test_prompts_decodes_and_the_host_tier_give_the_processors_tokens() -> None:
    api, log = StandInCuda(), []
    with built(DeviceParts(machine=MACHINE)) as cpu:
        wanted = through_the_tier(cpu)
    with built(cuda_like(api, log)) as handle:
        assert GraphedStep in wrapped(handle.executor.step)
        log.clear()
        assert through_the_tier(handle) == wanted
        assert log == ["replay"] * 3
    pinned = [call for call in api.calls if call[0] == "pin"]
    assert len(pinned) == 2
    assert all(size for _, size in pinned)
    assert api.calls[-1] == ("unpin", None)


@pytest.mark.contract("RA-36")
def test_a_layer_is_marked_on_the_load_stream_and_waited_for_on_the_other() -> None:
    api = StandInCuda()
    load, forward, arrived = api.stream(), api.stream(), CudaLayersArrived(api=api)
    for layers in (1, 2, 4):
        with api.on(load):
            arrived.raise_to(layers)
    with api.on(forward):
        for layer in (0, 1, 2, 3):
            arrived.wait_for(layer)
    assert load.log == [("record", 0), ("record", 1), ("record", 2)]
    assert forward.log == [("wait", 0), ("wait", 1), ("wait", 2), ("wait", 2)]


def test_a_load_that_failed_is_told_to_the_forward() -> None:
    arrived = CudaLayersArrived(api=StandInCuda())
    arrived.raise_to(1)
    arrived.fail(ValueError("a bad copy"))
    with pytest.raises(ValueError, match="a bad copy"):
        arrived.wait_for(5)


@pytest.mark.parametrize("layer", [None, 1])
def test_the_drivers_copies_move_the_bytes_that_plain_copies_move(layer: int | None) -> None:
    rng = np.random.default_rng(1)
    host, pool = rng.integers(0, 256, (9, 3, 16), dtype=np.uint8), rng.integers(0, 256, (7, 3, 16), dtype=np.uint8)
    results = []
    for mover in (MemoryMover(), DriverMover()):
        memory, blocks = host.copy(), torch.from_numpy(pool.copy())
        there, here = (memory, blocks) if layer is None else (memory[:, layer], blocks[:, layer])
        mover.to_host(there, (4, 5, 1), here, (2, 3, 6))
        mover.to_device(here, (0, 1), there, (7, 4))
        results.append((memory, blocks.numpy()))
    assert all(np.array_equal(*pair) for pair in zip(*results, strict=True))
    assert not np.array_equal(results[0][0], host)


def test_the_model_is_captured_for_its_sizes_with_tables_for_the_longest_request() -> None:
    log: list[str] = []
    model = CudaModel(device=CPU, kernels=KERNELS, capture=lambda: Replays(log), longest=100, sizes=(1, 2))
    bound = model.bind(model.load(tiny(), NoProgress()), num_pages=16, page_tokens=16)
    assert isinstance(bound.step, GraphedStep)
    assert log == ["capture", "capture"]
    assert bound.step.static.rows.block_tables.shape == (2, 7)


@pytest.mark.parametrize(
    ("device", "kind", "error", "text"),
    [
        (DeviceSettings(executor=Executor.FUTURES), "tiny-llama", SettingsError, "device.executor: futures is for"),
        (DeviceSettings(forward=Forward.NATIVE), "tiny-llama", SettingsError, "device.forward: native is for the cpu"),
        (DeviceSettings(kv_dtype=KvDtype.FLOAT16), "tiny-llama", SettingsError, "device.kv_dtype: float16"),
        (DeviceSettings(weights=WeightsMode.INT8G32), "tiny-llama", SettingsError, "device.weights: int8g32"),
        (DeviceSettings(), "tiny-hybrid", NotSupported, "device.backend: cuda has no kernel for the linear attention"),
    ],
)
def test_what_the_device_cannot_do_is_refused_by_its_key(
    device: DeviceSettings, kind: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        check_cuda(Settings(device=device), tiny(kind))
