"""YAML text as a layer of settings, every value with the line it stands on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import yaml

from tokenspeed.settings.keys import Path, sections
from tokenspeed.settings.layers import SECTION, Fault, Given, Layer, Origin, Source
from tokenspeed.settings.scalars import Yaml12, shown

OriginOf: TypeAlias = Callable[[int], Origin]
"""From a 0-based line to the origin of what stands there."""


def from_yaml(text: str, root: type, *, name: str) -> Layer:
    """One YAML document as a layer; `name` is what origins call it."""

    def origin(line: int) -> Origin:
        return Origin(source=Source.FILE, text=f"{name}:{line + 1}", order=line)

    def only(line: int, what: str) -> Layer:
        return Layer(faults=(Fault(origin=origin(line), path=(), text=what),))

    try:
        for event in yaml.parse(text, Loader=Yaml12):
            if isinstance(event, yaml.AliasEvent):
                return only(_line(event.start_mark), "aliases (*name) are not used in settings; write the value out")
        loader = Yaml12(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as exc:
        return only(_line(exc.problem_mark or exc.context_mark), f"not YAML: {exc.problem or exc.context}")
    except yaml.reader.ReaderError as exc:
        return only(text.count("\n", 0, exc.position), f"not YAML: {exc.reason}")
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null")):
        return Layer()
    if not isinstance(node, yaml.MappingNode):
        return only(
            _line(node.start_mark),
            f"expected sections with keys, got {shown(loader.construct_object(node, deep=True))}",
        )
    found = tuple(_walk(node, (), loader, frozenset(path for path, _ in sections(root)), origin))
    return Layer(
        given=tuple(item for item in found if isinstance(item, Given)),
        faults=tuple(item for item in found if isinstance(item, Fault)),
    )


def _walk(
    node: yaml.MappingNode, above: Path, loader: Yaml12, inner: frozenset[tuple[str, ...]], origin: OriginOf
) -> Iterator[Given | Fault]:
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = _line(key.start_mark)
        if not isinstance(key, yaml.ScalarNode):
            yield Fault(origin=origin(line), path=above, text="a key must be a plain word")
            continue
        path = (*above, str(key.value))
        if key.value in seen:
            first = origin(seen[key.value]).text
            yield Fault(origin=origin(line), path=path, text=f"given twice, first at {first}")
            continue
        seen[key.value] = line
        if isinstance(value, yaml.MappingNode):
            yield Given(path=path, value=SECTION, origin=origin(line))
            yield from _walk(value, path, loader, inner, origin)
            continue
        try:
            plain = loader.construct_object(value, deep=True)
        except (yaml.MarkedYAMLError, ValueError) as exc:
            problem = getattr(exc, "problem", None) or str(exc)
            yield Fault(origin=origin(line), path=path, text=f"cannot be read: {problem}")
            continue
        # a section whose keys are all commented out has the value null
        yield Given(path=path, value=SECTION if plain is None and path in inner else plain, origin=origin(line))


def _line(mark: object) -> int:
    return int(getattr(mark, "line", 0))  # a mark of the C or of the Python scanner, or None
