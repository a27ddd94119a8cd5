"""Metadata and tensor index of a GGUF file (v2, v3), memory-mapped.

Source: the GGUF specification in the ggml repository (docs/gguf.md). The `gguf` library reads the
same, but decodes every string at once, which takes seconds for a vocabulary; here arrays of strings
are stepped over and decoded when asked for.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tokenspeed.errors import ModelError

Scalar: TypeAlias = int | float | bool | str
GgufValue: TypeAlias = Scalar | tuple[Scalar, ...]

_MAGIC = b"GGUF"
_STRING = 8
_ARRAY = 9
_FIXED: Mapping[int, str] = MappingProxyType(
    {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
)
_MAX_KEY_BYTES = (1 << 16) - 1
_MAX_DIMS = 4
_MAX_STRING_BYTES = 1 << 24
_MAX_STRINGS = 1 << 24
_DEFAULT_ALIGNMENT = 32


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

    @property
    def type_name(self) -> str:
        """The ggml type's name, such as ``Q4_1``."""
        return GGMLQuantizationType(self.ggml_type).name


@attrs.frozen(kw_only=True, eq=False)
class GgufFile:
    """Read-only view of one file.

    Attributes:
        metadata: keys to values; arrays are decoded at each access, so keep what you read.
        tensors: by name, in file order.
        mapped: the whole file; kept open as long as this object lives.
    """

    path: Path
    version: int
    metadata: Mapping[str, GgufValue] = attrs.field(repr=False)
    tensors: Mapping[str, TensorEntry] = attrs.field(repr=False)
    mapped: mmap.mmap = attrs.field(repr=False)

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of tensor `name`, read-only uint8 ``[nbytes]``, paged in as they are touched.

        Raises: KeyError: no such tensor.
        """
        entry = self.tensors[name]
        return np.frombuffer(self.mapped, dtype=np.uint8, count=entry.nbytes, offset=entry.offset)


@attrs.frozen(kw_only=True)
class _ArrayAt:
    """An array that was stepped over: `count` elements of type `kind` starting at `offset`."""

    kind: int
    count: int
    offset: int


@attrs.frozen(eq=False)
class _Metadata(Mapping[str, GgufValue]):
    reader: _Reader
    entries: Mapping[str, Scalar | _ArrayAt]

    def __getitem__(self, key: str) -> GgufValue:
        value = self.entries[key]
        return self.reader.array(value) if isinstance(value, _ArrayAt) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


@attrs.frozen(eq=False)
class _Reader:
    """Bounds-checked reads; every position is passed and returned, so it holds no state."""

    path: Path
    mapped: mmap.mmap

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: not a usable GGUF file: {what}")

    def need(self, at: int, count: int, what: str) -> None:
        if count > len(self.mapped) - at:
            raise self.fail(
                f"{what} at byte {at} needs {count} bytes, the file ends at {len(self.mapped)}"
                " (truncated or damaged; fetch it again)"
            )

    def number(self, at: int, code: str, what: str) -> tuple[int | float | bool, int]:
        size = struct.calcsize(code)
        self.need(at, size, what)
        return struct.unpack_from(code, self.mapped, at)[0], at + size

    def count(self, at: int, code: str, what: str) -> tuple[int, int]:
        value, at = self.number(at, code, what)
        return int(value), at

    def string(self, at: int, what: str) -> tuple[str, int]:
        size, at = self.count(at, "<Q", f"length of {what}")
        self.need(at, size, what)
        if size > _MAX_STRING_BYTES:
            raise self.fail(f"{what} has {size} bytes; {_MAX_STRING_BYTES} is the most that makes sense")
        return self.mapped[at : at + size].decode("utf-8", "replace"), at + size

    def value(self, at: int, kind: int, key: str) -> tuple[Scalar | _ArrayAt, int]:
        if kind == _STRING:
            return self.string(at, f"value of {key}")
        if kind == _ARRAY:
            return self.step_over(at, key)
        if kind in _FIXED:
            return self.number(at, _FIXED[kind], f"value of {key}")
        raise self.fail(f"key {key} has value type {kind}; known are 0 to 12")

    def step_over(self, at: int, key: str) -> tuple[_ArrayAt, int]:
        """Find the end of an array without decoding it."""
        kind, at = self.count(at, "<I", f"element type of {key}")
        count, at = self.count(at, "<Q", f"length of {key}")
        here = _ArrayAt(kind=kind, count=count, offset=at)
        if kind in _FIXED:
            size = count * struct.calcsize(_FIXED[kind])
            self.need(at, size, f"array {key} of {count} elements")
            return here, at + size
        if kind != _STRING:
            raise self.fail(f"array {key} has element type {kind}; numbers and strings are supported")
        self.need(at, count * 8, f"array {key} of {count} strings")
        if count > _MAX_STRINGS:
            raise self.fail(f"array {key} has {count} strings; {_MAX_STRINGS} is the most that makes sense")
        length, mapped, end = struct.Struct("<Q").unpack_from, self.mapped, len(self.mapped)
        for _ in range(count):
            if at + 8 > end:
                break
            at += 8 + length(mapped, at)[0]
        if at > end:
            raise self.fail(f"array {key} runs past the end of the file at {end} (truncated or damaged)")
        return here, at

    def array(self, where: _ArrayAt) -> tuple[Scalar, ...]:
        if where.kind != _STRING:
            dtype = np.dtype(np.bool_) if where.kind == 7 else np.dtype(_FIXED[where.kind])
            raw = np.frombuffer(self.mapped, dtype=dtype, count=where.count, offset=where.offset)
            return tuple(raw.tolist())
        length, mapped, at, strings = struct.Struct("<Q").unpack_from, self.mapped, where.offset, []
        for _ in range(where.count):
            start = at + 8
            at = start + length(mapped, at)[0]
            strings.append(mapped[start:at].decode("utf-8", "replace"))
        return tuple(strings)


def open_gguf(path: Path) -> GgufFile:
    """Read the header of `path`.

    Raises: ModelError: not a GGUF file, truncated, or with counts the file cannot hold.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as fault:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{path}: cannot be read: {fault}") from fault
    reader = _Reader(path, mapped)
    if mapped[:4] != _MAGIC:
        raise reader.fail(f"it starts with {mapped[:4]!r} instead of {_MAGIC!r}")
    version, at = reader.count(4, "<I", "version")
    if version not in (2, 3):
        hint = " (a big-endian file)" if version in (2 << 24, 3 << 24) else ""
        raise reader.fail(f"version {version}{hint}; supported are 2 and 3, little-endian")
    num_tensors, at = reader.count(at, "<Q", "tensor count")
    num_keys, at = reader.count(at, "<Q", "key count")
    reader.need(at, num_keys * 13, f"{num_keys} keys")
    reader.need(at, num_tensors * 32, f"index of {num_tensors} tensors")
    entries, at = _read_keys(reader, at, num_keys)
    tensors = _read_tensors(reader, at, num_tensors, _alignment(reader, entries))
    return GgufFile(
        path=path,
        version=version,
        metadata=_Metadata(reader, MappingProxyType(entries)),
        tensors=MappingProxyType(tensors),
        mapped=mapped,
    )


