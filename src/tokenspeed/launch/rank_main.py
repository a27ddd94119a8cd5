"""A rank's process: build the engine, register with the frontend, run rounds until told to stop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

import attrs

from tokenspeed.checkpoint.progress import Progress
from tokenspeed.checkpoint.sources import ResolvedModel
from tokenspeed.launch.child import ChannelProgress, Parent, run_child
from tokenspeed.launch.dump_signal import dumping_on_signal
from tokenspeed.launch.messages import Exiting, Ready, StartRank
from tokenspeed.launch.thread_names import tell_thread_names
from tokenspeed.plane.messages import EngineInfo
from tokenspeed.plane.ports import FrontendLink, Meter, Wakeup
from tokenspeed.settings.model import Settings
from tokenspeed.telemetry.rank import open_rank_meters
from tokenspeed.wire.zmq_engine import ZmqFrontendLink, dial_frontend


class Engine(Protocol):
    """What a rank's process does with its engine; see `compose.engine.RankEngine`."""

    @property
    def info(self) -> EngineInfo: ...

    def enter_serving(self) -> None: ...

    def run(self) -> None: ...

    def stop(self) -> None: ...

    def request_dump(self) -> None: ...


class BuildEngine(Protocol):
    """How a rank's process gets its engine; see `compose.engine.rank_engine`."""

    def __call__(
        self,
        settings: Settings,
        *,
        connect: Callable[[EngineInfo, Wakeup], FrontendLink],
        resolved: ResolvedModel,
        progress: Progress,
        own_process: bool,
        meter_for: Callable[[EngineInfo], Meter] | None,
    ) -> AbstractContextManager[Engine]: ...


@attrs.define(eq=False)
class DialState:
    """Writer: `Dialler`."""

    link: ZmqFrontendLink | None = None
    address: str = ""


@attrs.frozen(kw_only=True, eq=False)
class Dialler:
    """Connects the engine when it is built, and keeps the link for its last words."""

    parent: Parent
    start: StartRank
    state: DialState = attrs.field(factory=DialState)

    def __call__(self, info: EngineInfo, wakeup: Wakeup) -> FrontendLink:
        start = self.start
        self.state.address = start.handshake or self.parent.address()
        mine = attrs.evolve(info, engine_index=start.index, engine_count=start.count)
        timeout_s = start.settings.wire.handshake_timeout_s
        self.state.link = dial_frontend(self.state.address, mine, wakeup=wakeup, timeout_s=timeout_s)
        return self.state.link

    def announce_death(self) -> None:
        if self.state.link is not None:
            self.state.link.announce_death()
            self.state.link.close()


def run_rank(parent: Parent, start: StartRank, build: BuildEngine) -> None:
    """Everything between the start message and the end of this process."""
    dial = Dialler(parent=parent, start=start)
    with ExitStack() as lifetime:
        meters = None
        if start.metrics is not None:
            meters = open_rank_meters(start.settings.metrics, index=start.index, relay=start.metrics.relay)
            lifetime.callback(meters.close)
        built = build(
            start.settings,
            connect=dial,
            resolved=start.resolved,
            progress=ChannelProgress(parent),
            own_process=True,
            meter_for=None if meters is None else meters.meter_for,
        )
        engine = lifetime.enter_context(built)
        engine.enter_serving()
        tell_thread_names()
        with parent.serving(engine.stop), dumping_on_signal(engine.request_dump):
            parent.report(Ready(info=engine.info))
            try:
                engine.run()
            except BaseException as exc:
                # What raised may hold threads and devices: say so, and leave without unwinding (SS-13).
                dial.announce_death()
                parent.fail(exc)
        if not parent.stopping:
            parent.report(Exiting(why=f"the frontend at {dial.state.address} disconnected"))


def main() -> int:
    def run(parent: Parent, start: StartRank) -> None:
        # Imported when the start message is there: a fault in it is reported to the launcher like any other.
        from tokenspeed.compose.engine import rank_engine

        run_rank(parent, start, rank_engine)

    return run_child(sys.argv, StartRank, run)


if __name__ == "__main__":
    sys.exit(main())
