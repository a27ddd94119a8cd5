"""Entry point: reads arguments, runs one command, turns errors into text and an exit status."""

from __future__ import annotations

import argparse
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

import attrs

from tokenspeed.cli.console import Console, real_console
from tokenspeed.cli.options import Parser
from tokenspeed.errors import SettingsError, TokenspeedError

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


@attrs.frozen
class Command:
    """A subcommand. Its module has ``arguments(parser)`` and ``run(options, console) -> int``.

    Modules import the engine inside `run` only: settings and help cost no torch.
    """

    module: str
    summary: str


COMMANDS: Mapping[str, Command] = {
    "serve": Command("serve", "serve a model over HTTP (OpenAI API)"),
    "generate": Command("generate", "generate text for prompts, without a server"),
    "chat": Command("chat", "talk to a model in the terminal"),
    "bench": Command("bench", "measure a running server, or an engine in this process"),
    "config": Command("config", "print the resolved settings, where each value is from, or the schema"),
    "check": Command("check", "look at machine, model and ports; say what would run"),
    "env": Command("env", "print versions and facts of this machine for a bug report"),
    "version": Command("version", "print the version"),
}


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run a command line (None: the process's own) and return the exit status.

    0 done, 1 failed, 2 wrong arguments or settings, 130 interrupted.
    """
    talk = console or real_console()
    try:
        options = parse(arguments)
    except SystemExit as exc:  # argparse: --help, or wrong arguments, both told already
        return exc.code if isinstance(exc.code, int) else MISUSED
    return _guarded(options.run, options, talk)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The chosen command's options, with `run` among them. Raises: SystemExit, as argparse does."""
    parser = Parser(prog="tokenspeed", description="An LLM inference engine.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    inner: dict[str, Parser] = {}
    words = list(arguments) if arguments is not None else None
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.summary, description=command.summary)
        module = import_module(f"tokenspeed.cli.{command.module}")
        module.arguments(sub)
        sub.add_argument("--debug", action="store_true", help="show the Python traceback of an error")
        sub.set_defaults(run=module.run, command=name)
        inner[name] = sub
    options, unknown = parser.parse_known_args(words)
    sub = inner[options.command]
    sub.refuse_unknown(unknown, sub.option_names())
    return options


def _guarded(run: Callable[[argparse.Namespace, Console], int], options: argparse.Namespace, console: Console) -> int:
    try:
        status = run(options, console)
        console.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is done; what is still buffered goes nowhere, also at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), console.stdout.fileno())
        return OK
    except TokenspeedError as exc:
        if options.debug:
            console.note(traceback.format_exc().rstrip())
        else:
            console.note(str(exc))
        return MISUSED if isinstance(exc, SettingsError) else FAILED
    return status


def _version() -> str:
    from tokenspeed import __version__

    return f"tokenspeed {__version__}"
