"""Write the reference of every setting into docs/configuration.md; run it after a change there (`make docs`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from regions import filled, table

from tokenspeed.settings.expected import expected
from tokenspeed.settings.flags import FLAGS, Flag
from tokenspeed.settings.keys import Key, keys, sections
from tokenspeed.settings.model import Settings
from tokenspeed.settings.refusals import REFUSALS
from tokenspeed.settings.scalars import shown
from tokenspeed.settings.schema import plain_value, unit_of

FILE = Path(__file__).parents[1] / "docs" / "configuration.md"
DEFAULTS = Settings()


def takes(key: Key) -> str:
    """What the key expects, as its errors say it, with its unit."""
    unit = unit_of(key.path[-1])
    return expected(key.kind, key.validator) + (f" ({unit})" if unit else "") + (", or null" if key.nullable else "")


def default(key: Key) -> str:
    """The default as a file would have it."""
    value = plain_value(DEFAULTS, key)
    if isinstance(value, list):
        words = (json.dumps(item) if item == "*" else str(item) for item in value)  # YAML has another use for it
        return f"`[{', '.join(words)}]`"
    return f"`{value}`" if isinstance(value, str) and value else f"`{shown(value)}`".replace("''", '""')


def options(key: Key) -> str:
    """The flags that set the key; of those without a value, what they set."""
    return ", ".join(_option(flag) for flag in FLAGS if flag.key == key.dotted)


def _option(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names)
    return names if flag.value is None else f"{names} ({flag.value})"


def meaning(key: Key) -> str:
    return f"{key.help}; never shown" if key.secret else key.help


def section(name: str, cls: type, members: Sequence[Key]) -> str:
    rows = [(f"`{key.dotted}`", takes(key), default(key), meaning(key), options(key)) for key in members]
    what = (cls.__doc__ or "").split("\n")[0]
    return f"### {name}\n\n{what}\n\n{table(('key', 'takes', 'default', 'meaning', 'flags'), rows)}"


def reference() -> str:
    every = tuple(keys(Settings))
    return "\n\n".join(
        section(path[0], cls, [key for key in every if key.path[0] == path[0]]) for path, cls in sections(Settings)
    )


def refusals() -> str:
    rows: dict[str, list[str]] = {}
    for refusal in REFUSALS:
        rows.setdefault(refusal.reason, []).append(".".join(refusal.path))
    return table(
        ("key", "why it is refused"),
        [(", ".join(f"`{key}`" for key in found), reason) for reason, found in rows.items()],
    )


def text() -> str:
    return filled(FILE.read_text(encoding="utf-8"), {"reference": reference(), "refusals": refusals()})


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
