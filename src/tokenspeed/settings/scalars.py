"""YAML scalars: text to a value and back, by the 1.2 core schema."""

from __future__ import annotations

import enum
import re

import yaml


class Yaml12(yaml.SafeLoader):
    """YAML with the 1.2 core schema for plain scalars.

    ``1e3`` is a number; ``yes``, ``no``, ``on`` and ``off`` are text, and so are dates, ``010`` and
    ``1:30``, which the 1.1 rules turn into other things than were written.
    """


# the class's own table: without it, add_implicit_resolver would start from the 1.1 rules
Yaml12.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+|[0-9_]+\.[0-9_]*|\.[0-9_]+(?:[eE][-+]?[0-9]+)?|\.inf)|\.nan)$",
        list("-+.0123456789"),
    ),
):
    Yaml12.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


def scalar(text: str) -> object:
    """What `text` stands for where a YAML value may stand; itself if it is no YAML."""
    try:
        return yaml.load(text, Loader=Yaml12)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError):
        return text


def shown(value: object) -> str:
    """A value in the words of the file it came from."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return str(value.value)
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
