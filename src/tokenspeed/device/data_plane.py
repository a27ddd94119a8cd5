"""The road from the control thread to the device: a queue, one forward thread, and completion queries.

**The capture contract.** All that a queued operation brings to the data plane are its arguments, plain
values that nobody can change once they are queued (`device.capture` is the check). All that a
forward reads is built from them by the forward thread. Once a forward is launched, nothing it reads
is rebound, edited or released before it can no longer run: what ends a resource is itself a queued
operation and stands behind the forwards that read it. The sole way back is the result of the
launched forward, as lists made of host copies after their copy event.

Two kinds of object are registered exceptions, and cross although they are mutable:

* *multimodal items*: the feature tensors of a request in shared memory, owned by the data plane from
  admission until the operation that releases them;
* *grammar matchers*: advanced by the commit or by the forward, depending on the path; the rules that
  drain the queue of forwards keep the two apart.

Matchers stay in their room, and the dispatch names them by handles, which are numbers: the check's
allow-list needs no entry for them. Multimodal items do not exist in this build.

**Waiting.** Queueing returns at once. `commit` waits twice, for the launch of its forward by the
forward thread and for its landing; the awaited operations wait for the forward thread. Completion
queries never wait and bypass the queue, where they would stand behind forwards not yet launched.

**Errors.** An operation raises only when an invariant is broken. The first exception is kept, ends
the operations behind it, and surfaces at the next `commit` or awaited call and at every later one.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

import attrs

from tokenspeed.device import operations as ops
from tokenspeed.device.capture import CaptureCheck, capture_check
from tokenspeed.device.guards import UNWATCHED, SyncDebug, sync_debug
from tokenspeed.device.handle import CacheOps, cache_ops_from_plan
from tokenspeed.device.jit_monitor import NO_COMPILATIONS, JitMonitor
from tokenspeed.device.operations import Awaited, Close, Execute, Flight, Operation, Reply, is_per_round, name_of
from tokenspeed.errors import DeviceLost, InvariantBroken
from tokenspeed.plane.operations import WeightsGroup, WeightsSource
from tokenspeed.plane.plan import Dispatch, ExecutionPlan
from tokenspeed.plane.ports import DeviceHandle, Ticket, Wakeup, completion_query
from tokenspeed.plane.results import CacheAcks, ForwardResult

THREAD_NAME = "ts-forward"


@attrs.define(eq=False)
class PlaneState:
    """Writers: the control thread for `tickets`, `flights` and `closed`, ``ts-forward`` for `running`.

    `failure` is written once, by whichever thread sees an exception first, under `lock`; `surfaced`
    tells whether a caller was given it.
    """

    tickets: int = 0
    flights: dict[Ticket, Flight] = attrs.field(factory=dict[Ticket, Flight])
    thread: threading.Thread | None = None
    running: str = ""
    failure: BaseException | None = None
    surfaced: bool = False
    closed: bool = False
    lock: threading.Lock = attrs.field(factory=threading.Lock)


@attrs.frozen(kw_only=True, eq=False)
class HostDataPlane:
    """`plane.ports.DataPlane` over the device handle, of which it is the only holder.

    Open it with `open_data_plane`; one control thread uses it, and closes it.

    Attributes:
        operations: unbounded, since queueing must never block; the control thread queues three
            entries a round and waits for a result after at most depth + 1 rounds.
        adapt: `cache_ops_from_plan`, called once a plan.
    """

    handle: DeviceHandle
    wakeup: Wakeup
    check: CaptureCheck
    sync: SyncDebug = attrs.field(factory=sync_debug)
    jit: JitMonitor = attrs.field(factory=JitMonitor)
    adapt: Callable[[ExecutionPlan], CacheOps] = cache_ops_from_plan
    operations: queue.SimpleQueue[Operation | Close] = attrs.field(factory=queue.SimpleQueue)
    state: PlaneState = attrs.field(factory=PlaneState)

    # ---- queued, not awaited ------------------------------------------------------------------

    def execute(self, plan: ExecutionPlan, dispatch: Dispatch) -> Ticket:
        self.check.check("execute", (plan, dispatch))
        self.state.tickets += 1
        ticket, flight = Ticket(self.state.tickets), Flight(seal=self.check.seal("execute", (plan, dispatch)))
        if plan.batch is not None:
            self.state.flights[ticket] = flight
        self._put(Execute(plan, dispatch, flight))
        return ticket

    def release(self, rows: tuple[int, ...], slots: tuple[int, ...]) -> None:
        self.check.check("release", (rows, slots))
        self._put(ops.Release(rows, slots))

    def note_forwarded(self) -> None:
        self._put(ops.NoteForwarded())

    # ---- the two waits of a commit ------------------------------------------------------------

    def commit(self, ticket: Ticket) -> ForwardResult:
        flights = self.state.flights
        if ticket != next(iter(flights), None):
            raise InvariantBroken("a commit out of order, or of no forward", ticket=ticket, waiting=tuple(flights))
        flight = flights.pop(ticket)
        flight.launched.wait()
        self._surface()
        if flight.landing is None:
            raise InvariantBroken("a launched forward without a landing", ticket=ticket)
        try:
            result = flight.landing.result()
            flight.seal.verify("when its forward had landed")
        except BaseException as error:
            self._keep(error)
            self._surface()
            raise
        compiled = self.jit.take()
        if compiled is NO_COMPILATIONS:
            return result
        return attrs.evolve(result, jit_compiles=compiled.compiles, jit_seconds=compiled.seconds)

    # ---- completion queries: the calling thread looks, nothing is queued ----------------------

    @completion_query
    def landed(self, ticket: Ticket) -> bool:
        flight = self.state.flights.get(ticket)
        if flight is None:
            raise InvariantBroken("asked for a forward that is not in flight", ticket=ticket)
        if not flight.launched.is_set():
            return False
        return flight.landing is None or flight.landing.landed()

    @completion_query
    def poll_cache_results(self) -> CacheAcks:
        return self.handle.poll_cache_results()

    # ---- queued and awaited -------------------------------------------------------------------

    def idle_forward(self) -> None:
        self._await(ops.IdleForward())

    def flush_cache(self) -> None:
        self._await(ops.FlushCache())

    def release_memory(self, tags: tuple[str, ...]) -> str:
        self.check.check("release_memory", tags)
        return self._await(ops.ReleaseMemory(tags))

    def resume_memory(self, tags: tuple[str, ...], restore: bool) -> str:
        self.check.check("resume_memory", tags)
        return self._await(ops.ResumeMemory(tags, restore))

    def load_weights(self, source: WeightsSource) -> str:
        self.check.check("load_weights", source)
        return self._await(ops.LoadWeights(source))

    def commit_weights(self, accept: bool) -> str:
        return self._await(ops.CommitWeights(accept))

    def open_weights_group(self, group: WeightsGroup) -> str:
        self.check.check("open_weights_group", group)
        return self._await(ops.OpenWeightsGroup(group))

    def close_weights_group(self, name: str) -> str:
        return self._await(ops.CloseWeightsGroup(name))

    def start_profile(self, path: str) -> str:
        self.check.check("start_profile", path)
        return self._await(ops.StartProfile(path))

    def stop_profile(self) -> str:
        return self._await(ops.StopProfile())

    def shutdown_cache(self) -> None:
        self._await(ops.ShutdownCache())

    def close(self, timeout_s: float = 60.0) -> None:
        """Run what is queued, close the handle on the forward thread, and join the thread.

        A second call does nothing.

        Raises: DeviceLost: the thread has not ended after `timeout_s`. Otherwise what an operation
            raised, if no call has raised it yet.
        """
        state = self.state
        if state.closed or state.thread is None:
            return
        state.closed = True
        self.operations.put(Close())
        state.thread.join(timeout_s)
        if state.thread.is_alive():
            raise DeviceLost(f"{THREAD_NAME} did not end within {timeout_s:g} s, inside {state.running or 'nothing'}")
        if not state.surfaced:
            self._surface()

    # ---- the control thread's side of the queue -----------------------------------------------

    def _put(self, operation: Operation) -> None:
        if self.state.closed:
            raise InvariantBroken("the data plane used after its close", operation=name_of(operation))
        self.operations.put(operation)

    def _await(self, asked: ops.Asked) -> str:
        reply = Reply()
        self._put(Awaited(asked, reply))
        reply.done.wait()
        self._surface()
        return reply.value

    def _surface(self) -> None:
        if self.state.failure is not None:
            self.state.surfaced = True
            raise self.state.failure

    # ---- the forward thread -------------------------------------------------------------------

    def _serve(self) -> None:
        """One operation after another; blocked, not polling, while there is none."""
        while True:
            operation = self.operations.get()
            if isinstance(operation, Close):
                break
            self._run(operation)
            del operation  # an idle thread must not keep the arrays of its last plan alive
        self.state.running = "close"
        try:
            self.handle.close()
        except BaseException as error:
            self._keep(error)

    def _run(self, operation: Operation) -> None:
        self.state.running = name_of(operation)
        try:
            if self.state.failure is None:
                with self.sync.watching() if is_per_round(operation) else UNWATCHED:
                    self._perform(operation)
        except BaseException as error:
            # Kept, not swallowed: see the module's text on errors.
            self._keep(error)
        match operation:
            case Execute(flight=flight):
                flight.launched.set()
            case Awaited(reply=reply):
                reply.done.set()
        self.state.running = ""

    def _perform(self, operation: Operation) -> None:
        if not isinstance(operation, Execute):
            operation.perform(self.handle)
            return
        plan, flight = operation.plan, operation.flight
        flight.seal.verify("before its launch")
        flight.landing = self.handle.execute(plan, operation.dispatch, self.adapt(plan).device)
        flight.landing.notify(self.wakeup)

    def _keep(self, error: BaseException) -> None:
        with self.state.lock:
            if self.state.failure is None:
                self.state.failure = error
        self.wakeup.set()  # an idle control thread comes to its next commit, and to the error


def open_data_plane(
    handle: DeviceHandle,
    wakeup: Wakeup,
    check: CaptureCheck | None = None,
    *,
    sync: SyncDebug | None = None,
    jit: JitMonitor | None = None,
) -> HostDataPlane:
    """Start ``ts-forward`` over `handle`, which belongs to the data plane from here on.

    Args:
        wakeup: set when a forward lands and when an operation failed.
        check: None: as the environment says.
        sync: watches per-round operations; whoever gives it arms it.
        jit: counts the compilations that each commit reports.
    """
    plane = HostDataPlane(
        handle=handle,
        wakeup=wakeup,
        check=check or capture_check(os.environ),
        sync=sync or sync_debug(),
        jit=jit or JitMonitor(),
    )
    # A daemon, so that a process that dies without closing is not kept alive by its device.
    plane.state.thread = threading.Thread(target=plane._serve, name=THREAD_NAME, daemon=True)
    plane.state.thread.start()
    return plane
