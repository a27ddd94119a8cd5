"""The host tier under the native forward: its pool's bytes, and the load that C waits on layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import attrs
import numpy as np
import pytest
import torch
from device_doubles import DECODE, TIMEOUT_S, batch, cpu_backend, granted, seat
from host_rig import SteppedStream, Watch
from native_rig import NUM_PAGES, checkpoint_of, native_model, prompt
from toy_rig import EXECUTORS, LoggedBackend, StreamLog

from tokenspeed.device.gc_hooks import AutomaticCollection
from tokenspeed.device.handle import StreamDeviceHandle
from tokenspeed.device.kv.host_build import counters_for, host_cache
from tokenspeed.device.kv.host_cache import HostCacheExecutor, LayerPlace, LoadWait
from tokenspeed.device.native.bind import NativeModelBound
from tokenspeed.device.native.ready import LayerCounter
from tokenspeed.device.on_stream import on_stream
from tokenspeed.device.profile import TraceProfiler
from tokenspeed.device.sampling.base import logprobs
from tokenspeed.device.sampling.sampler import batch_sampler
from tokenspeed.errors import DeviceLost
from tokenspeed.plane.plan import (
    Dispatch,
    ExecutionPlan,
    GroupBlocks,
    HostPages,
    LoadBackOp,
    RestoreOp,
    SnapshotOp,
    WriteBackOp,
)
from tokenspeed.plane.ports import Landing
from tokenspeed.plane.results import CacheAcks
from tokenspeed.plane.specs import CacheGroupSpec, DeviceSpecs

PAGE_TOKENS, LAYERS, SLOTS, HOST_PARENTS = 8, 2, 4, 9
A = prompt(27, seed=1)


@attrs.frozen(eq=False)
class NativeHostRig:
    backend: LoggedBackend
    bound: NativeModelBound
    tier: HostCacheExecutor
    handle: StreamDeviceHandle
    watch: Watch

    def submit(self, work: object = None, cache: tuple[object, ...] = (), **parts: object) -> Landing:
        """One plan; `cache` is what the adapter makes of the plan's operations."""
        seats = parts.pop("seats", ())
        landing = self.handle.execute(ExecutionPlan(round_id=1, batch=work, **parts), Dispatch(seats=seats), cache)
        landing.notify(self.watch)
        return landing

    def acked(self) -> CacheAcks:
        found: list[CacheAcks] = []

        def some() -> bool:
            found.append(self.handle.poll_cache_results())
            return bool(found[-1])

        self.watch.until(some)
        return found[-1]

    def layer_of(self, page: int, layer: int) -> np.ndarray:
        return on_stream(
            self.backend.inner.write_stream, lambda: self.bound.pool.layer_bytes(0)[page, layer].numpy().copy(), "read"
        )


@contextmanager
def native_host_rig(executor: str, *, kv_dtype: torch.dtype = torch.float32) -> Iterator[NativeHostRig]:
    with cpu_backend() as inner:
        log: list[tuple[str, str]] = []
        streams = {
            f"{name}_stream": SteppedStream(StreamLog(getattr(inner, f"{name}_stream"), log))
            for name in ("exec", "write", "load")
        }
        backend = LoggedBackend(inner=inner, log=log, **streams)
        opened = checkpoint_of("tiny-llama")

        def make() -> tuple[NativeModelBound, object, HostCacheExecutor]:
            bound = native_model(opened, page_tokens=PAGE_TOKENS, kv_dtype=kv_dtype)
            specs = specs_of(bound, opened.config.vocab_size)
            made = EXECUTORS[executor](
                backend=backend,
                step=bound.step,
                pool=bound.pool,
                sampler=batch_sampler(slots=SLOTS, vocab_size=specs.vocab_size),
                logprobs=logprobs,
                request_slots=SLOTS,
                max_model_len=specs.max_model_len,
                num_pages=specs.num_pages,
                groups=specs.groups,
            )
            tier = host_cache(
                backend=backend,
                pool=bound.pool,
                slots=made.slot_states,
                specs=specs,
                placement=tuple(LayerPlace(layer, 0, layer) for layer in range(LAYERS)),
                counters=counters_for(bound.step),
            )
            return bound, made, tier

        bound, made, tier = on_stream(inner.exec_stream, make, "make")
        handle = StreamDeviceHandle(
            backend=backend,
            executor=made,
            profiler=TraceProfiler(stream=backend.exec_stream),
            rounds=AutomaticCollection(),
            host_tier=tier,
        )
        try:
            yield NativeHostRig(backend, bound, tier, handle, Watch())
        finally:
            for stream in streams.values():
                stream.permits.release(1000)
            inner.close()
            made.close()


