"""Frozen classes hold no state of their own, and nobody writes past `frozen`."""

from __future__ import annotations

import ast
import collections
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Iterator

import attrs
from source_tree import SRC, modules, tree

import tokenspeed

MUTABLE = (
    list,
    dict,
    set,
    bytearray,
    collections.deque,
    collections.defaultdict,
    collections.OrderedDict,
    collections.Counter,
)
RESULT_VALUES = {"ForwardResult", "PromptLogprobs"}
"""Values that cross as plain lists because the contract says so (OL-1, DP-52); made once, then only read."""


def attrs_classes() -> Iterator[type]:
    for found in pkgutil.walk_packages(tokenspeed.__path__, "tokenspeed."):
        if found.name == "tokenspeed.__main__":
            continue
        module = importlib.import_module(found.name)
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == found.name and attrs.has(cls):
                yield cls


CLASSES = tuple(attrs_classes())
FROZEN = [cls for cls in CLASSES if attrs.inspect(cls).is_frozen]
MUTABLE_CLASSES = [cls for cls in CLASSES if not attrs.inspect(cls).is_frozen]


def mutable_fields(cls: type) -> list[str]:
    hints = typing.get_type_hints(cls)
    return [f.name for f in attrs.fields(cls) if (typing.get_origin(hints[f.name]) or hints[f.name]) in MUTABLE]


def called(cls: type) -> str:
    return f"{cls.__module__.removeprefix('tokenspeed.')}.{cls.__qualname__}"


def test_no_frozen_class_has_a_mutable_container() -> None:
    bad = {called(cls): mutable_fields(cls) for cls in FROZEN if cls.__name__ not in RESULT_VALUES}
    assert {name: fields for name, fields in bad.items() if fields} == {}, "move them into an @attrs.define state class"
    assert {cls.__name__ for cls in FROZEN} >= RESULT_VALUES


def test_mutable_classes_compare_by_identity() -> None:
    assert [called(cls) for cls in MUTABLE_CLASSES if cls.__eq__ is not object.__eq__] == [], "write eq=False"


def owned_states(cls: type) -> list[str]:
    """Fields that hold a mutable class of the same module and are made with the component."""
    hints = typing.get_type_hints(cls)
    return [
        field.name
        for field in attrs.fields(cls)
        if hints[field.name] in MUTABLE_CLASSES
        and hints[field.name].__module__ == cls.__module__
        and isinstance(field.default, attrs.Factory)
    ]


def test_a_frozen_class_owns_at_most_one_state_object() -> None:
    assert {called(cls): owned_states(cls) for cls in FROZEN if len(owned_states(cls)) > 1} == {}


def past_frozen(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr in ("__setattr__", "__delattr__"):
        return True
    named = isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node).endswith("cached_property")
    return named or isinstance(node, ast.Global)


def test_nobody_writes_past_frozen_or_keeps_global_state() -> None:
    found = [f"{p.relative_to(SRC)}:{n.lineno}" for p in modules() for n in ast.walk(tree(p)) if past_frozen(n)]  # type: ignore[attr-defined]
    assert found == []


CHANGING = ("append", "add", "update", "setdefault", "pop", "clear", "extend", "insert", "remove", "discard")


def module_containers(module: ast.Module) -> set[str]:
    """Names of lists, dicts and sets written out at module level."""
    made = set()
    for node in module.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, (ast.List, ast.Dict, ast.Set)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            made |= {target.id for target in targets if isinstance(target, ast.Name)}
    return made


def changes(node: ast.AST, names: set[str]) -> bool:
    """Whether `node` itself changes one of the containers called `names`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in CHANGING and ast.unparse(node.func.value) in names
    stored = isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del))
    return stored and ast.unparse(node.value) in names


def test_no_function_changes_a_container_of_its_module() -> None:
    found = []
    for path in modules():
        names = module_containers(tree(path))
        functions = [n for n in ast.walk(tree(path)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        changed = [n for function in functions for n in ast.walk(function) if names and changes(n, names)]
        found += [f"{path.relative_to(SRC)}:{node.lineno}: {ast.unparse(node)}" for node in changed]  # type: ignore[attr-defined]
    assert found == []
