"""The launcher's children: starting them, hearing them, and ending all of them exactly once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import attrs

from tokenspeed.errors import NotSupported
from tokenspeed.launch.dump_signal import dump_signal_blocked
from tokenspeed.launch.orders import Failed, FromChild, Order, Stop, ToChild
from tokenspeed.launch.signals import SignalPipe

SILENT = "closed its channel to the launcher"
KILLED = "did not end in time and was killed"
KILLED_S = 5.0
"""How long the kernel may take to end a process after SIGKILL."""


@attrs.frozen(kw_only=True, eq=False)
class Child:
    """A process of the deployment, in a session of its own: a terminal's signals do not reach it.

    Attributes:
        channel: the launcher's end.
        exit_fd: readable once the process has ended, whatever ended it.
    """

    name: str
    process: subprocess.Popen[bytes]
    channel: Connection
    exit_fd: int

    def tell(self, message: ToChild) -> None:
        """A child that is gone is not told; its end is heard elsewhere."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def kill(self) -> None:
        """The process and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@attrs.frozen(kw_only=True, eq=False)
class Said:
    child: Child
    message: FromChild


@attrs.frozen(kw_only=True, eq=False)
class Closed:
    """The channel is at its end although the process lives."""

    child: Child


@attrs.frozen(kw_only=True, eq=False)
class Left:
    """The process has ended; negative status: by that signal."""

    child: Child
    status: int


@attrs.frozen(kw_only=True)
class Signalled:
    """So many signals came."""

    count: int


Report: TypeAlias = Said | Closed | Left | Signalled


@attrs.frozen(kw_only=True)
class Patience:
    """How long an orderly end may take before it is enforced; each a separate phase.

    Attributes:
        frontend_s: beyond ``server.shutdown_timeout_s``, which the frontend gives to its requests.
        ranks_s: for ranks to end their round, their data plane and their threads.
        hurried_s: what is left of either once a second signal came.
    """

    frontend_s: float = 5.0
    ranks_s: float = 10.0
    hurried_s: float = 1.0


@attrs.define(eq=False)
class FamilyState:
    """Writer: Family. `closed` is the shutdown latch: set once, never unset (SS-9).

    Attributes:
        members: every child ever started.
        deaf: names of children whose channel is at its end.
        left: exit statuses by name.
        faults: what was wrong, by name, in order of discovery.
        hurried: a second signal came.
    """

    closed: bool = False
    members: list[Child] = attrs.field(factory=list[Child])
    deaf: set[str] = attrs.field(factory=set[str])
    left: dict[str, int] = attrs.field(factory=dict[str, int])
    killed: set[str] = attrs.field(factory=set[str])
    faults: dict[str, Failed] = attrs.field(factory=dict[str, Failed])
    hurried: bool = False


@attrs.frozen(kw_only=True, eq=False)
class Family:
    """All children of one launcher, and its signals. Main thread only."""

    signals: SignalPipe
    patience: Patience
    clock_s: Callable[[], float] = time.monotonic
    state: FamilyState = attrs.field(factory=FamilyState)

    def start(
        self,
        name: str,
        program: Sequence[str],
        order: Order,
        *,
        inherit: Iterable[int] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Child:
        """Start `program` and give it its order; returns at once. `environment` is added to ours.

        The child finds modules where the launcher finds them. Standard input stays the launcher's.
        """
        ours, theirs = Pipe()
        with theirs:
            fd = theirs.fileno()
            with dump_signal_blocked():
                process = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
                    [*program, str(fd), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(fd, *inherit),
                    start_new_session=True,
                    # Compute threads sleep at a barrier instead of spinning: on cores shared with anything else,
                    # a spinning team was measured to make a step ten times slower.
                    env={
                        "OMP_WAIT_POLICY": "PASSIVE",
                        **os.environ,
                        **environment,
                        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
                    },
                )
        child = Child(name=name, process=process, channel=ours, exit_fd=_exit_fd(process))
        self.state.members.append(child)
        child.tell(order)
        return child

    @property
    def living(self) -> tuple[Child, ...]:
        return tuple(child for child in self.state.members if child.name not in self.state.left)

    def hear(self, timeout_s: float | None = None) -> tuple[Report, ...]:
        """Block until a child said something, closed its channel or ended, or a signal came.

        What a child said before its end comes before its end. Empty: the time is over.
        """
        exits = {child.exit_fd: child for child in self.living}
        channels = {child.channel: child for child in self.living if child.name not in self.state.deaf}
        ready = wait([self.signals.fileno(), *exits, *channels], timeout_s)
        reports: list[Report] = []
        if self.signals.fileno() in ready:
            reports.append(Signalled(count=self.signals.taken()))
        for channel, child in channels.items():
            if channel in ready:
                reports += self._read(child, once=True)
        for exit_fd, child in exits.items():
            if exit_fd in ready:
                reports += self._reap(child)
        return tuple(reports)

    def note(self, child: Child, fault: Failed) -> None:
        """The first fault of a child is what matters; that it fell silent says less than any other."""
        known = self.state.faults.get(child.name)
        if known is None or known.text == SILENT:
            self.state.faults[child.name] = fault

    def close(self) -> None:
        """End every child and wait for it: told first, killed if it does not end in time. Works once."""
        if self.state.closed:
            return
        self.state.closed = True
        for child in self.living:
            child.tell(Stop())
        if not self.await_ends(self.living, within_s=self.patience.ranks_s):
            for child in self.living:
                self.state.killed.add(child.name)
                self.note(child, Failed(text=KILLED, consequence=True))
                child.kill()
            self.await_ends(self.living, within_s=KILLED_S)
        for child in self.state.members:
            child.channel.close()
            os.close(child.exit_fd)

    def await_ends(self, children: Sequence[Child], *, within_s: float) -> bool:
        """Wait until all of `children` have ended; a further signal shortens the wait. False: not in time."""
        deadline_s = self.clock_s() + within_s
        if self.state.hurried:
            deadline_s = min(deadline_s, self.clock_s() + self.patience.hurried_s)
        while any(child.name not in self.state.left for child in children):
            left_s = deadline_s - self.clock_s()
            if left_s <= 0:
                return False
            for report in self.hear(left_s):
                match report:
                    case Signalled():
                        self.state.hurried = True
                        deadline_s = min(deadline_s, self.clock_s() + self.patience.hurried_s)
                    case Said(child=child, message=Failed() as fault):
                        self.note(child, fault)
                    case Left(child=child, status=status) if status != 0 and child.name not in self.state.killed:
                        self.note(child, Failed(text=how_it_ended(status)))
        return True

    def _read(self, child: Child, *, once: bool) -> list[Report]:
        reports: list[Report] = []
        try:
            while once or child.channel.poll(0):
                reports.append(Said(child=child, message=child.channel.recv()))
                once = False
        except (EOFError, OSError):
            self.state.deaf.add(child.name)
            reports.append(Closed(child=child))
        return reports

    def _reap(self, child: Child) -> list[Report]:
        last_words: list[Report] = []
        if child.name not in self.state.deaf:
            last_words = [report for report in self._read(child, once=False) if isinstance(report, Said)]
            self.state.deaf.add(child.name)
        # The ended process still holds its group's number: what it started can be ended without a mix-up.
        child.kill()
        status = child.process.wait()
        self.state.left[child.name] = status
        return [*last_words, Left(child=child, status=status)]


def how_it_ended(status: int) -> str:
    """A process's exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    if status == -signal.SIGKILL:
        return "was ended by SIGKILL (the kernel does that when memory runs out)"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def _exit_fd(process: subprocess.Popen[bytes]) -> int:
    if not hasattr(os, "pidfd_open"):
        process.kill()
        process.wait()
        raise NotSupported("serving in processes of its own needs Linux 5.3 or newer; tokenspeed.Engine runs anywhere")
    return os.pidfd_open(process.pid)
