"""The storage executor: threads that move pages between host memory and a store, and never wait for a round.

``ts-l3-read-N`` do QUERYs and GETs, ``ts-l3-write`` does PUTs, and ``ts-l3`` ends what takes too long. A call of
the store that never comes back costs its thread and nothing else: its operation ends at the time limit with
what has arrived, and the bytes that come later stay in the worker's own memory. After three such calls in a
row look-ups are answered at once, as misses, until a trial call works.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

import attrs

from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.operations import WeightsSource
from tokenspeed.plane.plan import StorageOp, StorageVerb
from tokenspeed.plane.ports import Clock, Meter
from tokenspeed.plane.results import StorageReport
from tokenspeed.plane.storage import HostBytes
from tokenspeed.storage.identity import namespace_of
from tokenspeed.storage.jobs import NO_TRAFFIC, Desk, Job, Part
from tokenspeed.storage.pages import Pages, arena, group_of
from tokenspeed.storage.patience import Patience
from tokenspeed.storage.watcher import Watcher

log = logging.getLogger(__name__)

MOST_READS = 1 << 16
MOST_WRITES = 1024
"""Keys that may be in the executor's hands at once; operations beyond that fail at once."""

PUT_PATIENCE = 5.0
"""Nobody waits for a PUT but what wants the cache at rest: it has this many times the limit of a look-up."""

JOIN_S = 2.0
PROBE = "0" * 32
"""Key of trial calls; no page has it."""

Call = Callable[[], None]
Work = Part | Call | None
"""What is queued for a worker: a part, a call of the store's own, or the end."""


@attrs.define(eq=False)
class WeightsInForce:
    """Writer: the control thread. Operations keep the namespace that they were handed in with.

    `failing`: what the meter was last told.
    """

    identity: str
    namespace: str
    failing: bool = False


@attrs.define(eq=False)
class Crew:
    """Writer: `start` and `close` of the executor."""

    threads: list[threading.Thread] = attrs.field(factory=list[threading.Thread])