def specs_of(bound: NativeModelBound, vocab_size: int) -> DeviceSpecs:
    page_bytes = bound.pool.layer_bytes(0)[0].numel()
    return DeviceSpecs(
        backend="cpu",
        model_name="tiny",
        dtype="float32",
        vocab_size=vocab_size,
        max_model_len=64,
        num_pages=NUM_PAGES,
        page_tokens=PAGE_TOKENS,
        groups=(CacheGroupSpec(block_tokens=PAGE_TOKENS, layers=LAYERS, bytes_per_block=page_bytes),),
        host_parents=HOST_PARENTS,
        images=1,
        max_num_seqs=SLOTS,
        max_batched_tokens=64,
    )


def decode(rig: NativeHostRig, slot: int, start: int, count: int) -> list[int]:
    return [rig.submit(batch((slot, start + i, DECODE), table_rows=[0])).result().tokens[0] for i in range(count)]


def prefill(rig: NativeHostRig, slot: int = 0, first: int = 1) -> int:
    grants = granted(*((slot, index, first + index) for index in range(5)))
    landing = rig.submit(
        batch((slot, 0, A), table_rows=[0]), seats=(seat(slot, row=0, prompt_len=len(A)),), grants=grants
    )
    return landing.result().tokens[0]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """The prompt's continuation without any host tier at work."""
    with native_host_rig("streams") as rig:
        return [prefill(rig), *decode(rig, 0, len(A), 7)]


def evict(rig: NativeHostRig) -> None:
    """Three full pages of the prompt are in the host tier, and zero on the device."""
    prefill(rig)
    op = WriteBackOp(op_id=1, group=0, device_blocks=(1, 2, 3), host_blocks=(6, 4, 5), stream_ordered=True)
    rig.submit(cache=(op,), pages_to_zero=(GroupBlocks(blocks=(1, 2, 3, 4)),)).result()
    assert rig.acked() == CacheAcks(write_backs=(1,))
    assert not rig.layer_of(1, 0).any()


LOAD = LoadBackOp(op_id=2, group=0, host_blocks=(6, 4, 5), device_blocks=(11, 12, 13))


def again(rig: NativeHostRig) -> Landing:
    """The prompt, of which all but three tokens are loaded by the same plan."""
    return rig.submit(
        batch((1, 24, A[24:]), table_rows=[0]),
        seats=(seat(1, row=0, prompt_len=len(A)),),
        grants=granted(*((1, index, 11 + index) for index in range(5))),
        cache=(LOAD,),
    )


@pytest.mark.contract("CT-1", "RA-36")
@pytest.mark.parametrize("executor", ["streams", "futures"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16], ids=str)
def test_loaded_pages_give_the_tokens_of_computed_ones(executor: str, kv_dtype: torch.dtype) -> None:
    with native_host_rig(executor, kv_dtype=kv_dtype) as rig:
        computed = [prefill(rig), *decode(rig, 0, len(A), 3)]
    with native_host_rig(executor, kv_dtype=kv_dtype) as rig:
        assert rig.tier.load_wait is LoadWait.LAYERS
        assert isinstance(rig.tier.counters(), LayerCounter)
        evict(rig)
        loaded = [again(rig).result().tokens[0], *decode(rig, 1, len(A), 3)]
    assert loaded == computed


