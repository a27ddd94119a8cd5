"""The seams of one rank, as protocols. Values in, values out; no tensors, no callables, no kwargs.

`DataPlane` is the contract between control and device (DP-46): its methods are everything the
control plane can ask of a device, and ``docs/contract/data-plane.md`` lists them by name. There is
no "run this closure" operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NewType, Protocol, TypeVar, runtime_checkable

from tokenspeed.plane.messages import ControlReply, EngineEvent, EngineInfo, FrontendMessage, LoadReport, OutputBatch
from tokenspeed.plane.operations import WeightsGroup, WeightsSource
from tokenspeed.plane.plan import DeviceCacheOp, Dispatch, ExecutionPlan, StorageOp
from tokenspeed.plane.results import CacheAcks, ForwardResult, KvEvent, SchedulerEvent, Sizes, StorageReport
from tokenspeed.plane.scheduling import Scheduler, SchedulingPolicy
from tokenspeed.plane.storage import StorageTraffic

Ticket = NewType("Ticket", int)
"""Names one queued forward; rises by one an `execute`."""

C = TypeVar("C", bound=Callable[..., object])


def completion_query(method: C) -> C:
    """Mark a `DataPlane` method that the control thread runs itself: it only looks (DP-8, DP-9)."""
    method.__completion_query__ = True  # type: ignore[attr-defined]
    return method


@runtime_checkable
class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""
        ...


@runtime_checkable
class Wakeup(Protocol):
    """The one thing an idle control thread blocks on (RA-7). `set` is safe from any thread."""

    def set(self) -> None: ...

    def wait(self, timeout_s: float | None) -> bool:
        """Block until `set` was called since the last return, or the time is over; True if set."""
        ...


@runtime_checkable
class DataPlane(Protocol):
    """Everything the control plane can ask of the device side.

    All but the completion queries are queued for the forward thread, first in, first out. Only
    `commit`, `idle_forward`, `flush_cache`, those of memory, weights and profiles, and `shutdown_cache` wait.
    An operation raises only for a broken invariant (DP-16): the error surfaces at the next `commit`
    or awaited call.
    """

    def execute(self, plan: ExecutionPlan, dispatch: Dispatch) -> Ticket:
        """Queue one plan's device work and return at once; at most one a round (RA-22).

        The ticket of a plan without a batch names no forward and is never committed.
        """
        ...

    def commit(self, ticket: Ticket) -> ForwardResult:
        """Wait for the launch, then for the landing, of that forward; results as host values.

        Tickets are committed in the order of their execution, each once.
        """
        ...

    @completion_query
    def landed(self, ticket: Ticket) -> bool:
        """Whether `commit` would return without waiting."""
        ...

    @completion_query
    def poll_cache_results(self) -> CacheAcks:
        """Cache operations that completed since the last call."""
        ...

    def release(self, rows: tuple[int, ...], slots: tuple[int, ...]) -> None:
        """Give back what the device holds for ended requests; runs behind all forwards queued before.

        A slot of -1 means that the request had none.
        """
        ...

    def note_forwarded(self) -> None:
        """This rank forwarded in this round: counts towards the next full garbage collection."""
        ...

    def idle_forward(self) -> None:
        """Join the peers' collectives without work of its own; awaited."""
        ...

    def flush_cache(self) -> None:
        """Forget device-side cache state after the scheduler cleared its own; awaited."""
        ...

    def release_memory(self, tags: tuple[str, ...]) -> str:
        """Give the regions' memory back; their content is lost; awaited. Returns "", or why it was not done."""
        ...

    def resume_memory(self, tags: tuple[str, ...], restore: bool) -> str:
        """Take the regions back: KV empty, weights as last committed if `restore`; awaited. "", or why not."""
        ...

    def load_weights(self, source: WeightsSource) -> str:
        """Bring other weights beside those in force, which stay; awaited. Returns "", or why it was not done."""
        ...

    def commit_weights(self, accept: bool) -> str:
        """Put what `load_weights` brought in force, or drop it; awaited. "", or why it was not done."""
        ...

    def open_weights_group(self, group: WeightsGroup) -> str:
        """Join the processes that broadcast weights; awaited. Returns "", or why it was not done."""
        ...

    def close_weights_group(self, name: str) -> str:
        """Leave them; awaited. Returns "", or why it was not done."""
        ...

    def start_profile(self, path: str) -> str:
        """Record the device's work from here on; awaited. Returns the file that `stop` will write.

        A path that cannot be written is an expected failure: the answer is "", the log has the reason.
        """
        ...

    def stop_profile(self) -> str:
        """End the recording and write it; awaited. Returns the file, "" if none was running."""
        ...

    def shutdown_cache(self) -> None:
        """End host-tier copies before the pools go; awaited."""
        ...


@runtime_checkable
class DeviceHandle(Protocol):
    """The device side at serving time; only `HostDataPlane` keeps it, only ``ts-forward`` calls it.

    One method for each operation of `DataPlane` (ER-3).
    """

    def execute(self, plan: ExecutionPlan, dispatch: Dispatch, cache_ops: tuple[DeviceCacheOp, ...]) -> Landing: ...

    def poll_cache_results(self) -> CacheAcks:
        """Thread-safe; looks at events only."""
        ...

    def release(self, rows: tuple[int, ...], slots: tuple[int, ...]) -> None: ...

    def note_forwarded(self) -> None: ...

    def idle_forward(self) -> None: ...

    def flush_cache(self) -> None: ...

    def release_memory(self, tags: tuple[str, ...]) -> str: ...

    def resume_memory(self, tags: tuple[str, ...], restore: bool) -> str: ...

    def load_weights(self, source: WeightsSource) -> str: ...

    def commit_weights(self, accept: bool) -> str: ...

    def open_weights_group(self, group: WeightsGroup) -> str: ...

    def close_weights_group(self, name: str) -> str: ...

    def start_profile(self, path: str) -> str: ...

    def stop_profile(self) -> str: ...

    def shutdown_cache(self) -> None: ...

    def close(self) -> None:
        """Join the device's streams and free its memory; called once, from the forward thread."""
        ...


