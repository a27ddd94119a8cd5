"""`serve`: start a deployment's processes, watch them, stop them; the one entry of every deployment (SS-1).

The launcher process owns the process tree and does nothing else: it imports no torch, and decides
nothing about requests.
"""

from __future__ import annotations

import importlib.util
import logging
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol, TextIO

import attrs

from tokenspeed.checkpoint.progress import Progress
from tokenspeed.checkpoint.sources import ResolvedModel, resolve_model
from tokenspeed.errors import SettingsError, TokenspeedError
from tokenspeed.launch.family import (
    SILENT,
    Child,
    Closed,
    Family,
    Left,
    Patience,
    Report,
    Said,
    Signalled,
    how_it_ended,
)
from tokenspeed.launch.orders import (
    Advanced,
    Bound,
    Dial,
    Ended,
    Failed,
    FrontendOrder,
    GatewayOrder,
    MetricsPlace,
    RankOrder,
    Ready,
    RelayOrder,
    Stop,
)
from tokenspeed.launch.signals import interrupted_by, open_signal_pipe
from tokenspeed.settings.choices import Gateway
from tokenspeed.settings.model import MetricsSettings, ModelSettings, ServerSettings, Settings, StorageKind
from tokenspeed.telemetry.logs import start_logging

log = logging.getLogger("tokenspeed.launch")
RELAY = "metrics relay"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ChildFailed(TokenspeedError):
    """A process of the deployment failed or ended unasked; unwinds the launcher (SS-8)."""


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
        family: Family,
        settings: Settings,
        resolved: ResolvedModel,
        *,
        count: int,
        handshake: str | None,
        program: Sequence[str],
        metrics: MetricsPlace | None,
    ) -> tuple[Child, ...]: ...


def start_rank_host(
    family: Family,
    settings: Settings,
    resolved: ResolvedModel,
    *,
    count: int,
    handshake: str | None,
    program: Sequence[str],
    metrics: MetricsPlace | None = None,
) -> tuple[Child, ...]:
    """Start all local ranks, waiting for none (SS-2). Every deployment starts its ranks here (SS-1).

    Args:
        handshake: of a foreign frontend; None: our own, whose address follows when it is bound.
        metrics: where they leave what they measure; None: they measure nothing.
    """
    # prometheus-client looks for this name when it is imported, and keeps its numbers in files there.
    environment = {} if metrics is None else {"PROMETHEUS_MULTIPROC_DIR": metrics.directory}
    return tuple(
        family.start(
            f"rank {index}",
            program,
            RankOrder(
                settings=settings, resolved=resolved, index=index, count=count, handshake=handshake, metrics=metrics
            ),
            environment=environment,
        )
        for index in range(count)
    )


start_rust_host = start_rank_host
"""The name under which operators' tools know it."""


@attrs.define(eq=False)
class LaunchState:
    """Writer: Launch. Names of children that are ready, and what they told."""

    ready: dict[str, Ready] = attrs.field(factory=dict[str, Ready])


