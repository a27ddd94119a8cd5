"""Doubles for the device side: a scripted handle under the real data plane, a recording backend, batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import numpy as np

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.random_models import open_random_checkpoint
from tokenspeed.device.backends.cpu import CpuBackend, open_cpu_backend
from tokenspeed.device.kv.layout import CacheLayout
from tokenspeed.plane.messages import SamplingParams
from tokenspeed.plane.plan import (
    FROM_DEVICE,
    BlockGrants,
    DeviceCacheOp,
    Dispatch,
    ExecutionPlan,
    ForwardBatch,
    LogprobPlan,
    Sampling,
    Seat,
    int32,
)
from tokenspeed.plane.ports import Wakeup
from tokenspeed.plane.results import NO_ACKS, CacheAcks, ForwardResult
from tokenspeed.plane.specs import CacheGroupSpec

TIMEOUT_S = 20.0


@attrs.define(eq=False)
class CountingWakeup:
    """`Wakeup` a test can wait on, and whose sets it can count."""

    count: int = 0
    changed: threading.Condition = attrs.field(factory=threading.Condition)

    def set(self) -> None:
        with self.changed:
            self.count += 1
            self.changed.notify_all()

    def wait(self, timeout_s: float | None) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.count > 0, timeout_s)

    def wait_for(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.count >= count, TIMEOUT_S)


@attrs.define(eq=False)
class LatchedLanding:
    """`Landing` that lands when the test says so."""

    value: ForwardResult
    copied: threading.Event = attrs.field(factory=threading.Event)
    error: BaseException | None = None
    waiting: threading.Event = attrs.field(factory=threading.Event)
    told: list[Wakeup] = attrs.field(factory=list)

    def landed(self) -> bool:
        return self.copied.is_set()

    def result(self) -> ForwardResult:
        self.waiting.set()
        assert self.copied.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error
        return self.value

    def notify(self, wakeup: Wakeup) -> None:
        self.told.append(wakeup)

    def land(self) -> None:
        self.copied.set()
        for wakeup in self.told:
            wakeup.set()


@attrs.define(eq=False)
class FakeHandle:
    """`DeviceHandle` that notes (thread, operation, arguments) and stops before an operation while `gate` is shut.

    `intervals` has (operation, "begin" | "end") in the order of happening. `fail` names an operation that
    raises. `entered` is set whenever an operation has begun.
    """

    gate: threading.Event = attrs.field(factory=threading.Event)
    entered: threading.Event = attrs.field(factory=threading.Event)
    log: list[tuple[str, str, tuple[object, ...]]] = attrs.field(factory=list)
    intervals: list[tuple[str, str]] = attrs.field(factory=list)
    landings: list[LatchedLanding] = attrs.field(factory=list)
    fail: str = ""
    held_landing: bool = False
    acks: CacheAcks = NO_ACKS
    body: Callable[[str], None] = lambda _operation: None

    def _enter(self, operation: str, *arguments: object) -> None:
        self.intervals.append((operation, "begin"))
        self.entered.set()
        assert self.gate.wait(TIMEOUT_S)
        self.log.append((threading.current_thread().name, operation, arguments))
        self.body(operation)
        if self.fail == operation:
            raise ZeroDivisionError(f"planted in {operation}")
        self.intervals.append((operation, "end"))

    def execute(self, plan: ExecutionPlan, dispatch: Dispatch, cache_ops: tuple[DeviceCacheOp, ...]) -> LatchedLanding:
        self._enter("execute", plan, dispatch, cache_ops)
        landing = LatchedLanding(value=ForwardResult(tokens=[plan.round_id]))
        if not self.held_landing:
            landing.copied.set()
        self.landings.append(landing)
        return landing

    def poll_cache_results(self) -> CacheAcks:
        self.log.append((threading.current_thread().name, "poll_cache_results", ()))
        return self.acks

    def release(self, rows: tuple[int, ...], slots: tuple[int, ...]) -> None:
        self._enter("release", rows, slots)

    def note_forwarded(self) -> None:
        self._enter("note_forwarded")

    def idle_forward(self) -> None:
        self._enter("idle_forward")

    def flush_cache(self) -> None:
        self._enter("flush_cache")

    def release_memory(self, tags: tuple[str, ...]) -> str:
        self._enter("release_memory", tags)
        return ""

    def resume_memory(self, tags: tuple[str, ...], restore: bool) -> str:
        self._enter("resume_memory", tags, restore)
        return ""

    def load_weights(self, source: object) -> str:
        self._enter("load_weights", source)
        return ""

    def commit_weights(self, accept: bool) -> str:
        self._enter("commit_weights", accept)
        return ""

    def open_weights_group(self, group: object) -> str:
        self._enter("open_weights_group", group)
        return ""

    def close_weights_group(self, name: str) -> str:
        self._enter("close_weights_group", name)
        return ""

    def start_profile(self, path: str) -> str:
        self._enter("start_profile", path)
        return f"{path}/trace.json"

    def stop_profile(self) -> str:
        self._enter("stop_profile")
        return "trace.json"

    def shutdown_cache(self) -> None:
        self._enter("shutdown_cache")

    def close(self) -> None:
        self._enter("close")

    @property
    def operations(self) -> list[str]:
        return [operation for _, operation, _ in self.log]


def batch(
    *rows: tuple[int, int, list[int]], samples: list[bool] | None = None, table_rows: list[int] | None = None
) -> ForwardBatch:
    """A batch of (slot, start, tokens); a row of the request table has the slot's number unless given."""
    return ForwardBatch(
        rows=int32(table_rows if table_rows is not None else [slot for slot, _, _ in rows]),
        slots=int32([slot for slot, _, _ in rows]),
        starts=int32([start for _, start, _ in rows]),
        counts=int32([len(tokens) for _, _, tokens in rows]),
        samples=read_only(np.array(samples if samples is not None else [True] * len(rows))),
        input_ids=int32([token for _, _, tokens in rows for token in tokens]),
    )


