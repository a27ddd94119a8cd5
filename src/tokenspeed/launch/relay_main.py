"""The metrics relay's process: create the outputs, pass on what ranks measure until told to stop."""

from __future__ import annotations

import sys
from contextlib import ExitStack

from prometheus_client import start_http_server

from tokenspeed.errors import SettingsError
from tokenspeed.launch.child import Parent, run_child
from tokenspeed.launch.messages import Ready, StartRelay
from tokenspeed.settings.model import MetricsSettings
from tokenspeed.telemetry.outputs import open_outputs
from tokenspeed.telemetry.registry import rank_files_registry
from tokenspeed.telemetry.relay import open_relay


def run_relay(parent: Parent, start: StartRelay) -> None:
    settings, address = start.settings.metrics, start.metrics.relay
    if address is None:
        raise SettingsError("metrics.outputs: the start message names no address to listen on")
    with ExitStack() as lifetime:
        relay = open_relay(address, open_outputs(settings.outputs), queue=settings.queue)
        lifetime.callback(relay.close)
        url = "" if settings.port is None else _serve_files(settings, start.metrics.directory, lifetime)
        with parent.serving(relay.stop):
            parent.report(Ready(url=url))
            relay.run()


def _serve_files(settings: MetricsSettings, directory: str, lifetime: ExitStack) -> str:
    """Answer scrapes with what the ranks' files hold; returns the URL."""
    try:
        server, thread = start_http_server(settings.port or 0, settings.host, rank_files_registry(directory))
    except OSError as exc:
        raise SettingsError(f"metrics.port: cannot listen on {settings.host}:{settings.port}: {exc.strerror}") from exc
    lifetime.callback(thread.join)
    lifetime.callback(server.server_close)
    lifetime.callback(server.shutdown)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{server.server_port}/metrics"


def main() -> int:
    return run_child(sys.argv, StartRelay, run_relay)


if __name__ == "__main__":
    sys.exit(main())
