"""``tokenspeed chat``: a conversation in the terminal, or with a script on standard input."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import TYPE_CHECKING

from tokenspeed.cli.console import Console
from tokenspeed.cli.engine import OpenEngine, Talker, open_engine
from tokenspeed.cli.options import add_settings, add_target
from tokenspeed.cli.sampling import add_sampling, sampling_of
from tokenspeed.errors import RequestError

if TYPE_CHECKING:
    from tokenspeed.frontend.options import SamplingOptions

HELP = "/quit ends, /clear forgets the conversation, /system TEXT sets the system message, /help shows this"
PROMPT = "you> "
TEMPERATURE = 0.3
"""Of a conversation whose user did not choose one: small models ramble at 1."""


def arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling(parser)
    parser.set_defaults(temperature=TEMPERATURE)
    add_settings(parser)


def run(options: argparse.Namespace, console: Console, *, engine: OpenEngine = open_engine) -> int:
    sampling = sampling_of(options)
    with engine(options, console) as talker:
        if console.interactive:
            console.note(HELP)
        return _converse(talker, sampling, options.system, console)


def _converse(talker: Talker, sampling: SamplingOptions, system: str | None, console: Console) -> int:
    messages = _opening(system)
    while True:
        if console.interactive:
            console.write(PROMPT)
        line = console.stdin.readline()
        word, _, rest = line.strip().partition(" ")
        if not line or word in ("/quit", "/exit"):
            return 0
        if word == "/clear":
            messages = [message for message in messages if message["role"] == "system"]
        elif word == "/system":
            messages = _opening(rest)
        elif word.startswith("/"):
            console.note(HELP)
        elif word:
            messages.append({"role": "user", "content": line.strip()})
            _answer(talker, sampling, messages, console)


def _answer(talker: Talker, sampling: SamplingOptions, messages: list[dict[str, str]], console: Console) -> None:
    """Stream the answer and append it; an interrupted or refused turn leaves no trace."""
    pieces: list[str] = []
    try:
        with closing(talker.chat_stream(messages, sampling)) as deltas:
            for delta in deltas:
                pieces.append(delta.text)
                console.write(delta.text)
        console.write("\n")
        messages.append({"role": "assistant", "content": "".join(pieces)})
    except KeyboardInterrupt:
        console.note("\n(stopped)")
        messages.pop()
    except RequestError as exc:
        console.note(str(exc))
        messages.pop()


def _opening(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []
