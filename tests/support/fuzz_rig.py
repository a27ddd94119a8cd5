"""An engine that is sent what nobody should send, and must outlive it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import zmq
from hostile_messages import RIDS, hostile_frames
from raw_frontend import RawFrontend, add, sampling, unpack

from tokenspeed.compose.engine import rank_engine
from tokenspeed.settings.model import DeviceSettings, ModelSettings, SchedulerSettings, Settings
from tokenspeed.wire.layouts import LAYOUTS
from tokenspeed.wire.zmq_engine import dial_frontend

SETTINGS = Settings(
    model=ModelSettings(source="random:tiny-llama", max_len_tokens=128),
    device=DeviceSettings(kv_pool_tokens=1024, threads=1),
    scheduler=SchedulerSettings(max_num_seqs=4, max_waiting=8),
)


@attrs.define(eq=False)
class Complaints(logging.Handler):
    """Keeps what was logged as a fault of ours: errors, and anything with a traceback."""

    found: list[str] = attrs.field(factory=list[str])

    def __attrs_pre_init__(self) -> None:
        super().__init__(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.found.append(self.format(record))


@contextlib.contextmanager
def complaints() -> Iterator[Complaints]:
    handler, log = Complaints(), logging.getLogger("tokenspeed")
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)


@attrs.define(eq=False)
class FuzzedEngine:
    """A whole engine behind real sockets, and the frontend that torments it."""

    frontend: RawFrontend
    thread: threading.Thread
    complaints: Complaints
    calls: int = 1 << 40
    asked: int = 0

    def torment(self, seeds: Sequence[int]) -> None:
        """Send the messages of `seeds`; AssertionError unless the engine serves as before, and holds nothing."""
        for seed in seeds:
            self.frontend.send_raw(hostile_frames(seed))
        self.frontend.send(1, list(RIDS))
        for method in ("continue_generation", "resume_memory_occupation", "continue_generation"):
            self.call(method, {})
        self.call("abort_request", {"abort_all": True})
        self.complete()
        assert self.call("flush_cache", 5.0), "the cache could not be flushed: somebody holds a block"
        self.wait(lambda row: row[10] == row[11] == row[12] == 0 and self.resident(row) == 0, "nothing held")
        assert self.thread.is_alive()
        assert self.complaints.found == []

    def call(self, method: str, argument: Any) -> bool:
        self.calls += 1
        self.frontend.send(2, [self.calls, method, [argument]])
        return bool(self.wait(lambda row: row[0] == "ControlReplySlim" and row[1] == self.calls, method)[2])

    def complete(self) -> None:
        """A request of our own: it must be served, whatever came before."""
        self.asked += 1
        rid = f"good-{self.asked}"
        self.frontend.send(0, add(rid, list(range(20)), sampling(p0=3, p3=1.0, p5=1, p15=True)))
        tokens: list[int] = []

        def ended(row: list[Any]) -> bool:
            if row[0] == "ControlReplySlim" or rid not in row[1]:
                return False
            at = row[1].index(rid)
            tokens.extend(row[2][at])
            assert row[3][at] in ("", "length"), row
            return row[3][at] == "length"

        self.wait(ended, "the end of a good request")
        assert len(tokens) == 3

    @staticmethod
    def resident(row: list[Any]) -> int:
        return int(row[1 + LAYOUTS.output.index("kv_resident_pages")])

    def wait(self, wanted: Callable[[list[Any]], bool], what: str) -> list[Any]:
        """The next output that is wanted; others are read past."""
        for _ in range(100_000):
            assert self.frontend.output.poll(20_000), f"no {what}"
            row = unpack(self.frontend.output.recv_multipart()[0])
            is_reply = row[0] == "ControlReplySlim"
            if (is_reply or len(row) > 13) and wanted(row):
                return list(row)
        raise AssertionError(f"no {what} among very many messages")


@contextlib.contextmanager
def fuzzed_engine() -> Iterator[FuzzedEngine]:
    context = zmq.Context()
    frontend = RawFrontend(context)
    ready = threading.Event()
    stop: list[Callable[[], None]] = []

    def serve() -> None:
        address = frontend.at(frontend.handshake)
        try:
            with rank_engine(
                SETTINGS, connect=lambda info, wakeup: dial_frontend(address, info, wakeup=wakeup, timeout_s=30.0)
            ) as engine:
                engine.enter_serving()
                stop.append(engine.stop)
                ready.set()
                engine.run()
        finally:
            ready.set()

    thread = threading.Thread(target=serve, name="fuzzed-engine")
    with complaints() as found:
        thread.start()
        try:
            assert frontend.handshake.poll(60_000), "the engine did not come up"
            frontend.greet()
            assert ready.wait(60.0)
            yield FuzzedEngine(frontend=frontend, thread=thread, complaints=found)
        finally:
            for one in stop:
                one()
            thread.join(60.0)
            frontend.close()
            context.destroy(linger=0)