@attrs.frozen(kw_only=True, eq=False)
class Launch:
    """A started deployment. Methods raise `ChildFailed`, and leave every cleanup to `Family.close`."""

    family: Family
    ranks: tuple[Child, ...]
    frontend: Child | None
    progress: Progress
    relay: Child | None = None
    state: LaunchState = attrs.field(factory=LaunchState)

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(child for child in (*self.ranks, self.frontend, self.relay) if child is not None)

    def until_ready(self) -> bool:
        """Block until every child serves. False: a signal came first.

        Watches channels and exits together, without a deadline (SS-3, SS-6). The end of any child
        is a failure, also of one that was ready: the others may wait for it in a collective (SS-5).
        """
        while len(self.state.ready) < len(self.children):
            if not self._hear():
                return False
        return True

    def until_stopped(self) -> None:
        """Block until a signal comes."""
        while self._hear():
            pass

    def drain(self, *, shutdown_timeout_s: float) -> None:
        """Let the frontend finish or end its requests while the ranks still serve them."""
        if self.frontend is not None:
            self.frontend.tell(Stop())
            within_s = shutdown_timeout_s + self.family.patience.frontend_s
            self.family.await_ends((self.frontend,), within_s=within_s)

    def _hear(self) -> bool:
        reports = self.family.hear()
        faults = [found for report in reports if (found := _fault_of(report)) is not None]
        if RELAY in self.state.ready:
            # Metric outputs are no reason to stop answering requests.
            for _, fault in (found for found in faults if found[0] is self.relay):
                log.error("%s: %s; metric outputs get nothing from here on", RELAY, fault.text)
            faults = [found for found in faults if found[0] is not self.relay]
        if faults:
            for child, fault in faults:
                self.family.note(child, fault)
            raise ChildFailed(f"{faults[0][0].name}: {faults[0][1].text}")
        for report in reports:
            if isinstance(report, Said):
                self._heed(report)
        return not any(isinstance(report, Signalled) for report in reports)

    def _heed(self, said: Said) -> None:
        match said.message:
            case Bound(address=address):
                for rank in self.ranks:
                    rank.tell(Dial(address=address))
            case Ready() as ready:
                self.state.ready[said.child.name] = ready
            case Advanced(what=what, done=done, total=total):
                shown = what if len(self.ranks) == 1 else f"{said.child.name}: {what}"
                self.progress.step(shown, done, total)


def serve(
    settings: Settings,
    *,
    progress: Progress,
    headless: bool = False,
    out: TextIO | None = None,
    err: TextIO | None = None,
    programs: Programs | None = None,
    patience: Patience | None = None,
    resolve: Callable[[ModelSettings, Progress], ResolvedModel] = resolve_model,
    start_ranks: StartRanks = start_rank_host,
) -> int:
    """Serve until SIGINT or SIGTERM; a second signal cuts the drain short.

    Args:
        headless: ranks only; a foreign frontend binds ``wire.handshake``.
        out, err: where people read; default: the process's own.
        programs, patience, resolve, start_ranks: what tests and embedders replace.
    Returns: 0 after an orderly stop; 1 if a child failed, ended unasked or had to be killed.
    Raises: SettingsError, ModelError: before any process was started. KeyboardInterrupt likewise.
    """
    say, complain = out or sys.stdout, err or sys.stderr
    commands = programs or Programs()
    with ExitStack() as stack:
        _check(settings, headless=headless, gateway_package=commands.gateway_package)
        logs = start_logging(settings.log, complain)
        stack.callback(logs.close)
        listener = None if headless else stack.enter_context(_listen(settings.server))
        with interrupted_by(signal.SIGTERM):
            resolved = resolve(settings.model, progress)
        pipe = open_signal_pipe()
        stack.callback(pipe.close)
        stack.enter_context(pipe.catching(*STOP_SIGNALS))
        family = Family(signals=pipe, patience=patience or patience_for(settings))
        try:
            with ExitStack() as started:
                metrics = _metrics_place(settings.metrics, started)
                started.callback(family.close)
                _run(settings, resolved, family, listener, progress, commands, start_ranks, say, metrics)
        except ChildFailed:
            pass  # told below, behind all that the cleanup has found out
        return _verdict(family, complain)


def patience_for(settings: Settings) -> Patience:
    """Ranks may finish what they store."""
    stores = settings.storage.backend is not StorageKind.NONE
    return Patience(ranks_s=Patience().ranks_s + (settings.storage.shutdown_s if stores else 0.0))