def one_group(block_bytes: int, block_tokens: int = 16) -> CacheLayout:
    """The layout of a model that attends to everything in one layer."""
    spec = CacheGroupSpec(block_tokens=block_tokens, bytes_per_block=block_bytes)
    return CacheLayout(parent_bytes=block_bytes, groups=(spec,), layer_bytes=(block_bytes,))


def read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def granted(*blocks: tuple[int, int, int]) -> tuple[BlockGrants, ...]:
    """Grants of (slot, index, block)."""
    slots, indices, pages = zip(*blocks, strict=True)
    return (BlockGrants(slots=int32(slots), indices=int32(indices), blocks=int32(pages)),)


def seat(slot: int, *, row: int | None = None, prompt_len: int = 1) -> Seat:
    return Seat(slot=slot, row=slot if row is None else row, rid=f"r{slot}", sampling=Sampling(), prompt_len=prompt_len)


def plan(round_id: int = 1, work: ForwardBatch | None = None, **streams: object) -> ExecutionPlan:
    """A plan of one row, or of what is given."""
    chosen = batch((0, 0, [5])) if work is None else work
    return ExecutionPlan(round_id=round_id, batch=chosen, **streams)


DECODE = [FROM_DEVICE]
NO_LOGPROBS = LogprobPlan()


@contextmanager
def cpu_backend(threads: int = 1) -> Iterator[CpuBackend]:
    backend = open_cpu_backend(threads)
    try:
        yield backend
    finally:
        backend.close()


@contextmanager
def background(work: Callable[[], object]) -> Iterator[threading.Thread]:
    """`work` on a thread of its own, joined at the end."""
    thread = threading.Thread(target=work, name="caller", daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


TINY_CONFIG = ModelConfig(
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    num_layers=3,
    hidden_size=16,
    intermediate_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=97,
    rms_eps=1e-5,
    rope_theta=10000.0,
    max_positions=128,
    tie_embeddings=True,
    attention_bias=False,
    qk_norm=False,
    torch_dtype="float32",
)


def checkpoint(config: ModelConfig = TINY_CONFIG, **changes: object) -> Checkpoint:
    """A checkpoint without files, called toy; its tokenizer knows as many ids as the model."""
    defaults = {
        "served_name": "toy",
        "config": config,
        "generation": SamplingParams(temperature=0.5),
        "eos_token_ids": (0,),
        "tokenizer_vocab_size": config.vocab_size,
    }
    return attrs.evolve(open_random_checkpoint("tiny-llama", served_name="toy"), **(defaults | changes))
