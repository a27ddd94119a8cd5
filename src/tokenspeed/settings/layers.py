"""Where settings come from besides files: the environment and command-line assignments.

Each source becomes a `Layer`: the values it gives, each with its origin, and what was wrong with its
form. Nothing is checked against the settings tree here but the type a text is meant for.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import attrs

from tokenspeed.settings.keys import Key, Path, alternatives, dotted, keys
from tokenspeed.settings.scalars import scalar

ENVIRONMENT_PREFIX = "TOKENSPEED_"
"""Variables ``TOKENSPEED_SECTION__KEY`` are settings; without ``__`` they are not."""


class Source(enum.Enum):
    """Which layer gave a value; later ones win."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


@attrs.frozen(kw_only=True)
class Origin:
    """Where a value was written.

    Attributes:
        text: what a person looks for: ``serve.yaml:7``, a variable's name, a flag as typed.
        order: position within its layer, e.g. the line.
    """

    source: Source
    text: str
    order: int = 0


DEFAULT = Origin(source=Source.DEFAULT, text="default")


@attrs.frozen(kw_only=True)
class Fault:
    """One thing wrong with what the operator wrote."""

    origin: Origin
    path: Path
    text: str

    def __str__(self) -> str:
        return f"{self.origin.text}: {dotted(self.path)}: {self.text}"


@attrs.frozen
class Section:
    """The value of a path that has values below it."""


SECTION = Section()


@attrs.frozen(kw_only=True)
class Given:
    """One value of a layer."""

    path: Path
    value: object
    origin: Origin


@attrs.frozen(kw_only=True)
class Layer:
    """All that one source gives, parents before children."""

    given: tuple[Given, ...] = ()
    faults: tuple[Fault, ...] = ()

    def tree(self) -> dict[str, object]:
        """The values as nested mappings; a fresh copy."""
        root: dict[str, object] = {}
        for item in self.given:
            at = root
            for step in item.path[:-1]:
                inner = at.setdefault(str(step), {})
                if not isinstance(inner, dict):
                    break
                at = inner
            else:
                if isinstance(item.value, Section):
                    at.setdefault(str(item.path[-1]), {})
                else:
                    at[str(item.path[-1])] = item.value
        return root

    def origin_of(self, path: Path) -> Origin | None:
        """Origin of the value at exactly `path`; None: this layer does not give it."""
        return {item.path: item.origin for item in self.given}.get(path)

    def nearest_origin(self, path: Path) -> Origin | None:
        """Origin of the deepest part of `path` that this layer has."""
        places = {item.path: item.origin for item in self.given}
        return next((places[path[:end]] for end in range(len(path), 0, -1) if path[:end] in places), None)


@attrs.frozen(kw_only=True)
class Assignment:
    """One value given as text: ``--set a.b=c``, or a flag.

    Attributes:
        shown: how the operator wrote it, for messages (secrets already hidden).
    """

    key: str
    value: str
    shown: str


def parse_assignment(text: str, root: type) -> Assignment | Fault:
    """`a.b=c`, the argument of ``--set``."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        origin = Origin(source=Source.FLAG, text=f"--set {text}")
        return Fault(origin=origin, path=(), text="expected section.key=value")
    key = key.strip()
    secret = any(known.dotted == key and known.secret for known in keys(root))
    return Assignment(key=key, value=value.strip(), shown=f"--set {key}={'***' if secret else value.strip()}")


def from_assignments(assignments: Sequence[Assignment | Fault], root: type) -> Layer:
    """Assignments as a layer; two for one key are a fault, since one of them would be lost."""
    known = {key.path: key for key in keys(root)}
    given: dict[Path, Given] = {}
    faults: list[Fault] = []
    for order, item in enumerate(assignments):
        if isinstance(item, Fault):
            faults.append(attrs.evolve(item, origin=attrs.evolve(item.origin, order=order)))
            continue
        path = tuple(item.key.split("."))
        origin = Origin(source=Source.FLAG, text=item.shown, order=order)
        value = from_text(item.value, known.get(path))
        if path in given and given[path].value != value:
            faults.append(Fault(origin=origin, path=path, text=f"given twice, also by {given[path].origin.text}"))
            continue
        given[path] = Given(path=path, value=value, origin=origin)
    return Layer(given=tuple(given.values()), faults=tuple(faults))


def from_environment(environ: Mapping[str, str], root: type) -> Layer:
    """``TOKENSPEED_SECTION__KEY`` variables as a layer, by name."""
    known = {key.path: key for key in keys(root)}
    given = []
    ours = sorted(name for name in environ if name.startswith(ENVIRONMENT_PREFIX) and "__" in name)
    for order, name in enumerate(ours):
        path = tuple(part.lower() for part in name.removeprefix(ENVIRONMENT_PREFIX).split("__"))
        origin = Origin(source=Source.ENVIRONMENT, text=name, order=order)
        given.append(Given(path=path, value=from_text(environ[name], known.get(path)), origin=origin))
    return Layer(given=tuple(given))


def from_text(text: str, key: Key | None) -> object:
    """The value a text stands for: as it is for text keys, read like a YAML scalar for all others."""
    if key is not None and str in alternatives(key.kind):
        return None if text == "null" and key.nullable else text
    return scalar(text)