@attrs.frozen(kw_only=True, eq=False)
class StorageWorkers:
    """Meets `plane.ports.StorageExecutor`. Make it with `factory.open_storage`; `close` joins its threads.

    Attributes:
        schema: see `identity`.
        weights_of: identity of the weights that an update brought over those of the given identity.
        timeout_s: of a QUERY or GET.
        drain_s: how long `close` waits for what is being stored.
    """

    pages: Pages
    desk: Desk
    clock: Clock
    meter: Meter
    reading: Patience
    writing: Patience
    schema: str
    weights: WeightsInForce
    weights_of: Callable[[WeightsSource, str], str]
    timeout_s: float
    drain_s: float
    reads: queue.SimpleQueue[Work] = attrs.field(factory=queue.SimpleQueue)
    writes: queue.SimpleQueue[Work] = attrs.field(factory=queue.SimpleQueue)
    watcher: Watcher = attrs.field(init=False)
    crew: Crew = attrs.field(factory=Crew)

    @watcher.default
    def _watcher(self) -> Watcher:
        return Watcher(
            desk=self.desk,
            clock=self.clock,
            reading=self.reading,
            writing=self.writing,
            try_again=lambda: self.reads.put(self._trial),
        )

    def start(self, readers: int) -> None:
        """Raises: OSError: the store does not take the workers' memory; no thread runs then."""
        lanes = [(f"ts-l3-read-{at}", self.reads, self.reading) for at in range(readers)]
        for name, lane, patience in (*lanes, ("ts-l3-write", self.writes, self.writing)):
            memory = arena(self.pages)
            self.pages.backend.attach(memory)
            thread = threading.Thread(target=self._work, args=(lane, patience, memory), name=name, daemon=True)
            self.crew.threads.append(thread)
        self.crew.threads.append(threading.Thread(target=self.watcher.run, name="ts-l3", daemon=True))
        for thread in self.crew.threads:
            thread.start()

    # ---- control thread -----------------------------------------------------------------------

    def submit(self, ops: Sequence[StorageOp]) -> None:
        for op in ops:
            if op.verb is StorageVerb.CANCEL:
                self._give_up(op)
            else:
                self._take(op)

    def report(self) -> StorageReport:
        completed, cancelled, traffic = self.desk.take()
        failing = self.reading.down or self.writing.down
        if traffic is not NO_TRAFFIC or failing != self.weights.failing:
            self.weights.failing = failing
            self.meter.storage(attrs.evolve(traffic, failing=failing))
        return StorageReport(
            now_s=self.clock.now_s(),
            pressure=1.0 if self.writing.waits else self.desk.pressure,
            completed=completed,
            cancelled=cancelled,
        )

    def clear(self) -> str:
        """Waits for the store, `timeout_s` at most."""
        if self.reading.down or self.writing.down:
            return "storage: the store fails, so that its pages cannot be deleted"
        done, faults = threading.Event(), list[str]()
        namespace = self.weights.namespace

        def call() -> None:
            try:
                self.pages.backend.clear(namespace)
            except Exception as fault:  # a store may raise anything; told to who asked for the flush
                faults.append(f"storage: {type(fault).__name__}: {fault}")
            done.set()

        self.writes.put(call)
        if not done.wait(self.timeout_s):
            late = f"the store did not delete its pages within {self.timeout_s:g} s"
            self.writing.failed(late)
            return f"storage: {late}"
        return faults[0] if faults else ""

    def publish_weights(self, source: WeightsSource) -> None:
        force = self.weights
        force.identity = self.weights_of(source, force.identity)
        force.namespace = namespace_of(self.schema, force.identity)
        log.info("storage: namespace %s from now on, for other weights", force.namespace)

    def close(self) -> None:
        """What is being stored may be finished; then the threads end. One that the store holds is left behind."""
        self.desk.close(self.drain_s)
        self.watcher.stop()
        for _ in self.crew.threads[:-2]:
            self.reads.put(None)
        self.writes.put(None)
        until_s = self.clock.now_s() + JOIN_S
        for thread in self.crew.threads:
            thread.join(max(0.0, until_s - self.clock.now_s()))
        stuck = [thread.name for thread in self.crew.threads if thread.is_alive()]
        if stuck:
            log.warning("storage: the store still holds %s; it is not closed", ", ".join(stuck))
            return
        closing = threading.Thread(target=self._close_store, name="ts-l3-close", daemon=True)
        closing.start()
        closing.join(JOIN_S)
        if closing.is_alive():
            log.warning("storage: the store was not closed within %g s", JOIN_S)

    def _close_store(self) -> None:
        try:
            self.pages.backend.close()
        except Exception:  # a store may raise anything; the engine ends all the same
            log.warning("storage: the store could not be closed", exc_info=True)

    def _take(self, op: StorageOp) -> None:
        self._check(op)
        patience = PUT_PATIENCE if op.verb is StorageVerb.PUT else 1.0
        until_s = self.clock.now_s() + self.timeout_s * patience
        job = Job(
            op=op, namespace=self.weights.namespace, until_s=until_s, outcomes=[False] * len(op.keys), left=len(op.keys)
        )
        parts = self.pages.parts(job)
        job.left = len(parts)
        down = self.writing.waits if job.writes else self.reading.down
        if not self.desk.accepts(job) or down or not op.keys:
            self.desk.end(job)
            return
        self.watcher.watch(job)
        lane = self.writes if job.writes else self.reads
        for part in parts:
            lane.put(part)

    def _give_up(self, op: StorageOp) -> None:
        """It may have ended in the meantime."""
        job = self.desk.of(op.op_id)
        if job is not None:
            self.watcher.give_up(job)

    def _check(self, op: StorageOp) -> None:
        regions = self.pages.regions
        if any(group_of(key) >= len(regions) for key in op.keys):
            raise InvariantBroken("a storage key of a cache group that there is not", op_id=op.op_id)
        if op.verb is StorageVerb.QUERY:
            return
        if len(op.host_blocks) != len(op.keys) or not all(
            0 < block < len(regions[group_of(key)].blocks) for key, block in zip(op.keys, op.host_blocks, strict=False)
        ):
            raise InvariantBroken("a storage operation outside the host tier", op_id=op.op_id, blocks=op.host_blocks)

    # ---- workers ------------------------------------------------------------------------------

    def _work(self, lane: queue.SimpleQueue[Work], patience: Patience, memory: HostBytes) -> None:
        while (work := lane.get()) is not None:
            if not isinstance(work, Part):
                work()
                continue
            job = work.job
            if job.over:
                continue
            try:
                self.pages.serve(work, memory)
            except Exception as fault:  # a store may raise anything, and it is never more than a miss
                patience.failed(f"{type(fault).__name__}: {fault}")
                log.debug("storage: %s of %d keys failed", job.op.verb.value, work.end - work.begin, exc_info=True)
                self.watcher.look()
            else:
                patience.worked()
            with job.lock:
                job.left -= 1
                last = not job.left
            if last:
                self.desk.end(job)

    def _trial(self) -> None:
        try:
            self.pages.backend.exists([f"{self.weights.namespace}/{PROBE}"])
        except Exception as fault:  # as in `_work`
            self.reading.failed(f"{type(fault).__name__}: {fault}")
        else:
            self.reading.worked()
        self.watcher.tried()
