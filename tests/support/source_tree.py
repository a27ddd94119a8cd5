"""The tree's own source text, parsed once for the static checks."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "tokenspeed"
CONTROL = SRC / "control"
LOOP = CONTROL / "event_loop.py"


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def modules(folder: Path = SRC) -> tuple[Path, ...]:
    return tuple(sorted(folder.rglob("*.py")))


def room(path: Path) -> str:
    """The room a source file belongs to; "" for the package's own modules."""
    parts = path.relative_to(SRC).parts
    return parts[0] if len(parts) > 1 else ""


def calls(node: ast.AST) -> Iterator[ast.Call]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.Call))


def method_calls(node: ast.AST, *names: str) -> list[ast.Call]:
    """Calls ``something.name(...)`` with one of `names`."""
    return [call for call in calls(node) if isinstance(call.func, ast.Attribute) and call.func.attr in names]


def receiver(call: ast.Call) -> str:
    """``self.scheduler`` in ``self.scheduler.advance(...)``."""
    assert isinstance(call.func, ast.Attribute)
    return ast.unparse(call.func.value)


def functions(node: ast.AST) -> dict[str, ast.FunctionDef]:
    return {inner.name: inner for inner in ast.walk(node) if isinstance(inner, ast.FunctionDef)}


def class_named(path: Path, name: str) -> ast.ClassDef:
    return next(n for n in tree(path).body if isinstance(n, ast.ClassDef) and n.name == name)


def imported(node: ast.AST) -> Iterator[str]:
    """Dotted names of all imports, inside functions too."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            yield from (alias.name for alias in inner.names)
        elif isinstance(inner, ast.ImportFrom) and inner.module:
            yield inner.module
            yield from (f"{inner.module}.{alias.name}" for alias in inner.names)