def _read_keys(reader: _Reader, at: int, count: int) -> tuple[dict[str, Scalar | _ArrayAt], int]:
    entries: dict[str, Scalar | _ArrayAt] = {}
    for number in range(count):
        key, at = reader.string(at, f"key {number}")
        if not key or len(key) > _MAX_KEY_BYTES or key in entries:
            raise reader.fail(f"key {number} is {key[:80]!r}: empty, too long or there twice")
        kind, at = reader.count(at, "<I", f"type of {key}")
        entries[key], at = reader.value(at, kind, key)
    return entries, at


def _alignment(reader: _Reader, entries: Mapping[str, Scalar | _ArrayAt]) -> int:
    alignment = entries.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment % 8:
        raise reader.fail(f"general.alignment is {alignment!r}; it has to be a multiple of 8 up to 1 MiB")
    return alignment


def _read_tensors(reader: _Reader, at: int, count: int, alignment: int) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for number in range(count):
        name, at = reader.string(at, f"name of tensor {number}")
        if not name or name in found:
            raise reader.fail(f"tensor {number} is named {name!r}: empty or there twice")
        num_dims, at = reader.count(at, "<I", f"dimensions of {name}")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise reader.fail(f"tensor {name} has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible")
        dims: list[int] = []
        for _ in range(num_dims):
            dim, at = reader.count(at, "<Q", f"shape of {name}")
            dims.append(dim)
        kind, at = reader.count(at, "<I", f"type of {name}")
        offset, at = reader.count(at, "<Q", f"offset of {name}")
        nbytes = _stored_size(reader, name, dims, kind)
        found[name] = TensorEntry(name=name, shape=tuple(reversed(dims)), ggml_type=kind, offset=offset, nbytes=nbytes)
    data_start = -(-at // alignment) * alignment
    return {name: _placed(reader, entry, data_start, alignment) for name, entry in found.items()}


def _stored_size(reader: _Reader, name: str, dims: list[int], kind: int) -> int:
    if kind not in GGML_QUANT_SIZES:
        raise reader.fail(f"tensor {name} has ggml type {kind}, which the installed gguf library does not know")
    block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if 0 in dims or dims[0] % block_elements:
        type_name = GGMLQuantizationType(kind).name
        raise reader.fail(f"tensor {name} has row length {dims[0]}; {type_name} needs multiples of {block_elements}")
    return math.prod(dims) // block_elements * block_bytes


def _placed(reader: _Reader, entry: TensorEntry, data_start: int, alignment: int) -> TensorEntry:
    if entry.offset % alignment:
        raise reader.fail(f"tensor {entry.name} is at offset {entry.offset}, not a multiple of {alignment}")
    placed = attrs.evolve(entry, offset=data_start + entry.offset)
    reader.need(placed.offset, placed.nbytes, f"tensor {entry.name}")
    return placed
