"""Start the processes of a deployment: which there are, by what command, and what each is told first."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from typing import Protocol

import attrs

from tokenspeed.checkpoint.sources import ResolvedModel
from tokenspeed.launch.messages import MetricsPlace, StartFrontend, StartGateway, StartRank, StartRelay
from tokenspeed.launch.supervisor import ChildProcess, Supervisor
from tokenspeed.settings.choices import Gateway
from tokenspeed.settings.model import Settings

RELAY = "metrics relay"


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", name)


@attrs.frozen(kw_only=True)
class Programs:
    """Command lines of the children; each takes two more arguments, see `child.run_child`."""

    rank: tuple[str, ...] = _module("tokenspeed.launch.rank_main")
    frontend: tuple[str, ...] = _module("tokenspeed.launch.frontend_main")
    relay: tuple[str, ...] = _module("tokenspeed.launch.relay_main")
    gateway: tuple[str, ...] = _module("tokenspeed.launch.gateway_main")
    gateway_package: str = "smg"


class StartRanks(Protocol):
    """See `start_rank_host`."""

    def __call__(
        self,
        supervisor: Supervisor,
        settings: Settings,
        resolved: ResolvedModel,
        *,
        count: int,
        handshake: str | None,
        program: Sequence[str],
        metrics: MetricsPlace | None,
    ) -> tuple[ChildProcess, ...]: ...


def start_rank_host(
    supervisor: Supervisor,
    settings: Settings,
    resolved: ResolvedModel,
    *,
    count: int,
    handshake: str | None,
    program: Sequence[str],
    metrics: MetricsPlace | None = None,
) -> tuple[ChildProcess, ...]:
    """Start all local ranks, waiting for none (SS-2). Every deployment starts its ranks here (SS-1).

    Args:
        handshake: of a foreign frontend; None: our own, whose address follows when it is bound.
        metrics: where they leave what they measure; None: they measure nothing.
    """
    # prometheus-client looks for this name when it is imported, and keeps its numbers in files there.
    environment = {} if metrics is None else {"PROMETHEUS_MULTIPROC_DIR": metrics.directory}
    return tuple(
        supervisor.start(
            f"rank {index}",
            program,
            StartRank(
                settings=settings, resolved=resolved, index=index, count=count, handshake=handshake, metrics=metrics
            ),
            environment=environment,
        )
        for index in range(count)
    )


start_rust_host = start_rank_host
"""The name under which operators' tools know it."""


@attrs.frozen(kw_only=True, eq=False)
class Starter:
    """Starts each kind of process once, as the settings ask for it; waits for none.

    Attributes:
        metrics: where ranks leave what they measure; None: they measure nothing.
    """

    supervisor: Supervisor
    settings: Settings
    resolved: ResolvedModel
    programs: Programs
    start_ranks: StartRanks
    metrics: MetricsPlace | None

    def relay(self) -> ChildProcess | None:
        if self.metrics is None or self.metrics.relay is None:
            return None
        message = StartRelay(settings=self.settings, metrics=self.metrics)
        return self.supervisor.start(RELAY, self.programs.relay, message)

    def ranks(self) -> tuple[ChildProcess, ...]:
        return self.start_ranks(
            self.supervisor,
            self.settings,
            self.resolved,
            count=self.settings.parallel.data,
            handshake=self.settings.wire.handshake,
            program=self.programs.rank,
            metrics=self.metrics,
        )

    def frontend(self, listener: socket.socket | None) -> ChildProcess | None:
        """Our own or a gateway; None without a listener: a foreign one is there already."""
        if listener is None:
            return None
        if self.settings.server.gateway is Gateway.SMG:
            port = listener.getsockname()[1]
            gateway = StartGateway(settings=self.settings, resolved=self.resolved, port=port)
            return self.supervisor.start("gateway", self.programs.gateway, gateway)
        message = StartFrontend(
            settings=self.settings,
            resolved=self.resolved,
            engines=self.settings.parallel.data,
            listener=listener.fileno(),
            metrics=self.metrics,
        )
        child = self.supervisor.start("frontend", self.programs.frontend, message, inherit=(listener.fileno(),))
        listener.close()  # the frontend's alone: when it stops accepting, nobody accepts
        return child
