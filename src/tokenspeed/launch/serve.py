"""`serve`: start a deployment's processes, watch them, stop them; the one entry of every deployment (SS-1).

The launcher process owns the process tree and does nothing else: it imports no torch, and decides
nothing about requests.
"""

from __future__ import annotations

import importlib.util
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import TextIO

from tokenspeed.checkpoint.progress import Progress
from tokenspeed.checkpoint.sources import ResolvedModel, resolve_model
from tokenspeed.errors import SettingsError
from tokenspeed.launch.console import faults_text, ready_text
from tokenspeed.launch.deployment import ChildFailed, Deployment
from tokenspeed.launch.messages import MetricsPlace
from tokenspeed.launch.signals import interrupted_by, open_signal_pipe
from tokenspeed.launch.starter import Programs, Starter, StartRanks, start_rank_host
from tokenspeed.launch.supervisor import GracePeriods, Supervisor
from tokenspeed.settings.choices import Gateway
from tokenspeed.settings.model import MetricsSettings, ModelSettings, ServerSettings, Settings, StorageKind
from tokenspeed.telemetry.logs import start_logging

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(
    settings: Settings,
    *,
    progress: Progress,
    headless: bool = False,
    out: TextIO | None = None,
    err: TextIO | None = None,
    programs: Programs | None = None,
    grace: GracePeriods | None = None,
    resolve: Callable[[ModelSettings, Progress], ResolvedModel] = resolve_model,
    start_ranks: StartRanks = start_rank_host,
) -> int:
    """Serve until SIGINT or SIGTERM; a second signal cuts the drain short.

    Args:
        headless: ranks only; a foreign frontend binds ``wire.handshake``.
        out, err: where people read; default: the process's own.
        programs, grace, resolve, start_ranks: what tests and embedders replace.
    Returns: 0 after an orderly stop; 1 if a child failed, exited unasked or had to be killed.
    Raises: SettingsError, ModelError: before any process was started. KeyboardInterrupt likewise.
    """
    out, err = out or sys.stdout, err or sys.stderr
    programs = programs or Programs()
    with ExitStack() as stack:
        _check(settings, headless=headless, gateway_package=programs.gateway_package)
        logs = start_logging(settings.log, err)
        stack.callback(logs.close)
        listener = None if headless else stack.enter_context(_listen(settings.server))
        with interrupted_by(signal.SIGTERM):
            resolved = resolve(settings.model, progress)
        pipe = open_signal_pipe()
        stack.callback(pipe.close)
        stack.enter_context(pipe.catching(*STOP_SIGNALS))
        supervisor = Supervisor(signals=pipe, grace=grace or grace_for(settings))
        try:
            with ExitStack() as started:
                metrics = _metrics_place(settings.metrics, started)
                started.callback(supervisor.close)
                starter = Starter(
                    supervisor=supervisor,
                    settings=settings,
                    resolved=resolved,
                    programs=programs,
                    start_ranks=start_ranks,
                    metrics=metrics,
                )
                deployment = Deployment(
                    supervisor=supervisor,
                    relay=starter.relay(),
                    ranks=starter.ranks(),
                    frontend=starter.frontend(listener),
                    progress=progress,
                )
                if deployment.until_ready():
                    out.write(ready_text(settings, resolved, deployment.state.ready))
                    out.flush()
                    deployment.until_stopped()
                    deployment.drain(shutdown_timeout_s=settings.server.shutdown_timeout_s)
        except ChildFailed:
            pass  # told below, behind all that the cleanup has found out
        err.write(faults_text(supervisor.state.faults))
        err.flush()
        return 1 if supervisor.state.faults else 0


def grace_for(settings: Settings) -> GracePeriods:
    """Ranks may finish what they store."""
    stores = settings.storage.backend is not StorageKind.NONE
    return GracePeriods(ranks_s=GracePeriods().ranks_s + (settings.storage.shutdown_s if stores else 0.0))


def _check(settings: Settings, *, headless: bool, gateway_package: str) -> None:
    """What can be said before anything is opened. Raises: SettingsError."""
    if settings.server.gateway is Gateway.SMG:
        if headless:
            raise SettingsError("server.gateway: a headless engine has a frontend of its own; leave one of the two out")
        if importlib.util.find_spec(gateway_package) is None:
            raise SettingsError(
                "server.gateway: smg is not installed here; install it with: pip install 'tokenspeed-py[smg]'"
            )
    if settings.parallel.tensor * settings.parallel.pipeline > 1:
        raise SettingsError("parallel.tensor, parallel.pipeline: one rank a replica is all that this build starts")
    if headless and settings.wire.handshake is None:
        raise SettingsError("wire.handshake: a headless engine needs the address of the frontend it serves")
    if not headless and settings.wire.handshake is not None:
        raise SettingsError("wire.handshake: names a foreign frontend, which is served with --headless only")


def _listen(server: ServerSettings) -> socket.socket:
    """The HTTP socket, taken before anything expensive: a port in use is known at once, and stays ours.

    Clients that connect during the start wait in its backlog. A gateway brings a socket of its own: for it
    the port is only reserved.
    """
    from tokenspeed.frontend.server import BACKLOG, bind_socket

    sock = bind_socket(server.host, server.port, stalled_s=server.request_timeout_s)
    try:
        if server.gateway is Gateway.OWN:
            sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        text = f"server.port: cannot listen on {server.host}:{server.port}: {exc.strerror or exc}"
        raise SettingsError(text) from exc
    return sock


def _metrics_place(settings: MetricsSettings, lifetime: ExitStack) -> MetricsPlace | None:
    """A folder for the ranks' files and the relay's socket, removed when every process has exited."""
    relayed = settings.outputs or settings.port is not None
    if not settings.engine:
        if relayed:
            raise SettingsError(
                "metrics.engine: metrics.outputs and metrics.port show what ranks measure; set it to true"
            )
        return None
    directory = lifetime.enter_context(tempfile.TemporaryDirectory(prefix="tokenspeed-metrics-"))
    return MetricsPlace(directory=directory, relay=f"ipc://{directory}/relay" if relayed else None)
