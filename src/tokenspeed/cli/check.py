"""``tokenspeed check``: would `serve` start here, and what would it run?

Looks only: nothing is downloaded and no weights are read, unless ``--load`` asks for the whole start.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from tokenspeed.cli.console import Console
from tokenspeed.cli.engine import OpenEngine, open_engine
from tokenspeed.cli.options import add_settings, add_target, loaded_settings
from tokenspeed.errors import TokenspeedError
from tokenspeed.settings.model import Settings

if TYPE_CHECKING:
    from tokenspeed.checkpoint.checkpoint import Checkpoint

Survey = Callable[[Settings, "Checkpoint"], tuple[str, ...]]
"""What the device side would decide for a checkpoint, as lines; raises SettingsError if it does not fit."""

REMOTE = ("pypi:", "hf:")


@attrs.frozen
class Finding:
    """One line of the report; a problem makes the command fail."""

    what: str
    text: str
    problem: bool = False


def arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--load", action="store_true", help="fetch and load the model and compute one token")
    add_settings(parser)


def run(
    options: argparse.Namespace, console: Console, *, engine: OpenEngine = open_engine, survey: Survey | None = None
) -> int:
    settings = loaded_settings(options, console).settings
    findings = [Finding("settings", "valid")]
    findings += model_findings(settings, survey or _device_survey)
    findings.append(port_finding(settings))
    if options.load:
        findings.append(load_finding(options, console, engine))
    for finding in findings:
        console.say(f"{'problem' if finding.problem else 'ok':8} {finding.what}: {finding.text}")
    return 1 if any(finding.problem for finding in findings) else 0


def model_findings(settings: Settings, survey: Survey) -> list[Finding]:
    """The model's own facts, and what memory and threads would be, if its files are here."""
    from tokenspeed.checkpoint.open import open_checkpoint
    from tokenspeed.checkpoint.progress import NoProgress
    from tokenspeed.checkpoint.sources import resolve_model

    source = settings.model.source
    here = attrs.evolve(settings.model, offline=True)
    try:
        resolved = resolve_model(here, NoProgress())
    except TokenspeedError as exc:
        if source.startswith(REMOTE) and not settings.model.offline:
            return [Finding("model", f"{source} is not on this machine yet; serve would download it")]
        return [Finding("model", str(exc), problem=True)]
    try:
        checkpoint = open_checkpoint(resolved)
    except TokenspeedError as exc:
        return [Finding("model", str(exc), problem=True)]
    config = checkpoint.config
    found = [
        Finding("model", f"{resolved.served_name}: {resolved.path or 'random weights'}"),
        Finding(
            "model",
            f"{config.model_type}, {config.num_layers} layers, hidden {config.hidden_size}, vocabulary "
            f"{config.vocab_size:,}, {config.max_positions:,} positions"
            f"{'' if checkpoint.chat_template else '; no chat template: chat requests would be refused'}",
        ),
    ]
    try:
        return found + [Finding("device", line) for line in survey(settings, checkpoint)]
    except TokenspeedError as exc:
        return [*found, Finding("device", str(exc), problem=True)]


def port_finding(settings: Settings) -> Finding:
    """Whether the server's address can be bound now."""
    host, port = settings.server.host, settings.server.port
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as exc:
        return Finding("port", f"server.host {host}, server.port {port}: {exc.strerror or exc}", problem=True)
    return Finding("port", f"{host}:{port} is free" if port else f"{host}: the kernel picks a port")


def load_finding(options: argparse.Namespace, console: Console, engine: OpenEngine) -> Finding:
    """A whole start and one greedy token."""
    from tokenspeed.frontend.options import SamplingOptions

    try:
        with engine(options, console) as talker:
            done = talker.generate(["The"], SamplingOptions(max_tokens=1, temperature=0.0, ignore_eos=True))
    except TokenspeedError as exc:
        return Finding("load", str(exc), problem=True)
    return Finding("load", f"the model is loaded and continues 'The' with {done[0].choices[0].text!r}")


def _device_survey(settings: Settings, checkpoint: Checkpoint) -> tuple[str, ...]:
    from tokenspeed.compose.engine import survey

    return survey(settings, checkpoint)


__all__ = ["Finding", "arguments", "model_findings", "port_finding", "run"]
