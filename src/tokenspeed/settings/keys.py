"""The keys of a settings tree, by path: what the loaders, the command line and the schema walk."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import attrs

Path: TypeAlias = tuple[str | int, ...]


@attrs.frozen(kw_only=True)
class Key:
    """One leaf of the tree.

    Attributes:
        path: attribute names from the root, e.g. ``("server", "port")``.
        kind: the annotated type, resolved; `str | None` keys have a union here.
        default: `attrs.NOTHING` or a factory where there is no plain one.
        validator: attrs' own, or None.
    """

    path: tuple[str, ...]
    kind: object
    default: object
    validator: object
    metadata: Mapping[object, object]

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    @property
    def help(self) -> str:
        return str(self.metadata.get("help", ""))

    @property
    def secret(self) -> bool:
        """True: the value is never shown."""
        return bool(self.metadata.get("secret", False))

    @property
    def nullable(self) -> bool:
        return type(None) in alternatives(self.kind)


def alternatives(kind: object) -> tuple[object, ...]:
    """The members of a union, or the type itself."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return typing.get_args(kind)
    return (kind,)


def keys(root: type, above: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every leaf below the attrs class `root`, in order of declaration."""
    hints = typing.get_type_hints(root)
    for field in attrs.fields(root):
        kind = hints[field.name]
        path = (*above, field.name)
        if isinstance(kind, type) and attrs.has(kind):
            yield from keys(kind, path)
        else:
            yield Key(path=path, kind=kind, default=field.default, validator=field.validator, metadata=field.metadata)


def sections(root: type, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type]]:
    """Every inner attrs class below `root`, with its path."""
    hints = typing.get_type_hints(root)
    for field in attrs.fields(root):
        kind = hints[field.name]
        if isinstance(kind, type) and attrs.has(kind):
            yield (*above, field.name), kind
            yield from sections(kind, (*above, field.name))


def dotted(path: Path) -> str:
    """`a.b[0].c`; the root is called "settings"."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".") or "settings"


def nearest(root: type, path: Path, known_elsewhere: tuple[tuple[str, str], ...] = ()) -> str | None:
    """The valid key that the author of an unknown one most likely meant.

    Args:
        known_elsewhere: (foreign name, our dotted key) pairs, e.g. from other engines' flags.
    """
    name = str(path[-1])
    siblings = _names_at(root, path[:-1])
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        return dotted((*path[:-1], close[0]))
    plain = name.lstrip("-").replace("-", "_")
    for foreign, key in known_elsewhere:
        if foreign == plain:
            return key
    leaves = {key.path[-1]: key.dotted for key in reversed(tuple(keys(root)))}
    leaf = difflib.get_close_matches(plain, leaves, n=1, cutoff=0.75)
    return leaves[leaf[0]] if leaf else None


def _names_at(root: type, path: Path) -> list[str]:
    if not path:
        return [field.name for field in attrs.fields(root)]
    inside = dict(sections(root)).get(tuple(str(step) for step in path))
    return [field.name for field in attrs.fields(inside)] if inside is not None else []
