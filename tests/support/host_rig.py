"""The host tier over the real CPU streams, with a hash model of several layers whose KV is bytes in pages.

A token is a hash of what the context's pages hold in every layer, so that one layer of one block that
came late, early or from elsewhere changes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import numpy as np
import torch
from device_doubles import TIMEOUT_S, cpu_backend
from toy_rig import EXECUTORS, LoggedBackend, StreamLog, toy_logprobs

from tokenspeed.device.backends.base import DeviceEvent, DeviceStream, Job
from tokenspeed.device.gc_hooks import AutomaticCollection
from tokenspeed.device.handle import StreamDeviceHandle
from tokenspeed.device.handle import cache_ops_from_plan as adapt
from tokenspeed.device.kv.host_build import host_cache
from tokenspeed.device.kv.host_cache import HostCacheExecutor, LayerPlace, LoadWait
from tokenspeed.device.kv.host_fences import Fence
from tokenspeed.device.on_stream import on_stream
from tokenspeed.device.profile import TraceProfiler
from tokenspeed.device.step import AllReady, LayersReady, RaggedRows
from tokenspeed.device.stream_order import ordered
from tokenspeed.device.toy import NEVER_WRITTEN, ToySampler, hash_context
from tokenspeed.plane.plan import (
    BlockCopy,
    BlockGrants,
    CacheOp,
    Dispatch,
    ExecutionPlan,
    ForwardBatch,
    GroupBlocks,
    Seat,
)
from tokenspeed.plane.ports import Landing, Wakeup
from tokenspeed.plane.results import CacheAcks
from tokenspeed.plane.specs import CacheGroupSpec, DeviceSpecs

VOCAB, PAGES, PAGE_TOKENS, SLOTS, MAX_LEN, LAYERS = 97, 17, 4, 4, 32, 3
HOST_PARENTS, IMAGES = 9, 3

SPECS = DeviceSpecs(
    backend="cpu",
    model_name="layered",
    dtype="float32",
    vocab_size=VOCAB,
    max_model_len=MAX_LEN,
    num_pages=PAGES,
    page_tokens=PAGE_TOKENS,
    groups=(CacheGroupSpec(block_tokens=PAGE_TOKENS, layers=LAYERS, bytes_per_block=LAYERS * PAGE_TOKENS * 8),),
    host_parents=HOST_PARENTS,
    images=IMAGES,
    max_num_seqs=SLOTS,
    max_batched_tokens=64,
)


@attrs.define(eq=False)
class Watch:
    """What happened, in order; a `Wakeup`, too. A test waits here for a state instead of for a time."""

    notes: list[object] = attrs.field(factory=list)
    changed: threading.Condition = attrs.field(factory=threading.Condition)

    def note(self, what: object) -> None:
        with self.changed:
            self.notes.append(what)
            self.changed.notify_all()

    def set(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def wait(self, timeout_s: float | None) -> bool:
        raise NotImplementedError

    def until(self, reached: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(reached, TIMEOUT_S), f"it never came; until then: {self.notes}"


@attrs.frozen(eq=False)
class ParkedEvent:
    """An event that notes when a stream has come to it and waits."""

    inner: DeviceEvent
    fence: Fence
    watch: Watch

    def query(self) -> bool:
        return self.inner.query()

    def wait(self) -> None:
        self.watch.note(self.fence)
        self.inner.wait()

    def notify(self, wakeup: Wakeup) -> None:
        self.inner.notify(wakeup)

    @property
    def busy_s(self) -> float:
        return self.inner.busy_s


@attrs.frozen(eq=False)
class AskedReady:
    """A plan's readiness that notes what was asked of it."""

    inner: LayersReady
    fence: Fence
    watch: Watch

    def wait_for(self, layer: int) -> None:
        self.watch.note(self.fence)
        self.watch.note(("asked", layer))
        self.inner.wait_for(layer)


@attrs.frozen(eq=False)
class WatchedFences:
    """`Fences` that notes who waits where, and leaves one out if told to.

    `parked`: notes it of streams, too, when they come to the fence.
    """

    watch: Watch
    without: Fence | None = None
    parked: bool = True

    def wait(self, fence: Fence, stream: DeviceStream, event: DeviceEvent) -> None:
        if fence is not self.without:
            stream.wait(ParkedEvent(event, fence, self.watch) if self.parked else event)

    def layers(self, fence: Fence, ready: LayersReady) -> LayersReady:
        return AllReady() if fence is self.without else AskedReady(ready, fence, self.watch)


