"""A started deployment: wait until it is ready, until it is to stop, and let its requests end."""

from __future__ import annotations

import logging

import attrs

from tokenspeed.checkpoint.progress import Progress
from tokenspeed.errors import TokenspeedError
from tokenspeed.launch.messages import Bound, Dial, Exiting, Failed, LoadProgress, Ready, Stop
from tokenspeed.launch.supervisor import (
    CHANNEL_CLOSED,
    ChannelClosed,
    ChildExited,
    ChildProcess,
    Event,
    MessageReceived,
    SignalsReceived,
    Supervisor,
    exit_text,
)

log = logging.getLogger("tokenspeed.launch")


class ChildFailed(TokenspeedError):
    """A process of the deployment failed or exited unasked; unwinds the launcher (SS-8)."""


@attrs.define(eq=False)
class DeploymentState:
    """Writer: Deployment. Names of children that are ready, and what they said of themselves."""

    ready: dict[str, Ready] = attrs.field(factory=dict[str, Ready])


@attrs.frozen(kw_only=True, eq=False)
class Deployment:
    """The processes of one `serve`. Methods raise `ChildFailed`, and leave every cleanup to `Supervisor.close`.

    Attributes:
        frontend: None where a foreign one is served.
        relay: None where no metrics leave the deployment.
    """

    supervisor: Supervisor
    relay: ChildProcess | None = None
    ranks: tuple[ChildProcess, ...]
    frontend: ChildProcess | None
    progress: Progress
    state: DeploymentState = attrs.field(factory=DeploymentState)

    @property
    def children(self) -> tuple[ChildProcess, ...]:
        return tuple(child for child in (*self.ranks, self.frontend, self.relay) if child is not None)

    def until_ready(self) -> bool:
        """Block until every child serves. False: a signal came first.

        Watches channels and exits together, without a deadline (SS-3, SS-6). The exit of any child
        is a failure, also of one that was ready: the others may wait for it in a collective (SS-5).
        """
        while len(self.state.ready) < len(self.children):
            if not self._wait():
                return False
        return True

    def until_stopped(self) -> None:
        """Block until a signal comes."""
        while self._wait():
            pass

    def drain(self, *, shutdown_timeout_s: float) -> None:
        """Let the frontend finish or end its requests while the ranks still serve them."""
        if self.frontend is not None:
            self.frontend.send(Stop())
            within_s = shutdown_timeout_s + self.supervisor.grace.frontend_s
            self.supervisor.wait_exits((self.frontend,), within_s=within_s)

    def _wait(self) -> bool:
        """Handle the next events. False: a signal was among them."""
        events = self.supervisor.wait_events()
        self._raise_faults(events)
        for event in events:
            if isinstance(event, MessageReceived):
                self._handle(event)
        return not any(isinstance(event, SignalsReceived) for event in events)

    def _raise_faults(self, events: tuple[Event, ...]) -> None:
        faults = [found for event in events if (found := fault_of(event)) is not None]
        if self.relay is not None and self.relay.name in self.state.ready:
            # Metric outputs are no reason to stop answering requests.
            for _, fault in (found for found in faults if found[0] is self.relay):
                log.error("%s: %s; metric outputs get nothing from here on", self.relay.name, fault.text)
            faults = [found for found in faults if found[0] is not self.relay]
        for child, fault in faults:
            self.supervisor.record_fault(child, fault)
        if faults:
            child, fault = faults[0]
            raise ChildFailed(f"{child.name}: {fault.text}")

    def _handle(self, received: MessageReceived) -> None:
        match received.message:
            case Bound(address=address):
                for rank in self.ranks:
                    rank.send(Dial(address=address))
            case Ready() as ready:
                self.state.ready[received.child.name] = ready
            case LoadProgress(what=what, done=done, total=total):
                shown = what if len(self.ranks) == 1 else f"{received.child.name}: {what}"
                self.progress.step(shown, done, total)


def fault_of(event: Event) -> tuple[ChildProcess, Failed] | None:
    """What `event` says is wrong with a child that nobody asked to end."""
    match event:
        case MessageReceived(child=child, message=Failed() as fault):
            return child, fault
        case MessageReceived(child=child, message=Exiting(why=why)):
            return child, Failed(text=why, consequence=True)
        case ChannelClosed(child=child):
            return child, Failed(text=CHANNEL_CLOSED)
        case ChildExited(child=child, status=status):
            return child, Failed(text=exit_text(status))
    return None
