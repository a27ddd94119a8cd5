"""The engine as `generate` and `chat` use it, and how they get one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tokenspeed.cli.console import Console
from tokenspeed.cli.options import loaded_settings
from tokenspeed.cli.progress import progress_on

if TYPE_CHECKING:  # a command that needs no engine starts without torch
    from tokenspeed.compose.offline import Completion
    from tokenspeed.compose.offline_inputs import Message, Prompt
    from tokenspeed.frontend.generation import ChoiceDelta
    from tokenspeed.frontend.options import SamplingOptions


class Served(Protocol):
    """What the terminal commands ask about a model."""

    @property
    def vocab_size(self) -> int: ...


class Talker(Protocol):
    """What the terminal commands need of `tokenspeed.Engine`."""

    @property
    def info(self) -> Served: ...

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingOptions) -> Sequence[Completion]: ...

    def chat_stream(
        self, messages: Sequence[Message], sampling: SamplingOptions
    ) -> Generator[ChoiceDelta, None, None]: ...


OpenEngine: TypeAlias = Callable[[argparse.Namespace, Console], AbstractContextManager[Talker]]


def let_threads_sleep() -> None:
    """Have this process's compute threads sleep between steps, unless the user said what they do.

    A command's process is ours, unlike the one of a program that uses `tokenspeed.Engine`. The runtime reads the
    variable when torch is first imported; later it changes nothing, and nothing is changed.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextmanager
def open_engine(options: argparse.Namespace, console: Console) -> Iterator[Talker]:
    """Raises: SettingsError, ModelError."""
    settings = loaded_settings(options, console).settings
    let_threads_sleep()
    with closing(progress_on(console.stderr)) as progress:
        from tokenspeed.compose.offline import Engine

        engine = Engine(settings, progress=progress)
    with engine:
        yield engine
