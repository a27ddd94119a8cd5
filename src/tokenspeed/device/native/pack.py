"""Weight matrices as panels, the order in which c/native.h multiplies by them."""

from __future__ import annotations

import ctypes

import attrs
import numpy as np
import numpy.typing as npt
import torch

from tokenspeed.device.native.library import NativeLibrary
from tokenspeed.device.native.memory import Arena, Bytes
from tokenspeed.device.native.structs import Format, LinearStruct
from tokenspeed.errors import InvariantBroken

GROUP = 32

Floats = npt.NDArray[np.float32]
Levels = npt.NDArray[np.int8]


@attrs.frozen(kw_only=True, eq=False)
class PackedLinear:
    """One projection's weight.

    Attributes:
        panels: uint8, aligned; `format` says what is in it.
        bias: float32 ``[out]`` or None.
    """

    format: Format
    out_features: int
    in_features: int
    panels: Bytes
    bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def struct(self) -> LinearStruct:
        """Points into this object, which has to outlive it."""
        return LinearStruct(
            format=int(self.format),
            out_features=self.out_features,
            in_features=self.in_features,
            panels=self.panels.ctypes.data,
            bias=None if self.bias is None else self.bias.data_ptr(),
        )


@attrs.frozen(kw_only=True)
class QuantLevels:
    """A quantized matrix taken apart: weight = scale * q + min.

    Attributes:
        q: int8 ``[out, in]``; 0 to 15 for the formats of four bits.
        scale: float32 ``[out, in / 32]``; for Q8K ``[out, in / 16]``.
        min: likewise, or None: 0.
    """

    format: Format
    q: Levels
    scale: Floats
    min: Floats | None = None


@attrs.frozen(kw_only=True, eq=False)
class Packing:
    """What packing needs: the library, and where panels go."""

    library: NativeLibrary
    arena: Arena = attrs.field(factory=Arena)

    def empty(self, kind: Format, out_features: int, in_features: int) -> PackedLinear:
        """Panels to be filled."""
        count = self.library.calls.ts_panel_bytes(int(kind), out_features, in_features)
        return PackedLinear(
            format=kind, out_features=out_features, in_features=in_features, panels=self.arena.take(count)
        )


def pack_floats(packing: Packing, weight: torch.Tensor, kind: Format) -> PackedLinear:
    """Pack float32 ``[out, in]``; F32 keeps it, F16 and BF16 round it, Q8M quantizes groups of 32 inputs."""
    _check_floats(kind)
    if weight.dtype != torch.float32:
        raise InvariantBroken("a weight that is not float32", dtype=weight.dtype)
    weight = weight.contiguous()
    linear = packing.empty(kind, *weight.shape)
    packing.library.calls.ts_pack_floats(int(kind), weight.data_ptr(), *weight.shape, linear.panels.ctypes.data)
    return linear


def pack_levels(packing: Packing, levels: QuantLevels) -> PackedLinear:
    """Pack a quantized matrix as it is.

    Raises: InvariantBroken: `in` is not whole groups, or the scales are not one (Q8K: two) a group.
    """
    out_features, in_features = levels.q.shape
    each = 2 if levels.format == Format.Q8K else 1
    expected = (out_features, in_features // GROUP * each)
    shapes = {part.shape for part in (levels.scale, levels.min) if part is not None}
    if in_features % GROUP or shapes != {expected}:
        raise InvariantBroken("scales that do not go with the levels", levels=levels.q.shape, scales=shapes)
    q = np.ascontiguousarray(levels.q, dtype=np.int8)
    scale = np.ascontiguousarray(levels.scale, dtype=np.float32)
    minimum = None if levels.min is None else np.ascontiguousarray(levels.min, dtype=np.float32)
    linear = packing.empty(levels.format, out_features, in_features)
    packing.library.calls.ts_pack_quants(
        int(levels.format),
        q.ctypes.data,
        scale.ctypes.data,
        None if minimum is None else minimum.ctypes.data,
        out_features,
        in_features,
        linear.panels.ctypes.data,
    )
    return linear


def pack_blocks(packing: Packing, blocks: Bytes, shape: tuple[int, int], ggml_type: int) -> PackedLinear:
    """Pack a GGUF tensor of type Q4_0 (2), Q4_1 (3) or Q8_0 (8) from its stored bytes."""
    stored = np.ascontiguousarray(blocks)
    linear = packing.empty(Format.Q8 if ggml_type == 8 else Format.Q4M, *shape)
    packing.library.calls.ts_pack_blocks(ggml_type, stored.ctypes.data, *shape, linear.panels.ctypes.data)
    return linear


def repack(packing: Packing, linear: PackedLinear, kind: Format) -> PackedLinear:
    """The same weights in another format, one that `pack_floats` takes."""
    _check_floats(kind)
    other = attrs.evolve(packing.empty(kind, linear.out_features, linear.in_features), bias=linear.bias)
    struct = linear.struct()
    packing.library.calls.ts_repack(ctypes.byref(struct), int(kind), other.panels.ctypes.data)
    return other


def unpack(library: NativeLibrary, linear: PackedLinear) -> torch.Tensor:
    """The float32 ``[out, in]`` that `linear` stands for."""
    weight = torch.empty((linear.out_features, linear.in_features), dtype=torch.float32)
    struct = linear.struct()
    for row in range(linear.out_features):
        library.calls.ts_unpack_row(ctypes.byref(struct), row, weight[row].data_ptr())
    return weight


def project(library: NativeLibrary, linear: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    """float32 ``[rows, in]`` to ``[rows, out]`` by the calling thread alone; for checks."""
    x = x.contiguous()
    y = torch.empty((len(x), linear.out_features), dtype=torch.float32)
    workspace = torch.empty(len(x) * (linear.in_features + GROUP), dtype=torch.float32)
    struct = linear.struct()
    library.calls.ts_project(ctypes.byref(struct), x.data_ptr(), len(x), y.data_ptr(), workspace.data_ptr())
    return y


def _check_floats(kind: Format) -> None:
    if kind not in (Format.F32, Format.F16, Format.BF16, Format.Q8M):
        raise InvariantBroken("a format that floats are not packed to", format=kind)
