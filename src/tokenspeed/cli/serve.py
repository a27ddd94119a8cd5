"""``tokenspeed serve``: hand the settings to the launcher."""

from __future__ import annotations

import argparse

from tokenspeed.cli.console import Console
from tokenspeed.cli.options import add_settings, add_target, loaded_settings
from tokenspeed.cli.progress import progress_on


def arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument(
        "--headless", action="store_true", help="start the engine only; a foreign frontend binds wire.handshake"
    )
    add_settings(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    settings = loaded_settings(options, console).settings
    from tokenspeed.launch.serve import serve

    progress = progress_on(console.stderr)
    return serve(settings, progress=progress, headless=options.headless, out=console.stdout, err=console.stderr)
