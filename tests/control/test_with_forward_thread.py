"""The loop over the real forward thread and a hash model: threads, waits, failures."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import attrs
import pytest
from rig import SPECS, Rig, hand_rig, request

from tokenspeed.control.event_loop import EventLoop
from tokenspeed.control.wakeup import MonotonicClock, ThreadWakeup
from tokenspeed.device.data_plane import HostDataPlane, open_data_plane
from tokenspeed.plane.messages import OutputBatch
from tokenspeed.plane.plan import DeviceCacheOp, Dispatch, ExecutionPlan
from tokenspeed.testing import HashModelHandle, RecordingLink, hash_continuation, hash_model
from tokenspeed.testing.device import Landed


@attrs.define(eq=False)
class WaitableLink(RecordingLink):
    """A link a test can wait on, which also notes the threads that use it."""

    changed: threading.Condition = attrs.field(factory=threading.Condition)
    threads: set[str] = attrs.field(factory=set)

    def receive(self) -> tuple[object, ...]:
        self.threads.add(threading.current_thread().name)
        messages = []
        while self.inbox:
            messages.append(self.inbox.popleft())
        return tuple(messages)

    def send(self, batch: OutputBatch) -> None:
        with self.changed:
            self.log.append(batch)
            self.changed.notify_all()

    def wait(self, condition: Callable[[], object], timeout: float = 20.0) -> bool:
        with self.changed:
            return bool(self.changed.wait_for(condition, timeout))


@attrs.define(eq=False)
class WatchedHandle(HashModelHandle):
    """Notes the thread of every call; `gate` holds forwards while it is cleared."""

    threads: set[str] = attrs.field(factory=set)
    gate: threading.Event = attrs.field(factory=threading.Event)
    fail_at: int = -1

    def execute(self, plan: ExecutionPlan, dispatch: Dispatch, cache_ops: tuple[DeviceCacheOp, ...]) -> Landed:
        self.threads.add(threading.current_thread().name)
        self.gate.wait(20)
        if self.forwards == self.fail_at:
            raise ZeroDivisionError("planted")
        return super().execute(plan, dispatch, cache_ops)


@attrs.frozen(eq=False)
class Running:
    rig: Rig
    link: WaitableLink
    handle: WatchedHandle
    plane: HostDataPlane
    wakeup: ThreadWakeup
    failures: list[BaseException]
    thread: threading.Thread

    def put(self, *messages: object) -> None:
        self.link.put(*messages)  # type: ignore[arg-type]
        self.wakeup.set()


@contextmanager
def running(*, overlap: bool = True, fail_at: int = -1) -> Iterator[Running]:
    base = hash_model(SPECS)
    handle = WatchedHandle(vocab_size=base.vocab_size, memory=base.memory, latest=base.latest, fail_at=fail_at)
    handle.gate.set()
    wakeup, link = ThreadWakeup(), WaitableLink()
    plane = open_data_plane(handle, wakeup)
    rig = hand_rig(overlap=overlap, plane=plane)
    loop: EventLoop = attrs.evolve(rig.loop, wakeup=wakeup, frontend=link, clock=MonotonicClock())
    failures: list[BaseException] = []

    def work() -> None:
        try:
            loop.run()
        except BaseException as error:
            failures.append(error)
            with link.changed:
                link.changed.notify_all()

    thread = threading.Thread(target=work, name="ts-control")
    thread.start()
    try:
        yield Running(
            rig=attrs.evolve(rig, loop=loop),
            link=link,
            handle=handle,
            plane=plane,
            wakeup=wakeup,
            failures=failures,
            thread=thread,
        )
    finally:
        handle.gate.set()
        loop.request_stop()
        thread.join(20)
        with suppress(ZeroDivisionError):
            plane.close()
    assert not thread.is_alive()
    assert handle.closed


@pytest.mark.contract("PT-2", "PT-4", "PT-5", "PT-6", "DP-2")
@pytest.mark.parametrize("overlap", [False, True])
def test_every_device_operation_runs_on_the_forward_thread_and_the_loop_on_its_own(overlap: bool) -> None:
    with running(overlap=overlap) as engine:
        prompts = {f"r{i}": list(range(1, 4 + 7 * i)) for i in range(12)}
        engine.put(*(request(rid, ids, max_new=10) for rid, ids in prompts.items()))
        assert engine.link.wait(lambda: all(engine.link.finish(rid) for rid in prompts))
        for rid, ids in prompts.items():
            assert engine.link.tokens(rid) == hash_continuation(ids, 10, vocab_size=SPECS.vocab_size)
        assert engine.handle.threads == {"ts-forward"}
        assert engine.link.threads == {"ts-control"}


@pytest.mark.contract("PT-14", "DP-3", "DP-5", "DP-13")
def test_rounds_go_on_while_the_forward_thread_is_held() -> None:
    with running() as engine:
        engine.handle.gate.clear()
        engine.put(request("a", 5, max_new=4))
        assert engine.link.wait(lambda: engine.plane.state.tickets >= 1)
        first = engine.plane.state.tickets
        assert first >= 1
        engine.put(request("b", 5, max_new=4))
        engine.handle.gate.set()
        assert engine.link.wait(lambda: engine.link.finish("a") and engine.link.finish("b"))


@pytest.mark.contract("SS-13", "DP-16")
def test_a_failure_on_the_forward_thread_ends_the_loop_with_that_error() -> None:
    with running(fail_at=3) as engine:
        engine.put(request("a", 5, max_new=50))
        assert engine.link.wait(lambda: engine.failures)
        assert isinstance(engine.failures[0], ZeroDivisionError)
        engine.thread.join(10)
        assert not engine.thread.is_alive()


@pytest.mark.contract("PT-8", "RA-7")
def test_an_idle_engine_uses_almost_no_processor_time() -> None:
    with running() as engine:
        engine.put(request("a", 5, max_new=2))
        assert engine.link.wait(lambda: engine.link.finish("a"))
        settled = threading.Event()
        settled.wait(0.2)
        before = time.process_time()
        settled.wait(2.0)
        assert time.process_time() - before < 0.02


@pytest.mark.contract("PT-6", "DP-28", "PT-18", "DP-38")
def test_nothing_of_the_loop_but_the_data_plane_reaches_the_handle() -> None:
    with running() as engine:
        seen: set[int] = set()
        stack: list[object] = [
            getattr(engine.rig.loop, field.name) for field in attrs.fields(EventLoop) if field.name != "plane"
        ]
        while stack:
            item = stack.pop()
            if id(item) in seen or isinstance(item, type) or item is engine.plane:
                continue
            seen.add(id(item))
            module = type(item).__module__ or ""
            assert item is not engine.handle
            assert not module.startswith(("torch", "tokenspeed.device")), type(item)
            if module.startswith("tokenspeed") or isinstance(item, list | tuple | dict | set):
                stack.extend(gc.get_referents(item))
        assert len(seen) > 50
