"""``tokenspeed serve``: hand the settings to the launcher."""

from __future__ import annotations

import argparse
from typing import Protocol, TextIO

from tokenspeed.checkpoint.progress import Progress
from tokenspeed.cli.console import Console
from tokenspeed.cli.options import add_settings, add_target, loaded_settings
from tokenspeed.cli.progress import progress_on
from tokenspeed.settings.model import Settings


class Serve(Protocol):
    """See `launch.serve.serve`."""

    def __call__(self, settings: Settings, *, progress: Progress, headless: bool, out: TextIO, err: TextIO) -> int: ...


def arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument(
        "--headless", action="store_true", help="start the engine only; a foreign frontend binds wire.handshake"
    )
    add_settings(parser)


def run(options: argparse.Namespace, console: Console, *, serve: Serve | None = None) -> int:
    settings = loaded_settings(options, console).settings
    start = serve or _launcher()
    progress = progress_on(console.stderr, settings.log.format)
    return start(settings, progress=progress, headless=options.headless, out=console.stdout, err=console.stderr)


def _launcher() -> Serve:
    from tokenspeed.launch.serve import serve

    return serve
