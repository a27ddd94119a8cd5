"""``tokenspeed version``."""

from __future__ import annotations

import argparse

from tokenspeed import __version__
from tokenspeed.cli.console import Console


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # it has none of its own


def run(options: argparse.Namespace, console: Console) -> int:
    del options
    console.say(f"tokenspeed {__version__}")
    return 0
