"""Frozen classes hold no state of their own, and nobody writes past `frozen`."""

from __future__ import annotations

import ast
import collections
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
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
RESULT_VALUES = {"ForwardResult", "PromptLogprobs", "OutputBatch"}
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


@pytest.mark.parametrize(
    "cls", FROZEN, ids=lambda cls: f"{cls.__module__.removeprefix('tokenspeed.')}.{cls.__qualname__}"
)
def test_a_frozen_class_has_no_mutable_container(cls: type) -> None:
    if cls.__name__ in RESULT_VALUES:
        return
    bad = mutable_fields(cls)
    assert bad == [], f"{cls.__qualname__}: move {bad} into an @attrs.define(eq=False) state class"


def test_the_exempted_result_values_exist() -> None:
    assert {cls.__name__ for cls in FROZEN} >= RESULT_VALUES


@pytest.mark.parametrize(
    "cls", MUTABLE_CLASSES, ids=lambda cls: f"{cls.__module__.removeprefix('tokenspeed.')}.{cls.__qualname__}"
)
def test_a_mutable_class_compares_by_identity(cls: type) -> None:
    assert cls.__eq__ is object.__eq__, f"{cls.__qualname__}: two states are never equal by value; write eq=False"


@pytest.mark.parametrize(
    "cls", FROZEN, ids=lambda cls: f"{cls.__module__.removeprefix('tokenspeed.')}.{cls.__qualname__}"
)
def test_a_frozen_class_owns_at_most_one_state_object(cls: type) -> None:
    hints = typing.get_type_hints(cls)
    states = [
        field.name
        for field in attrs.fields(cls)
        if isinstance(hints[field.name], type)
        and hints[field.name] in MUTABLE_CLASSES
        and hints[field.name].__module__ == cls.__module__
        and isinstance(field.default, attrs.Factory)  # made here, so owned here
    ]
    assert len(states) <= 1, f"{cls.__qualname__}: {states}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SRC)))
def test_nobody_writes_past_frozen_or_keeps_global_state(path: Path) -> None:
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and node.attr in ("__setattr__", "__delattr__"):
            found.append(f"{node.lineno}: {node.attr}")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr", "vars"):
            found.append(f"{node.lineno}: {ast.unparse(node.func)}")
        if isinstance(node, (ast.Global, ast.Nonlocal)) and isinstance(node, ast.Global):
            found.append(f"{node.lineno}: global {', '.join(node.names)}")
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in (
            "cached_property",
            "functools.cached_property",
        ):
            found.append(f"{node.lineno}: cached_property is state")
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


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SRC)))
def test_no_function_changes_a_container_of_its_module(path: Path) -> None:
    module = tree(path)
    names = module_containers(module)
    functions = [node for node in ast.walk(module) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    found = [n for function in functions for n in ast.walk(function) if changes(n, names)]
    assert [f"{node.lineno}: {ast.unparse(node)}" for node in found] == []  # type: ignore[attr-defined]