def _run(
    settings: Settings,
    resolved: ResolvedModel,
    family: Family,
    listener: socket.socket | None,
    progress: Progress,
    programs: Programs,
    start_ranks: StartRanks,
    say: TextIO,
    metrics: MetricsPlace | None,
) -> None:
    """Start, wait for readiness, serve, drain. Raises: ChildFailed."""
    count = settings.parallel.data
    relay = None
    if metrics is not None and metrics.relay is not None:
        relay = family.start(RELAY, programs.relay, RelayOrder(settings=settings, metrics=metrics))
    ranks = start_ranks(
        family,
        settings,
        resolved,
        count=count,
        handshake=settings.wire.handshake,
        program=programs.rank,
        metrics=metrics,
    )
    frontend = None
    if listener is not None and settings.server.gateway is Gateway.SMG:
        port = listener.getsockname()[1]
        frontend = family.start(
            "gateway", programs.gateway, GatewayOrder(settings=settings, resolved=resolved, port=port)
        )
    elif listener is not None:
        order = FrontendOrder(
            settings=settings, resolved=resolved, engines=count, listener=listener.fileno(), metrics=metrics
        )
        frontend = family.start("frontend", programs.frontend, order, inherit=(listener.fileno(),))
        listener.close()  # the frontend's alone: when it stops accepting, nobody accepts
    launch = Launch(family=family, ranks=ranks, frontend=frontend, relay=relay, progress=progress)
    if not launch.until_ready():
        return
    say.write(_greeting(settings, resolved, launch.state.ready))
    say.flush()
    launch.until_stopped()
    launch.drain(shutdown_timeout_s=settings.server.shutdown_timeout_s)


def _metrics_place(settings: MetricsSettings, lifetime: ExitStack) -> MetricsPlace | None:
    """A folder for the ranks' files and the relay's socket, removed when every process has ended."""
    relayed = settings.outputs or settings.port is not None
    if not settings.engine:
        if relayed:
            raise SettingsError(
                "metrics.engine: metrics.outputs and metrics.port show what ranks measure; set it to true"
            )
        return None
    directory = lifetime.enter_context(tempfile.TemporaryDirectory(prefix="tokenspeed-metrics-"))
    return MetricsPlace(directory=directory, relay=f"ipc://{directory}/relay" if relayed else None)


def _check(settings: Settings, *, headless: bool, gateway_package: str) -> None:
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


def _fault_of(report: Report) -> tuple[Child, Failed] | None:
    match report:
        case Said(child=child, message=Failed() as fault):
            return child, fault
        case Said(child=child, message=Ended(why=why)):
            return child, Failed(text=why, consequence=True)
        case Closed(child=child):
            return child, Failed(text=SILENT)
        case Left(child=child, status=status):
            return child, Failed(text=how_it_ended(status))
    return None


def _verdict(family: Family, complain: TextIO) -> int:
    """Tell every fault once, consequences first and the root cause last; the exit status."""
    faults = family.state.faults

    def weight(name: str) -> tuple[bool, bool, int]:
        # A rank that dies takes its frontend along, and of several the earliest is the cause.
        return not faults[name].consequence, name.startswith("rank"), -list(faults).index(name)

    for name in sorted(faults, key=weight):
        fault = faults[name]
        if fault.details:
            complain.write(fault.details.rstrip() + "\n")
        complain.write(f"{name}: {fault.text}\n")
    complain.flush()
    return 1 if faults else 0


def _greeting(settings: Settings, resolved: ResolvedModel, ready: dict[str, Ready]) -> str:
    """What the operator reads when the deployment serves: what, where, and a line to try."""
    lines = []
    for name, told in ready.items():
        if told.info is not None:
            info = told.info
            pool = info.kv_capacity_tokens or info.num_blocks * info.block_size
            lines.append(
                f"{name}: {info.model} ({info.dtype}), up to {info.max_model_len} tokens a request, "
                f"KV pool of {pool} tokens, {info.max_num_seqs} requests at once"
            )
    if RELAY in ready and ready[RELAY].url:
        lines.append(f"metrics of the ranks at {ready[RELAY].url}")
    url = next((told.url for name, told in ready.items() if told.url and name != RELAY), "")
    if not url:
        lines.append(f"serving {resolved.served_name} to the frontend at {settings.wire.handshake}")
        return "\n".join(lines) + "\n"
    reach = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    key = " -H 'authorization: Bearer YOUR_KEY'" if settings.server.api_key else ""
    asked = f'"model": "{resolved.served_name}", "prompt": "The capital of France is"'
    body = shlex.quote(f'{{{asked}, "max_tokens": 16, "temperature": 0}}')
    lines.append(f"serving {resolved.served_name} at {url}")
    lines.append(f"try: curl {reach}/v1/completions -H 'content-type: application/json'{key} -d {body}")
    return "\n".join(lines) + "\n"
