"""The process that starts the SMG gateway in place of our frontend, watches it, and passes the stop on to it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.errors import TokenspeedError
from tokenspeed.frontend.text.tokenizer_files import write_tokenizer_folder
from tokenspeed.launch.child import Parent, run_child
from tokenspeed.launch.messages import Bound, Ready, StartGateway
from tokenspeed.settings.model import Settings

GATEWAY = ("-P", "-m", "tokenspeed.launch.gateway_process")
LOOPBACK = "127.0.0.1"
ASK_EVERY_S = 0.2
LEVELS = {"DEBUG": "info", "INFO": "warn", "WARNING": "warn"}
"""Our log level to the gateway's: it writes a line a request where ours writes none."""


class GatewayEnded(TokenspeedError):
    """The gateway's process ended although nobody asked it to, or badly."""


@contextlib.contextmanager
def reserved_port(host: str = LOOPBACK, port: int = 0) -> Iterator[int]:
    """A port that the kernel gives to nobody else meanwhile, and that the gateway can listen on.

    Bound and not listening: on Linux another socket may then be bound to the same port, and listen.
    """
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        yield sock.getsockname()[1]


def model_name(served_name: str) -> str:
    """What the gateway calls the model: the folder it reads, below its working directory."""
    path = PurePosixPath(served_name)
    inside = served_name and not path.is_absolute() and not {"..", "."} & set(path.parts)
    return str(path) if inside else "model"


def gateway_arguments(settings: Settings, *, model: str, port: int, wire: str, metrics_port: int) -> list[str]:
    """The gateway's command line; ``server.gateway_args`` come last and win."""
    server = settings.server
    return [
        *("launch", "--backend", "tokenspeed", "--worker-urls", wire, "--model-path", model),
        *("--host", server.host, "--port", str(port)),
        *("--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics_port)),
        *("--health-check-interval-secs", "2", "--load-monitor-interval", "2"),
        *("--max-payload-size", str(int(server.max_body_mib * 1024 * 1024))),
        *("--request-timeout-secs", str(math.ceil(server.request_timeout_s))),
        *("--shutdown-settle-secs", "0"),
        *("--shutdown-grace-period-secs", str(math.ceil(server.shutdown_timeout_s))),
        *("--log-level", LEVELS.get(settings.log.level.upper(), "error")),
        *server.gateway_args,
    ]


def run_gateway(parent: Parent, start: StartGateway) -> None:
    """Everything between the start message and the end of this process."""
    settings = start.settings
    with (
        tempfile.TemporaryDirectory(prefix="tokenspeed-gateway-") as folder,
        reserved_port() as wire_port,
        reserved_port() as metrics_port,
    ):
        wire = f"tcp://{LOOPBACK}:{wire_port}"
        model = model_name(start.resolved.served_name)
        write_tokenizer_folder(open_checkpoint(start.resolved), Path(folder) / model)
        command = [sys.executable, *GATEWAY, str(os.getpid())]
        command += gateway_arguments(settings, model=model, port=start.port, wire=wire, metrics_port=metrics_port)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        if settings.server.api_key is not None:
            environment["SMG_API_KEY"] = settings.server.api_key
        # What it prints is for operators, as our own log lines are.
        process = subprocess.Popen(  # noqa: S603 - our own interpreter
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno()
        )
        parent.report(Bound(address=wire))
        with parent.serving(process.terminate):
            url = f"http://{settings.server.host}:{start.port}"
            if _until_ready(process, url):
                parent.report(Ready(url=url))
            status = process.wait()
    # A gateway that dies takes the ranks along, so the stop may be here before its end was seen.
    if not parent.stopping or status not in (0, -signal.SIGTERM):
        raise GatewayEnded(f"the gateway ended with status {status}")


def _until_ready(process: subprocess.Popen[bytes], url: str) -> bool:
    """Whether the gateway came to serve; it tells only whoever asks. False: it ended."""
    reach = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    while True:
        try:
            process.wait(ASK_EVERY_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{reach}/readiness", timeout=5.0).close()  # noqa: S310 - http
                return True
        else:
            return False


def main(argv: Sequence[str] = ()) -> int:
    return run_child(argv or sys.argv, StartGateway, run_gateway)


if __name__ == "__main__":
    sys.exit(main())