@attrs.frozen(eq=False)
class LayeredPool:
    """int64 ``[pages, layers, page_tokens]``; the KV of token t in layer l is ``t + 1000 * l``."""

    pages: torch.Tensor

    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        self.pages[[copy.destination for copy in copies]] = self.pages[[copy.source for copy in copies]]

    def zero_blocks(self, blocks: tuple[GroupBlocks, ...]) -> None:
        self.pages[[block for group in blocks for block in group.blocks]] = NEVER_WRITTEN

    def layer_bytes(self, group: int) -> torch.Tensor:
        assert group == 0
        return self.pages.view(torch.uint8)


@attrs.frozen(eq=False)
class LayeredStep:
    """Reads the context layer by layer, each when it is ready."""

    pool: LayeredPool
    watch: Watch
    num_layers: int = LAYERS

    def run(
        self, rows: RaggedRows, *, layers: range, ready: LayersReady, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert layers == range(self.num_layers)
        values = [17] * len(rows.token_ids)
        for layer in layers:
            ready.wait_for(layer)
            self._write(rows, layer)
            values = [value * 31 + seen for value, seen in zip(values, self._seen(rows, layer), strict=True)]
            self.watch.note(("computed", layer))
        logits = torch.zeros(len(rows.logit_tokens), VOCAB)
        for i, token in enumerate(rows.logit_tokens.tolist()):
            logits[i, values[token] % VOCAB] = 1.0
        return logits

    def _places(self, rows: RaggedRows, row: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.block_tables[row].long()[positions // PAGE_TOKENS], positions % PAGE_TOKENS

    def _write(self, rows: RaggedRows, layer: int) -> None:
        for row in range(len(rows.contexts)):
            first, end = int(rows.offsets[row]), int(rows.offsets[row + 1])
            blocks, at = self._places(rows, row, rows.positions[first:end])
            self.pool.pages[blocks, layer, at] = rows.token_ids[first:end] + 1000 * layer

    def _seen(self, rows: RaggedRows, layer: int) -> list[int]:
        """Of every token, the hash of what its context's pages hold in `layer`."""
        found = []
        for row in range(len(rows.contexts)):
            blocks, at = self._places(rows, row, torch.arange(int(rows.contexts[row])))
            context = self.pool.pages[blocks, layer, at].tolist()
            first, end = int(rows.offsets[row]), int(rows.offsets[row + 1])
            found += [hash_context(context[: int(p) + 1]) for p in rows.positions[first:end]]
        return found


def layered_token(context: list[int], layers: int = LAYERS) -> int:
    """What the model says after `context`, computed without pages."""
    value = 17
    for layer in range(layers):
        value = value * 31 + hash_context([token + 1000 * layer for token in context])
    return value % VOCAB


def layered_tokens(prompt: list[int], count: int) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(layered_token(context))
    return context[len(prompt) :]


@attrs.define(eq=False)
class SteppedStream:
    """A stream each of whose jobs needs a permit of the test, once `stepped` is set.

    `delay_s`: how long the next job waits before it begins, so that others overtake it.
    """

    inner: DeviceStream
    stepped: bool = False
    permits: threading.Semaphore = attrs.field(factory=lambda: threading.Semaphore(0))
    delay_s: Callable[[], float] | None = None
    never: threading.Event = attrs.field(factory=threading.Event)

    @property
    def name(self) -> str:
        return self.inner.name

    def submit(self, job: Job, label: str) -> DeviceEvent:
        if not self.stepped and self.delay_s is None:
            return self.inner.submit(job, label)

        def permitted() -> None:
            assert not self.stepped or self.permits.acquire(timeout=TIMEOUT_S)
            if self.delay_s is not None:
                self.never.wait(self.delay_s())
            job()

        return self.inner.submit(permitted, label)

    def wait(self, event: DeviceEvent) -> None:
        self.inner.wait(event)

    def hold(self) -> None:
        self.inner.hold()

    def release(self) -> None:
        self.inner.release()


@attrs.frozen(eq=False)
class HostRig:
    backend: LoggedBackend
    pool: LayeredPool
    handle: StreamDeviceHandle
    tier: HostCacheExecutor
    watch: Watch
    log: list[tuple[str, str]]

    def submit(
        self,
        batch: ForwardBatch | None = None,
        *,
        seats: tuple[Seat, ...] = (),
        grants: tuple[BlockGrants, ...] = (),
        cache: tuple[CacheOp, ...] = (),
        **streams: object,
    ) -> Landing:
        plan = ExecutionPlan(round_id=1, batch=batch, grants=grants, cache=cache, **streams)
        landing = self.handle.execute(plan, Dispatch(seats=seats), adapt(plan).device)
        landing.notify(self.watch)
        return landing

    def page(self, page: int) -> np.ndarray:
        """int64 ``[layers, page_tokens]``."""
        return on_stream(self.backend.inner.exec_stream, lambda: self.pool.pages[page].numpy().copy(), "read")

    def host(self, block: int) -> np.ndarray:
        return self.tier.buffers.blocks[0][block].reshape(-1).view(np.int64).reshape(LAYERS, PAGE_TOKENS).copy()

    def image(self, image: int, place: int) -> np.ndarray:
        block = self.tier.buffers.tails[0][image, place]
        return np.ascontiguousarray(block).reshape(-1).view(np.int64).reshape(LAYERS, PAGE_TOKENS)

    def acked(self, count: int) -> CacheAcks:
        """All acknowledgments until there are `count`."""
        found: dict[str, tuple[int, ...]] = {field.name: () for field in attrs.fields(CacheAcks)}

        def enough() -> bool:
            acks = self.handle.poll_cache_results()
            for name in found:
                found[name] += getattr(acks, name)
            return sum(map(len, found.values())) >= count

        self.watch.until(enough)
        return CacheAcks(**found)


def kv(tokens: list[int]) -> np.ndarray:
    """A block that holds these tokens, NEVER_WRITTEN behind them: int64 ``[layers, page_tokens]``."""
    block = np.full((LAYERS, PAGE_TOKENS), NEVER_WRITTEN, dtype=np.int64)
    for layer in range(LAYERS):
        block[layer, : len(tokens)] = np.array(tokens) + 1000 * layer
    return block


@contextmanager
def host_rig(
    *,
    executor: str = "streams",
    without: Fence | None = None,
    load_wait: LoadWait = LoadWait.LAYERS,
    specs: DeviceSpecs = SPECS,
    checked: bool = False,
) -> Iterator[HostRig]:
    """`checked`: by `device.stream_order`; then no test can wait for a stream to come to a fence."""
    with cpu_backend() as inner:
        log: list[tuple[str, str]] = []
        streams = {
            f"{name}_stream": SteppedStream(StreamLog(getattr(inner, f"{name}_stream"), log))
            for name in ("exec", "write", "load")
        }
        logged, watch = LoggedBackend(inner=inner, log=log, **streams), Watch()
        backend = ordered(logged) if checked else logged

        def make() -> tuple[LayeredPool, object, HostCacheExecutor]:
            pool = LayeredPool(torch.full((specs.num_pages, LAYERS, PAGE_TOKENS), NEVER_WRITTEN))
            made = EXECUTORS[executor](
                backend=backend,
                step=LayeredStep(pool, watch),
                pool=pool,
                sampler=ToySampler(),
                logprobs=toy_logprobs,
                request_slots=specs.request_slots,
                max_model_len=specs.max_model_len,
                num_pages=specs.num_pages,
                groups=specs.groups,
            )
            tier = host_cache(
                backend=backend,
                pool=pool,
                slots=made.slot_states,
                specs=specs,
                placement=tuple(LayerPlace(index, 0, index) for index in range(LAYERS)),
                load_wait=load_wait,
                fences=WatchedFences(watch, without, parked=not checked),
            )
            return pool, made, tier

        pool, made, tier = on_stream(backend.exec_stream, make, "make")
        handle = StreamDeviceHandle(
            backend=backend,
            executor=made,
            profiler=TraceProfiler(stream=backend.exec_stream),
            rounds=AutomaticCollection(),
            host_tier=tier,
        )
        try:
            yield HostRig(logged, pool, handle, tier, watch, log)
        finally:
            for stream in streams.values():
                stream.permits.release(1000)
            inner.close()  # the device first: it resolves what an executor's thread waits for
            made.close()
