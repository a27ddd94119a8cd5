"""Every key of the tree is read by something, or refused when it is set."""

from __future__ import annotations

import ast
import typing
from functools import cache

import attrs
import pytest
from source_tree import SRC, modules, room, tree

from tokenspeed.errors import SettingsError
from tokenspeed.settings.keys import Key, keys, sections
from tokenspeed.settings.load import load_settings
from tokenspeed.settings.model import Settings

REFUSED: dict[str, str] = {
    "parallel.tensor": "2",
    "parallel.pipeline": "2",
    "parallel.data": "2",
    "wire.transport": "memory",
}
"""Keys without a reader, each with a value that this build refuses."""

SECTION_CLASSES = {path[0]: cls.__name__ for path, cls in sections(Settings)}


def _names_of_section(section: str, node: ast.Module) -> set[str]:
    """What a file calls a value of the section's class: parameters, fields and variables annotated with it."""
    wanted = SECTION_CLASSES[section]
    found = {section}
    for inner in ast.walk(node):
        annotation = getattr(inner, "annotation", None)
        if annotation is None or wanted not in ast.unparse(annotation):
            continue
        if isinstance(inner, ast.arg):
            found.add(inner.arg)
        elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            found.add(inner.target.id)
    for inner in ast.walk(node):  # `server = settings.server`
        if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Attribute) and inner.value.attr == section:
            found |= {target.id for target in inner.targets if isinstance(target, ast.Name)}
        if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Tuple):
            names = inner.targets[0]
            if isinstance(names, ast.Tuple):
                pairs = zip(names.elts, inner.value.elts, strict=False)
                found |= {
                    n.id
                    for n, v in pairs
                    if isinstance(n, ast.Name) and isinstance(v, ast.Attribute) and v.attr == section
                }
    return found


@cache
def readers() -> dict[str, tuple[str, ...]]:
    """Dotted key -> files outside the settings room that read it."""
    found: dict[str, set[str]] = {key.dotted: set() for key in keys(Settings)}
    for path in modules():
        if room(path) in ("settings", "cli"):
            continue
        module = tree(path)
        text = path.read_text(encoding="utf-8")
        for section, cls in SECTION_CLASSES.items():
            if cls not in text and f".{section}" not in text:
                continue
            names = _names_of_section(section, module)
            for node in ast.walk(module):
                if isinstance(node, ast.Attribute) and f"{section}.{node.attr}" in found:
                    holder = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
                    if holder in names:
                        found[f"{section}.{node.attr}"].add(str(path.relative_to(SRC)))
    return {key: tuple(sorted(files)) for key, files in found.items()}


@pytest.mark.parametrize("key", list(keys(Settings)), ids=lambda key: key.dotted)
def test_a_key_has_an_effect_or_is_refused(key: Key) -> None:
    value = REFUSED.get(key.dotted)
    if value is None:
        assert readers()[key.dotted], f"{key.dotted} is read by nothing outside the settings"
        return
    with pytest.raises(SettingsError, match=key.dotted):
        load_settings(sets=[f"{key.dotted}={value}"])


def test_the_walk_reaches_every_leaf() -> None:
    leaves = sum(len(attrs.fields(cls)) for _, cls in sections(Settings))
    assert leaves == len(list(keys(Settings)))
    assert {key.path[0] for key in keys(Settings)} == set(typing.get_type_hints(Settings))