@pytest.mark.contract("RA-36")
def test_c_computes_the_first_layer_while_the_second_is_on_its_way(expected: list[int]) -> None:
    with native_host_rig("streams") as rig:
        evict(rig)
        load = rig.backend.load_stream
        load.stepped = True
        landing = again(rig)
        load.permits.release()
        # The forward writes its own tokens' keys of layer 0 before it waits for layer 1.
        wrote, looked = threading.Event(), 0
        while not wrote.wait(0.01):
            looked += 1
            assert looked < TIMEOUT_S * 100
            if rig.layer_of(14, 0).any():
                wrote.set()
        assert not rig.layer_of(14, 1).any()
        assert not landing.landed()
        load.permits.release()
        assert landing.result().tokens == expected[:1]


@pytest.mark.parametrize("executor", ["streams", "futures"])
def test_a_load_that_fails_under_a_waiting_c_forward_ends_it(executor: str) -> None:
    with native_host_rig(executor) as rig:
        evict(rig)
        load = rig.backend.load_stream
        load.stepped = True

        def fail() -> None:
            raise DeviceLost("planted in a copy")

        broken = attrs.evolve(rig.tier, blocks=FailsOnce(rig.tier.blocks, fail))
        handle = attrs.evolve(rig.handle, host_tier=broken)
        landing = again(attrs.evolve(rig, handle=handle, tier=broken))
        load.permits.release(LAYERS)
        with pytest.raises(DeviceLost, match="planted in a copy"):
            landing.result()


@attrs.frozen(eq=False)
class FailsOnce:
    """`BlockBytes` whose second look fails: layer 0 arrives, layer 1 does not."""

    inner: object
    fail: object
    looks: list[int] = attrs.field(factory=list)

    def layer_bytes(self, group: int) -> torch.Tensor:
        self.looks.append(group)
        if len(self.looks) == 2:
            self.fail()
        return self.inner.layer_bytes(group)


@pytest.mark.contract("CT-7", "RA-39", "RA-43")
@pytest.mark.parametrize("executor", ["streams", "futures"])
def test_a_restored_request_continues_with_the_same_tokens(executor: str, expected: list[int]) -> None:
    with native_host_rig(executor) as rig:
        tokens = [prefill(rig), *decode(rig, 0, len(A), 2)]
        written = len(A) + 2
        stores = (
            WriteBackOp(op_id=1, group=0, device_blocks=(1, 2, 3), host_blocks=(1, 2, 3), stream_ordered=True),
            SnapshotOp(op_id=2, slot=0, tail=(GroupBlocks(blocks=(4,)),), image=0),
        )
        other = partial(batch, (0, 0, prompt(20, seed=2)), table_rows=[1])
        rig.submit(
            other(),
            seats=(seat(0, row=1),),
            grants=granted(*((0, index, 1 + index) for index in range(3))),
            pages_to_zero=(GroupBlocks(blocks=(1, 2, 3, 4, 5)),),
            cache=stores,
        ).result()
        rig.watch.until(lambda: all(copy.event.query() for copy in rig.tier.open.state.copies))
        assert rig.handle.poll_cache_results() == CacheAcks(write_backs=(1,), snapshots=(2,))
        pages = HostPages(host_blocks=(1, 2, 3), device_blocks=(31, 32, 33))
        rig.submit(
            seats=(seat(3, row=0, prompt_len=len(A)),),
            grants=granted(*((3, index, 31 + index) for index in range(5))),
            cache=(RestoreOp(op_id=3, slot=3, pages=(pages,), tail=(GroupBlocks(blocks=(34,)),), image=0),),
        ).result()
        assert rig.acked() == CacheAcks(restores=(3,))
        tokens += decode(rig, 3, written, 5)
    assert tokens == expected
