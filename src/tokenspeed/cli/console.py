"""What a command talks to: streams, environment, and how it reports progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TextIO

import attrs


@attrs.frozen(kw_only=True, eq=False)
class Console:
    """The terminal, or what stands in for it.

    Attributes:
        environ: where ``TOKENSPEED_…`` variables are looked up.
    """

    stdin: TextIO
    stdout: TextIO
    stderr: TextIO
    environ: Mapping[str, str]

    def say(self, text: str) -> None:
        """A line of the command's result."""
        self.stdout.write(text + "\n")

    def write(self, text: str) -> None:
        """A piece of the command's result, visible at once."""
        self.stdout.write(text)
        self.stdout.flush()

    def note(self, text: str) -> None:
        """A line for people, kept apart from the result."""
        self.stderr.write(text + "\n")
        self.stderr.flush()

    @property
    def interactive(self) -> bool:
        return self.stdin.isatty() and self.stdout.isatty()


def real_console() -> Console:
    return Console(stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr, environ=os.environ)
