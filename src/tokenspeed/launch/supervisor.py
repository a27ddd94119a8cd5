"""The launcher's child processes: start them, wait for their messages and exits, end all of them exactly once."""

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
from tokenspeed.launch.messages import Failed, FromChild, StartMessage, Stop, ToChild
from tokenspeed.launch.signals import SignalPipe

CHANNEL_CLOSED = "closed its channel to the launcher"
KILLED = "did not end in time and was killed"
KILL_S = 5.0
"""How long the kernel may take to end a process after SIGKILL."""


@attrs.frozen(kw_only=True, eq=False)
class ChildProcess:
    """A process of the deployment, in a session of its own: a terminal's signals do not reach it.

    Attributes:
        channel: the launcher's end.
        exit_fd: readable once the process has exited, whatever ended it.
    """

    name: str
    process: subprocess.Popen[bytes]
    channel: Connection
    exit_fd: int

    def send(self, message: ToChild) -> None:
        """Nothing is sent to a child that is gone; its exit is an event of its own."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def kill(self) -> None:
        """The process and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@attrs.frozen(kw_only=True, eq=False)
class MessageReceived:
    child: ChildProcess
    message: FromChild


@attrs.frozen(kw_only=True, eq=False)
class ChannelClosed:
    """The channel is at its end although the process runs."""

    child: ChildProcess


@attrs.frozen(kw_only=True, eq=False)
class ChildExited:
    """Negative status: by that signal."""

    child: ChildProcess
    status: int


@attrs.frozen(kw_only=True)
class SignalsReceived:
    count: int


Event: TypeAlias = MessageReceived | ChannelClosed | ChildExited | SignalsReceived


@attrs.frozen(kw_only=True)
class GracePeriods:
    """How long an orderly exit may take before the process is killed.

    Attributes:
        frontend_s: beyond ``server.shutdown_timeout_s``, which the frontend gives to its requests.
        ranks_s: for ranks to end their round, their data plane and their threads; behind the frontend's.
        second_signal_s: what is left of either once a second signal came.
    """

    frontend_s: float = 5.0
    ranks_s: float = 10.0
    second_signal_s: float = 1.0


@attrs.define(eq=False)
class SupervisorState:
    """Writer: Supervisor. `closed` is the shutdown latch: set once, never unset (SS-9).

    Attributes:
        children: every child ever started.
        closed_channels: names of children whose channel is at its end.
        exit_statuses: by name, of those that have exited.
        killed: names of those that did not exit in time.
        faults: what was wrong, by name, in order of discovery.
        second_signal: one came while children were ending.
    """

    closed: bool = False
    children: list[ChildProcess] = attrs.field(factory=list[ChildProcess])
    closed_channels: set[str] = attrs.field(factory=set[str])
    exit_statuses: dict[str, int] = attrs.field(factory=dict[str, int])
    killed: set[str] = attrs.field(factory=set[str])
    faults: dict[str, Failed] = attrs.field(factory=dict[str, Failed])
    second_signal: bool = False


@attrs.frozen(kw_only=True, eq=False)
class Supervisor:
    """All children of one launcher, and its signals. Main thread only."""

    signals: SignalPipe
    grace: GracePeriods
    clock_s: Callable[[], float] = time.monotonic
    state: SupervisorState = attrs.field(factory=SupervisorState)

    def start(
        self,
        name: str,
        program: Sequence[str],
        message: StartMessage,
        *,
        inherit: Iterable[int] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> ChildProcess:
        """Start `program` and send it its first message; returns at once.

        The child finds modules where the launcher finds them. Standard input stays the launcher's.

        Args:
            inherit: descriptors that the child gets beside its channel.
            environment: added to ours.
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
        child = ChildProcess(name=name, process=process, channel=ours, exit_fd=_exit_fd(process))
        self.state.children.append(child)
        child.send(message)
        return child

    @property
    def running(self) -> tuple[ChildProcess, ...]:
        return tuple(child for child in self.state.children if child.name not in self.state.exit_statuses)

    def wait_events(self, timeout_s: float | None = None) -> tuple[Event, ...]:
        """Block until a child sent a message, closed its channel or exited, or a signal came.

        A child's messages come before its exit. Empty: the time is over.
        """
        exits = {child.exit_fd: child for child in self.running}
        channels = {child.channel: child for child in self.running if child.name not in self.state.closed_channels}
        ready = wait([self.signals.fileno(), *exits, *channels], timeout_s)
        events: list[Event] = []
        if self.signals.fileno() in ready:
            events.append(SignalsReceived(count=self.signals.taken()))
        for channel, child in channels.items():
            if channel in ready:
                events += self._receive(child, once=True)
        for exit_fd, child in exits.items():
            if exit_fd in ready:
                events += self._reap(child)
        return tuple(events)

    def record_fault(self, child: ChildProcess, fault: Failed) -> None:
        """The first fault of a child is what matters; that it closed its channel says less than any other."""
        known = self.state.faults.get(child.name)
        if known is None or known.text == CHANNEL_CLOSED:
            self.state.faults[child.name] = fault

    def close(self) -> None:
        """End every child and wait for its exit: asked first, killed if it takes too long. Works once."""
        if self.state.closed:
            return
        self.state.closed = True
        for child in self.running:
            child.send(Stop())
        if not self.wait_exits(self.running, within_s=self.grace.ranks_s):
            for child in self.running:
                self.state.killed.add(child.name)
                self.record_fault(child, Failed(text=KILLED, consequence=True))
                child.kill()
            self.wait_exits(self.running, within_s=KILL_S)
        for child in self.state.children:
            child.channel.close()
            os.close(child.exit_fd)

    def wait_exits(self, children: Sequence[ChildProcess], *, within_s: float) -> bool:
        """Wait until all of `children` have exited; a further signal shortens the wait. False: not in time."""
        deadline_s = self.clock_s() + within_s
        if self.state.second_signal:
            deadline_s = min(deadline_s, self.clock_s() + self.grace.second_signal_s)
        while any(child.name not in self.state.exit_statuses for child in children):
            left_s = deadline_s - self.clock_s()
            if left_s <= 0:
                return False
            for event in self.wait_events(left_s):
                match event:
                    case SignalsReceived():
                        self.state.second_signal = True
                        deadline_s = min(deadline_s, self.clock_s() + self.grace.second_signal_s)
                    case MessageReceived(child=child, message=Failed() as fault):
                        self.record_fault(child, fault)
                    case ChildExited(child=child, status=status) if status and child.name not in self.state.killed:
                        self.record_fault(child, Failed(text=exit_text(status)))
        return True

    def _receive(self, child: ChildProcess, *, once: bool) -> list[Event]:
        """One message, or all that have arrived."""
        events: list[Event] = []
        try:
            while once or child.channel.poll(0):
                events.append(MessageReceived(child=child, message=child.channel.recv()))
                once = False
        except (EOFError, OSError):
            self.state.closed_channels.add(child.name)
            events.append(ChannelClosed(child=child))
        return events

    def _reap(self, child: ChildProcess) -> list[Event]:
        last_messages: list[Event] = []
        if child.name not in self.state.closed_channels:
            received = self._receive(child, once=False)
            last_messages = [event for event in received if isinstance(event, MessageReceived)]
            self.state.closed_channels.add(child.name)
        # The exited process still holds its group's number: what it started can be ended without a mix-up.
        child.kill()
        status = child.process.wait()
        self.state.exit_statuses[child.name] = status
        return [*last_messages, ChildExited(child=child, status=status)]


def exit_text(status: int) -> str:
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