@runtime_checkable
class Landing(Protocol):
    """A launched forward on its way to the host."""

    def landed(self) -> bool:
        """Thread-safe; looks, never waits."""
        ...

    def result(self) -> ForwardResult:
        """Wait for the copy event, then read the host copies. Raises what the device raised."""
        ...

    def notify(self, wakeup: Wakeup) -> None:
        """Have the device set `wakeup` once the forward landed; at once if it has."""
        ...


@runtime_checkable
class FrontendLink(Protocol):
    """An engine's end of the frontend wire. `receive`, `send` and `reply` never block."""

    def receive(self) -> tuple[FrontendMessage, ...]:
        """Messages that arrived since the last call, in order of arrival."""
        ...

    def send(self, batch: OutputBatch) -> None: ...

    def reply(self, reply: ControlReply) -> None: ...

    @property
    def gone(self) -> bool:
        """The frontend disappeared; the engine stops (FW-5)."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class EngineLink(Protocol):
    """A frontend's end of the wire to one engine."""

    @property
    def info(self) -> EngineInfo:
        """The engine's registration."""
        ...

    def send(self, message: FrontendMessage) -> None:
        """Queue a message; thread-safe, never blocks. Dropped once the engine is gone."""
        ...

    def subscribe(self, listener: Callable[[EngineEvent], None]) -> None:
        """Deliver every event to `listener` on a wire thread, in order; call once, before `send`.

        Ends with one `EngineGone`. Events that arrived earlier are delivered first.
        """
        ...

    def close(self) -> None: ...


M = TypeVar("M")


@runtime_checkable
class Mesh(Protocol):
    """Control-plane collectives of this rank's groups. A group of one costs nothing.

    Every member of a group makes the same calls in the same order.
    """

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def share(self, value: M) -> M:
        """The first member's value, on every member."""
        ...

    def gather(self, value: M) -> tuple[M, ...]:
        """Every member's value, by rank."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class TransferPeer(Protocol):
    """The prefill/decode peer of this rank: host side only."""

    @property
    def role(self) -> str: ...

    def open_transfers(self) -> int: ...

    def poll(self) -> tuple[SchedulerEvent, ...]: ...

    def close(self) -> None: ...


@runtime_checkable
class StorageExecutor(Protocol):
    """Runs storage (L3) transactions on host memory, on threads of its own.

    Every operation ends in bounded time, one that was given up too; each end sets the engine's `Wakeup`.
    """

    def submit(self, ops: Sequence[StorageOp]) -> None: ...

    def report(self) -> StorageReport:
        """What this member saw since the last call. Each operation is completed or cancelled once."""
        ...

    def clear(self) -> str:
        """Delete what is stored under the weights in force; waits, in bounded time. Returns "", or why not (CP-38)."""
        ...

    def publish_weights(self, source: WeightsSource) -> None:
        """Other weights are in force on all members (CP-33): nothing computed before is found from now on."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class KvEventSink(Protocol):
    """Takes one batch of cache events a round; must not block (PT-12)."""

    def publish(self, events: tuple[KvEvent, ...]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Meter(Protocol):
    """Takes the iteration record of each round (KM-4) and the one-time moments of requests."""

    def round(self, *, sizes: Sizes, load: LoadReport, tokens: int, prompt_tokens: int) -> None: ...

    def committed(
        self,
        *,
        decode_tokens: int,
        jit_compiles: int,
        jit_seconds: float,
        async_steps: int = 0,
        sync_fallback_steps: int = 0,
    ) -> None: ...

    def queued(self, seconds: float) -> None: ...

    def preempted(self, count: int) -> None: ...

    def finished(self, *, prefill_s: float, decode_s: float) -> None:
        """A request ended with at least one token: first forward to first token, and from there to the end."""
        ...

    def grammars_waiting(self, count: int) -> None:
        """Requests whose grammar is not decided yet, whenever that number changes."""
        ...

    def grammar_decided(self, *, waited_s: float, compile_s: float | None, status: int) -> None:
        """A request's grammar has compiled, or cannot be had.

        Args:
            waited_s: since the request was admitted.
            compile_s: of the compilation made for it; None: another's was used, or none.
            status: of the refusal; 0: there is none.
        """
        ...

    def storage(self, traffic: StorageTraffic) -> None:
        """What the storage workers did since the last call."""
        ...

    def reported(self, load: LoadReport) -> None:
        """The load as the frontend is told: with outputs, when it changed, and once a second when quiet."""
        ...


__all__ = [
    "Clock",
    "DataPlane",
    "DeviceHandle",
    "EngineLink",
    "FrontendLink",
    "KvEventSink",
    "Landing",
    "Mesh",
    "Meter",
    "Scheduler",
    "SchedulingPolicy",
    "StorageExecutor",
    "Ticket",
    "TransferPeer",
    "Wakeup",
    "completion_query",
]
