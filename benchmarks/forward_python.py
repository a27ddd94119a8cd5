"""What a decode step costs in Python on the device side, the model's own work left out.

A model that computes nothing answers at once, so that what remains is ours: on the forward thread what
a plan becomes (`forward`), on the exec stream's thread what surrounds model and sampling (`job`), and
what makes the result of the host copies (`result`). Processor time of the thread, medians over
steps; nothing runs beside it. The forward thread should not need more than 300 us at batch 32.

    python benchmarks/forward_python.py [--batch 32] [--context 256] [--steps 600] [--json] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import attrs
import numpy as np
import torch

from tokenspeed.device.backends.base import DeviceEvent, HostArray, HostCopy, Job
from tokenspeed.device.backends.host_stream import HostEvent
from tokenspeed.device.executors.futures.executor import futures_executor
from tokenspeed.device.executors.futures.output import AsyncModelRunnerOutput
from tokenspeed.device.executors.streams import stream_executor
from tokenspeed.device.gc_hooks import AutomaticCollection
from tokenspeed.device.handle import Executor, StreamDeviceHandle, cache_ops_from_plan
from tokenspeed.device.host_sync import host_to_device
from tokenspeed.device.profile import TraceProfiler
from tokenspeed.device.sampling.base import SampledTokens
from tokenspeed.device.sampling.base import logprobs as log_softmax
from tokenspeed.device.step import LayersReady, RaggedRows
from tokenspeed.plane.plan import (
    FROM_DEVICE,
    BlockCopy,
    BlockGrants,
    Dispatch,
    ExecutionPlan,
    ForwardBatch,
    GroupBlocks,
    Sampling,
    Seat,
    int32,
)
from tokenspeed.plane.specs import CacheGroupSpec
from tokenspeed.plane.table import Int64Array

PAGE_TOKENS, VOCAB, WARM = 16, 128, 50
clock = time.thread_time_ns


@attrs.define(eq=False)
class InlineStream:
    """Runs each job where it is submitted, and notes what that took."""

    name: str = "exec"
    job_ns: int = 0

    def submit(self, job: Job, label: str) -> DeviceEvent:
        event, begun = HostEvent(), clock()
        job()
        self.job_ns += clock() - begun
        event.complete(None, 0.0)
        return event

    def wait(self, event: DeviceEvent) -> None:
        return None


@attrs.frozen(eq=False)
class Buffer:
    tensor: torch.Tensor

    def unwrap(self, rows: Iterable[int] | None = None) -> torch.Tensor:
        del rows
        return self.tensor


@attrs.frozen(eq=False)
class Copy:
    values: HostArray

    def array(self) -> HostArray:
        return self.values


@attrs.frozen(eq=False)
class InlineBackend:
    exec_stream: InlineStream = attrs.field(factory=InlineStream)
    write_stream: InlineStream = attrs.field(factory=InlineStream)
    load_stream: InlineStream = attrs.field(factory=InlineStream)
    name: str = "inline"

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        return Buffer(torch.zeros(shape, dtype=dtype))

    def to_device(self, array: HostArray) -> torch.Tensor:
        return host_to_device(array, torch.device("cpu"))

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        return Copy(np.array(tensor.numpy()))

    def close(self) -> None:
        return None


@attrs.frozen(eq=False)
class NoModel:
    """Answers with the same logits for every row."""

    logits: torch.Tensor
    num_layers: int = 1

    def run(
        self, rows: RaggedRows, *, layers: range, ready: LayersReady, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.logits[: len(rows.logit_tokens)]


@attrs.frozen(eq=False)
class NoPool:
    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        return None

    def zero_blocks(self, blocks: tuple[GroupBlocks, ...]) -> None:
        return None

    def layer_bytes(self, group: int) -> torch.Tensor:
        return torch.zeros(1, 1, 1, dtype=torch.uint8)


@attrs.frozen(eq=False)
class NoSampler:
    tokens: torch.Tensor
    nan: torch.Tensor

    def seat(self, seat: Seat) -> None:
        return None

    def release(self, slot: int) -> None:
        return None

    def sample(
        self, logits: torch.Tensor, *, slots: Int64Array, positions: Int64Array, masks: object = None
    ) -> SampledTokens:
        return SampledTokens(tokens=self.tokens[: len(logits)], nan=self.nan[: len(logits)])


def plans(batch: int, context: int, steps: int) -> Iterator[tuple[ExecutionPlan, Dispatch]]:
    """A prefill of all rows, then decode steps; a row is granted a block when it comes to one."""
    slots, rows = int32(range(batch)), int32(range(batch))
    blocks = -(-context // PAGE_TOKENS)
    ids = np.arange(1, 1 + batch * blocks, dtype=np.int32)
    yield (
        ExecutionPlan(
            round_id=1,
            batch=ForwardBatch(
                rows=rows,
                slots=slots,
                starts=int32([0] * batch),
                counts=int32([context] * batch),
                samples=frozen(np.ones(batch, dtype=np.bool_)),
                input_ids=int32([3] * (batch * context)),
            ),
            grants=(
                BlockGrants(
                    slots=frozen(np.repeat(slots, blocks)),
                    indices=frozen(np.tile(np.arange(blocks, dtype=np.int32), batch)),
                    blocks=frozen(ids),
                ),
            ),
        ),
        Dispatch(
            seats=tuple(Seat(slot=s, row=s, rid=f"r{s}", sampling=Sampling(), prompt_len=context) for s in range(batch))
        ),
    )
    following, ones = 1 + batch * blocks, frozen(np.ones(batch, dtype=np.bool_))
    for step in range(steps):
        at = context + step
        grants: tuple[BlockGrants, ...] = ()
        if at % PAGE_TOKENS == 0:
            more = int32(range(following, following + batch))
            grants = (BlockGrants(slots=slots, indices=int32([at // PAGE_TOKENS] * batch), blocks=more),)
            following += batch
        work = ForwardBatch(
            rows=rows,
            slots=slots,
            starts=int32([at] * batch),
            counts=int32([1] * batch),
            samples=ones,
            input_ids=int32([FROM_DEVICE] * batch),
        )
        yield ExecutionPlan(round_id=2 + step, batch=work, grants=grants), Dispatch()


def frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def measure(name: str, make: Callable[..., Executor], batch: int, context: int, steps: int) -> dict[str, object]:
    total = context + steps + WARM + PAGE_TOKENS
    backend = InlineBackend()
    executor = make(
        backend=backend,
        step=NoModel(torch.zeros(batch, VOCAB)),
        pool=NoPool(),
        sampler=NoSampler(torch.full((batch,), 3), torch.zeros(batch, dtype=torch.bool)),
        logprobs=log_softmax,
        request_slots=batch,
        max_model_len=total,
        num_pages=2 + batch * -(-total // PAGE_TOKENS),
        groups=(CacheGroupSpec(block_tokens=PAGE_TOKENS),),
    )
    handle = StreamDeviceHandle(
        backend=backend,
        executor=executor,
        profiler=TraceProfiler(stream=backend.exec_stream),
        rounds=AutomaticCollection(),
    )
    spent: dict[str, list[int]] = {"forward": [], "job": [], "result": []}
    for plan, dispatch in plans(batch, context, steps + WARM):
        backend.exec_stream.job_ns, begun = 0, clock()
        landing = handle.execute(plan, dispatch, cache_ops_from_plan(plan).device)
        launched = clock()
        if isinstance(landing, AsyncModelRunnerOutput):
            landing.get_output()
        landing.result()
        ended = clock()
        job = backend.exec_stream.job_ns
        for part, ns in (("forward", launched - begun - job), ("job", job), ("result", ended - launched)):
            spent[part].append(ns)
    executor.close()
    medians = {part: statistics.median(times[1 + WARM :]) / 1e3 for part, times in spent.items()}
    return {"executor": name, "batch": batch, "context": context, **medians}


EXECUTORS: dict[str, Callable[..., Executor]] = {
    "streams": stream_executor,
    # A rank whose output thread is given nothing: its part is measured here, as `result`.
    "futures": partial(futures_executor, rank=1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profile", action="store_true", help="where the time of all steps goes")
    args = parser.parse_args()
    for name, make in EXECUTORS.items():
        profile = cProfile.Profile()
        if args.profile:
            profile.enable()
        with torch.inference_mode():
            row = measure(name, make, args.batch, args.context, args.steps)
        profile.disable()
        if args.json:
            print(json.dumps(row))
        else:
            parts = ", ".join(f"{part} {row[part]:.0f} us" for part in ("forward", "job", "result"))
            print(f"{name:8} batch {args.batch}, context {args.context}: {parts}")
        if args.profile:
            pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
