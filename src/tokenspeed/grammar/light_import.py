"""Importing a library without the heavy ones that it names and a compiler has no use for.

xgrammar imports torch for the masks of a batch, and transformers for one of several ways to show it a vocabulary. Ours
are numpy's and plain bytes. Together they take two seconds of a processor and 200 MiB of each compiler's process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import cast


class Nothing:
    """Whatever a library takes from an absent one when it is imported: a type in an annotation, a constant."""

    def __init__(self, *_: object, **__: object) -> None: ...


class Absent(ModuleType):
    """Stands where a library would. It has every name, and none that tells of a version or a file."""

    def __getattr__(self, name: str) -> type[Nothing]:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__}.{name}: this process has no {self.__name__}")
        return Nothing


def import_without(heavy: Sequence[str], names: Sequence[str]) -> None:
    """Import `names` in a process that will never need `heavy`: changes it for good, so it must be our own.

    The first of `names` meets no `heavy` at all and has to do without; the others find all names in it.

    Raises: whatever importing them raises where a name alone does not do.
    """
    first, *others = names
    for name in heavy:
        sys.modules[name] = cast("ModuleType", None)  # what the import system takes for "not there"
    with suppress(ImportError):  # another version of the next one may have no use for it
        import_module(first)
    for name in heavy:
        sys.modules[name] = Absent(name)
    for name in others:
        import_module(name)
