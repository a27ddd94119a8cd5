"""The real executor and handle over the real CPU backend, with the hash model: stepped plan by plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import torch
from device_doubles import cpu_backend

from tokenspeed.device.backends.base import DeviceEvent, Job
from tokenspeed.device.backends.cpu import CpuBackend
from tokenspeed.device.executors.futures.executor import futures_executor
from tokenspeed.device.executors.streams import stream_executor
from tokenspeed.device.gc_hooks import AutomaticCollection, RoundCounter
from tokenspeed.device.handle import (
    CacheOps,
    Executor,
    HostTier,
    NoHostTier,
    NoRemotePeer,
    RemotePeer,
    StreamDeviceHandle,
)
from tokenspeed.device.handle import cache_ops_from_plan as adapt
from tokenspeed.device.on_stream import on_stream
from tokenspeed.device.profile import TraceProfiler
from tokenspeed.device.toy import ToyBound, ToyModel, ToySampler
from tokenspeed.plane.plan import BlockGrants, Dispatch, ExecutionPlan, ForwardBatch, LogprobPlan, Seat
from tokenspeed.plane.ports import Landing
from tokenspeed.plane.specs import CacheGroupSpec

EXECUTORS = {"streams": stream_executor, "futures": futures_executor}
VOCAB, PAGES, PAGE_TOKENS, SLOTS, MAX_LEN = 97, 33, 8, 4, 64


def toy_logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> tuple[torch.Tensor, ...]:
    logs = torch.log_softmax(logits.double(), dim=1)
    best = logs.topk(top, dim=1)
    return logs.gather(1, tokens[:, None])[:, 0], best.indices, best.values


@attrs.define(eq=False)
class StreamLog:
    """A stream in front of a real one; notes (stream, label) of every submission and wait."""

    inner: object
    log: list[tuple[str, str]]

    @property
    def name(self) -> str:
        return self.inner.name

    def submit(self, job: Job, label: str) -> DeviceEvent:
        self.log.append((self.name, label))
        return self.inner.submit(job, label)

    def wait(self, event: DeviceEvent) -> None:
        self.log.append((self.name, "wait"))
        self.inner.wait(event)

    def hold(self) -> None:
        self.inner.hold()

    def release(self) -> None:
        self.inner.release()


@attrs.frozen(eq=False)
class LoggedBackend:
    """A CPU backend whose streams note their submissions in one log."""

    inner: CpuBackend
    log: list[tuple[str, str]]
    exec_stream: StreamLog
    write_stream: StreamLog
    load_stream: StreamLog
    name: str = "cpu"

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> object:
        return self.inner.allocate(shape, dtype)

    def to_device(self, array: object) -> torch.Tensor:
        return self.inner.to_device(array)

    def to_host(self, tensor: torch.Tensor) -> object:
        return self.inner.to_host(tensor)

    def close(self) -> None:
        self.inner.close()


@attrs.frozen(eq=False)
class ToyRig:
    """Attributes: `log` of (stream, label); `sampler.log` of what the sampler was told."""

    backend: LoggedBackend
    bound: ToyBound
    sampler: ToySampler
    executor: Executor
    handle: StreamDeviceHandle
    log: list[tuple[str, str]]

    def submit(
        self,
        batch: ForwardBatch | None = None,
        *,
        seats: tuple[Seat, ...] = (),
        grants: tuple[BlockGrants, ...] = (),
        logprobs: LogprobPlan | None = None,
        cache_ops: CacheOps | None = None,
        **streams: object,
    ) -> Landing:
        plan = ExecutionPlan(round_id=1, batch=batch, grants=grants, **streams)
        ops = cache_ops or adapt(plan)
        return self.handle.execute(plan, Dispatch(seats=seats, logprobs=logprobs or LogprobPlan()), ops.device)

    def hold(self) -> None:
        self.backend.exec_stream.hold()

    def release(self) -> None:
        self.backend.exec_stream.release()

    def page(self, page: int) -> list[int]:
        return on_stream(self.backend.inner.exec_stream, self.bound.pool.pages[page].tolist, "read")

    @property
    def labels(self) -> list[str]:
        return [label for _, label in self.log]


@contextmanager
def toy_rig(
    *,
    nan_after: frozenset[int] = frozenset(),
    host_tier: HostTier | None = None,
    peer: RemotePeer | None = None,
    rounds: RoundCounter | None = None,
    executor: str = "streams",
) -> Iterator[ToyRig]:
    with cpu_backend() as inner:
        log: list[tuple[str, str]] = []
        streams = {
            f"{name}_stream": StreamLog(getattr(inner, f"{name}_stream"), log) for name in ("exec", "write", "load")
        }
        backend, sampler = LoggedBackend(inner=inner, log=log, **streams), ToySampler()
        model = ToyModel(vocab_size=VOCAB, nan_after=nan_after)

        def make() -> tuple[ToyBound, Executor]:
            bound = model.bind(None, num_pages=PAGES, page_tokens=PAGE_TOKENS)
            return bound, EXECUTORS[executor](
                backend=backend,
                step=bound.step,
                pool=bound.pool,
                sampler=sampler,
                logprobs=toy_logprobs,
                request_slots=SLOTS,
                max_model_len=MAX_LEN,
                num_pages=PAGES,
                groups=(CacheGroupSpec(block_tokens=PAGE_TOKENS),),
            )

        bound, made = on_stream(inner.exec_stream, make, "make")
        handle = StreamDeviceHandle(
            backend=backend,
            executor=made,
            profiler=TraceProfiler(stream=backend.exec_stream),
            rounds=rounds or AutomaticCollection(),
            host_tier=host_tier or NoHostTier(),
            peer=peer or NoRemotePeer(),
        )
        try:
            yield ToyRig(backend=backend, bound=bound, sampler=sampler, executor=made, handle=handle, log=log)
        finally:
            inner.close()  # the device first: it resolves what an executor's thread waits for
            made.close()
