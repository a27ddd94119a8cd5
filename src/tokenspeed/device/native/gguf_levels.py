"""GGUF's block formats taken apart into integers, scales and mins.

Source of the layouts: ggml-common.h (``block_q5_0`` and the following) and dequantize_row_* in
ggml-quants.c of the ggml repository. A row's blocks follow each other; a K block has 256 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Ggml

from tokenspeed.device.native.memory import Bytes
from tokenspeed.device.native.pack import Floats, QuantLevels
from tokenspeed.device.native.structs import Format

Decoder: TypeAlias = Callable[[Bytes, int], QuantLevels]

IQ4_CODES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)
"""What the 16 levels of IQ4_NL stand for (``kvalues_iq4nl``)."""


def levels_of(kind: Ggml, rows: Bytes) -> QuantLevels | None:
    """Take apart uint8 ``[out, bytes of a row]``; None: there is no kernel for `kind`."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        return None
    _, block_bytes = GGML_QUANT_SIZES[kind]
    return decoder(np.ascontiguousarray(rows).reshape(-1, block_bytes), len(rows))


def _half(blocks: Bytes, at: int) -> Floats:
    """The binary16 at byte `at` of every block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """Runs of bytes ``[..., n]`` to ``[..., 2, n]``: the low halves, then the high ones."""
    return np.stack((data & 15, data >> 4), axis=-2)


def _bits(data: Bytes, count: int) -> Bytes:
    """``[blocks, n]`` to ``[blocks, count, n]``: bit 0 of all, bit 1 of all, and so on."""
    bits: Bytes = (data[:, None, :] >> np.arange(count, dtype=np.uint8)[None, :, None]) & np.uint8(1)
    return bits


def _by_row(values: npt.NDArray[np.generic], rows: int) -> npt.NDArray[np.generic]:
    return np.ascontiguousarray(values).reshape(rows, -1)


def _levels(
    kind: Format, rows: int, q: npt.NDArray[np.generic], scale: Floats, minimum: Floats | None = None
) -> QuantLevels:
    return QuantLevels(
        format=kind,
        q=_by_row(q.astype(np.int8), rows),  # type: ignore[arg-type]
        scale=_by_row(scale.astype(np.float32), rows),  # type: ignore[arg-type]
        min=None if minimum is None else _by_row(minimum.astype(np.float32), rows),  # type: ignore[arg-type]
    )


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Bit i of the 32-bit number at byte `at`, for i = 0..31."""
    return np.unpackbits(np.ascontiguousarray(blocks[:, at : at + 4]), axis=1, bitorder="little")


def _q5_0(blocks: Bytes, rows: int) -> QuantLevels:
    q = _nibbles(blocks[:, 6:]).reshape(-1, 32) | _fifth_bits(blocks, 2) << 4
    return _levels(Format.Q8, rows, q.astype(np.int8) - 16, _half(blocks, 0))


def _q5_1(blocks: Bytes, rows: int) -> QuantLevels:
    q = _nibbles(blocks[:, 8:]).reshape(-1, 32) | _fifth_bits(blocks, 4) << 4
    return _levels(Format.Q8M, rows, q, _half(blocks, 0), _half(blocks, 2))


def _iq4_nl(blocks: Bytes, rows: int) -> QuantLevels:
    return _levels(Format.Q8, rows, IQ4_CODES[_nibbles(blocks[:, 2:]).reshape(-1, 32)], _half(blocks, 0))


def _six_bit_pairs(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight mins of 6 bits in 12 bytes: the low ones whole, the high ones in pieces."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6) << 4), axis=1)
    mins = np.concatenate((second & 63, (third >> 4) | (second >> 6) << 4), axis=1)
    return scales, mins


def _q4_k(blocks: Bytes, rows: int) -> QuantLevels:
    scales, mins = _six_bit_pairs(blocks[:, 4:16])
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return _levels(Format.Q4K, rows, q, _half(blocks, 0) * scales, -_half(blocks, 2) * mins)


def _q5_k(blocks: Bytes, rows: int) -> QuantLevels:
    scales, mins = _six_bit_pairs(blocks[:, 4:16])
    q = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | _bits(blocks[:, 16:48], 8) << 4
    scale, minimum = _half(blocks, 0) * scales, -_half(blocks, 2) * mins
    return _levels(Format.Q8K, rows, q, np.repeat(scale, 2, axis=1), np.repeat(minimum, 2, axis=1))


def _q6_k(blocks: Bytes, rows: int) -> QuantLevels:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None] & 3
    q = (low | high << 4).astype(np.int8) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return _levels(Format.Q8K, rows, q, _half(blocks, 208) * scales)


_DECODERS: Mapping[Ggml, Decoder] = MappingProxyType(
    {
        Ggml.Q5_0: _q5_0,
        Ggml.Q5_1: _q5_1,
        Ggml.IQ4_NL: _iq4_nl,
        Ggml.Q4_K: _q4_k,
        Ggml.Q5_K: _q5_k,
        Ggml.Q6_K: _q6_k,
    }
)
