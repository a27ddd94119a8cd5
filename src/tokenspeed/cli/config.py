"""``tokenspeed config``: what is set, by whom; and what could be."""

from __future__ import annotations

import argparse
import json
import re

from tokenspeed.cli.console import Console
from tokenspeed.cli.options import add_settings, add_target, loaded_settings
from tokenspeed.settings.keys import keys
from tokenspeed.settings.load import Loaded, origins
from tokenspeed.settings.model import Settings
from tokenspeed.settings.scalars import scalar
from tokenspeed.settings.schema import plain, plain_value, schema

PLAIN_TEXT = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./:@+-]*(?<!:)")
"""Text that needs no quotes in YAML, unless it reads as something else than text."""


def arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of a settings file instead")
    parser.add_argument("--json", action="store_true", help="print values and origins as JSON")
    add_settings(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    if options.schema:
        console.say(json.dumps(schema(), indent=2))
        return 0
    loaded = loaded_settings(options, console)
    if options.json:
        where = {key: {"source": o.source.value, "where": o.text} for key, o in origins(loaded).items()}
        console.say(json.dumps({"settings": plain(loaded.settings), "origins": where}, indent=2))
    else:
        console.say(as_yaml(loaded))
    return 0


def as_yaml(loaded: Loaded) -> str:
    """A settings file with every key, each with its origin as comment."""
    rows: list[tuple[str, str]] = []
    section = ""
    where = origins(loaded)
    for key in keys(Settings):
        if key.path[0] != section:
            section = key.path[0]
            rows.append((f"{section}:", ""))
        text = f"  {'.'.join(key.path[1:])}: {_yaml(plain_value(loaded.settings, key))}"
        rows.append((text, f"# {where[key.dotted].text}"))
    width = max(len(text) for text, _ in rows)
    return "\n".join(f"{text:{width}}  {comment}".rstrip() for text, comment in rows)


def _yaml(value: object) -> str:
    if isinstance(value, str) and PLAIN_TEXT.fullmatch(value) and scalar(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
