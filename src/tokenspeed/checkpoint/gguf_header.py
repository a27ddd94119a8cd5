"""Metadata and tensor index of a GGUF file (v2, v3), memory-mapped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import attrs

Scalar: TypeAlias = int | float | bool | str
GgufValue: TypeAlias = Scalar | tuple[Scalar, ...]


@attrs.frozen(kw_only=True)
class TensorEntry:
    """One tensor of a GGUF file.

    Attributes:
        shape: row-major: the last dimension is contiguous (the reverse of the file's order).
        ggml_type: a value of ``gguf.GGMLQuantizationType``.
        offset: bytes from the start of the file.
        nbytes: stored size.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    nbytes: int


@attrs.frozen(kw_only=True, eq=False)
class GgufFile:
    """Read-only view of one file.

    Attributes:
        metadata: keys to values; long arrays are read at first access.
        tensors: by name, in file order.
    """

    path: Path
    version: int
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, TensorEntry] = attrs.field(factory=lambda: MappingProxyType({}))


def open_gguf(path: Path) -> GgufFile:
    """Read the header of `path`.

    Raises: ModelError: not a GGUF file, truncated, or with counts the file cannot hold.
    """
    raise NotImplementedError
