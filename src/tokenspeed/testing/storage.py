"""A storage executor driven by hand, which does nothing until it is told what came of an operation; and a store."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.operations import WeightsSource
from tokenspeed.plane.plan import StorageOp, StorageVerb
from tokenspeed.plane.results import StorageDone, StorageReport
from tokenspeed.plane.storage import HostBytes


@attrs.define(eq=False)
class ScriptedStorage:
    """Meets `plane.ports.StorageExecutor`.

    Attributes:
        log: everything that was submitted.
        open: operations without an end, by id.
        stored: keys that a QUERY or GET finds when `serve` answers it; a PUT adds to them.
        now_s, pressure, error: of the next reports.
        refusals: what the next deletions are answered with; then they succeed.
        published: sources of weights that came into force.
    """

    log: list[StorageOp] = attrs.field(factory=list[StorageOp])
    open: dict[int, StorageOp] = attrs.field(factory=dict[int, StorageOp])
    stored: set[bytes] = attrs.field(factory=set[bytes])
    now_s: float = 0.0
    pressure: float = 0.0
    error: str = ""
    completed: list[StorageDone] = attrs.field(factory=list[StorageDone])
    cancelled: list[int] = attrs.field(factory=list[int])
    refusals: list[str] = attrs.field(factory=list[str])
    published: list[WeightsSource] = attrs.field(factory=list[WeightsSource])

    def submit(self, ops: Sequence[StorageOp]) -> None:
        for op in ops:
            self.log.append(op)
            if op.verb is not StorageVerb.CANCEL:
                if op.op_id in self.open:
                    raise InvariantBroken("two storage operations with one id", op_id=op.op_id)
                if op.verb is not StorageVerb.QUERY and len(op.keys) != len(op.host_blocks):
                    raise InvariantBroken("not one host block a key", op_id=op.op_id)
                self.open[op.op_id] = op

    def report(self) -> StorageReport:
        report = StorageReport(
            now_s=self.now_s,
            pressure=self.pressure,
            completed=tuple(self.completed),
            cancelled=tuple(self.cancelled),
            error=self.error,
        )
        self.completed.clear()
        self.cancelled.clear()
        return report

    def clear(self) -> str:
        refusal = self.refusals.pop(0) if self.refusals else ""
        if not refusal:
            self.stored.clear()
        return refusal

    def publish_weights(self, source: WeightsSource) -> None:
        self.published.append(source)
        self.stored.clear()

    def close(self) -> None:
        return None

    def verbs(self) -> list[str]:
        return [op.verb.value for op in self.log]

    def only(self, verb: StorageVerb) -> StorageOp:
        """The one open operation of that kind."""
        (op,) = [op for op in self.open.values() if op.verb is verb]
        return op

    def finish(self, op_id: int, *outcomes: bool) -> None:
        """The operation ends; without `outcomes`, as `stored` has it."""
        op = self.open.pop(op_id)
        known = tuple(key in self.stored or op.verb is StorageVerb.PUT for key in op.keys)
        if op.verb is StorageVerb.PUT:
            self.stored.update(key for key, ok in zip(op.keys, outcomes or known, strict=True) if ok)
        self.completed.append(StorageDone(op_id=op_id, outcomes=outcomes or known))

    def cancel(self, op_id: int) -> None:
        """The operation ends because it was given up."""
        del self.open[op_id]
        self.cancelled.append(op_id)

    def serve(self) -> None:
        """All open operations end as `stored` has it, in the order of their ids."""
        for op_id in sorted(self.open):
            self.finish(op_id)


@attrs.define(eq=False)
class MemoryStore:
    """Meets `plane.storage.StorageBackend`, and fails as it is told to.

    Attributes:
        values: frames by key; a test may change them.
        fault: what the next calls raise; None: nothing.
        open: cleared, every call waits until it is set: a store that hangs.
        calls: names of the calls that were begun, in order.
        attached: arenas of the workers.
        entered: released once a call that begins.
    """

    values: dict[str, bytes] = attrs.field(factory=dict[str, bytes])
    fault: Exception | None = None
    open: threading.Event = attrs.field(factory=threading.Event)
    entered: threading.Semaphore = attrs.field(factory=lambda: threading.Semaphore(0))
    calls: list[str] = attrs.field(factory=list[str])
    attached: list[HostBytes] = attrs.field(factory=list[HostBytes])
    closed: bool = False

    def __attrs_post_init__(self) -> None:
        self.open.set()

    def attach(self, memory: HostBytes) -> None:
        self.attached.append(memory)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        self._call("exists")
        return [key in self.values for key in keys]

    def get(self, keys: Sequence[str], frames: Sequence[HostBytes]) -> list[bool]:
        self._call("get")
        found = []
        for key, frame in zip(keys, frames, strict=True):
            value = self.values.get(key, b"")
            if fits := len(value) == len(frame):
                frame.data[:] = value
            found.append(fits)
        return found

    def put(self, keys: Sequence[str], frames: Sequence[HostBytes]) -> list[bool]:
        self._call("put")
        for key, frame in zip(keys, frames, strict=True):
            self.values.setdefault(key, frame.tobytes())
        return [True] * len(keys)

    def delete(self, keys: Sequence[str]) -> None:
        self._call("delete")
        for key in keys:
            self.values.pop(key, None)

    def clear(self, namespace: str) -> None:
        self._call("clear")
        for key in [key for key in self.values if key.startswith(f"{namespace}/")]:
            del self.values[key]

    def close(self) -> None:
        self.closed = True

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self.entered.release()
        self.open.wait()
        if self.fault is not None:
            raise self.fault
