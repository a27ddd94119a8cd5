"""Weights as panels: every format comes back as it went in, and is multiplied by as it stands."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Ggml

from tokenspeed.device.native.gguf_levels import levels_of
from tokenspeed.device.native.library import NativeLibrary, native_library
from tokenspeed.device.native.pack import (
    PackedLinear,
    Packing,
    pack_blocks,
    pack_floats,
    pack_levels,
    project,
    repack,
    unpack,
)
from tokenspeed.device.native.structs import Format

AS_STORED = (Ggml.Q4_0, Ggml.Q4_1, Ggml.Q8_0)
TAKEN_APART = (Ggml.Q5_0, Ggml.Q5_1, Ggml.IQ4_NL, Ggml.Q4_K, Ggml.Q5_K, Ggml.Q6_K)
OUT, IN = 37, 512  # the last panel of 16 is not full


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    return native_library()


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(kind: Ggml, out: int = OUT, width: int = IN, seed: int = 0) -> np.ndarray:
    """Random blocks whose scales are ordinary numbers; uint8 ``[out, bytes of a row]``."""
    elements, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (out * width // elements, size), dtype=np.uint8)
    halves = {Ggml.Q6_K: (208,), Ggml.Q4_1: (0, 2), Ggml.Q5_1: (0, 2), Ggml.Q4_K: (0, 2), Ggml.Q5_K: (0, 2)}
    for at in halves.get(kind, (0,)):
        scales = rng.normal(0, 0.1, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(out, -1)


def packed(library: NativeLibrary, kind: Ggml, rows: np.ndarray, width: int = IN) -> PackedLinear:
    if kind in AS_STORED:
        return pack_blocks(Packing(library=library), rows, (len(rows), width), int(kind))
    levels = levels_of(kind, rows)
    assert levels is not None
    return pack_levels(Packing(library=library), levels)


@pytest.mark.parametrize("kind", [*AS_STORED, *TAKEN_APART], ids=lambda kind: kind.name)
def test_a_stored_block_unpacks_to_what_the_gguf_library_makes_of_it(library: NativeLibrary, kind: Ggml) -> None:
    rows = stored(kind)
    wanted = gguf.quants.dequantize(rows, kind).astype(np.float32)
    linear = packed(library, kind, rows)
    assert np.array_equal(unpack(library, linear).numpy(), wanted)
    exact = repack(Packing(library=library), linear, Format.F32)
    assert np.array_equal(unpack(library, exact).numpy(), wanted)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Format.F32, torch.float32), (Format.F16, torch.float16), (Format.BF16, torch.bfloat16)]
)
def test_floats_are_rounded_as_torch_rounds_them(library: NativeLibrary, kind: Format, dtype: torch.dtype) -> None:
    weight = drawn(OUT, 33)
    weight[0, :5] = torch.tensor([1e-7, 6e-8, -3e-6, 65519.0, 70000.0])
    got = unpack(library, pack_floats(Packing(library=library), weight, kind))
    assert torch.equal(got, weight.to(dtype).float())


def test_eight_bit_groups_are_within_half_a_level_of_the_weights(library: NativeLibrary) -> None:
    weight = drawn(OUT, 70) + 0.5
    weight[3, :32] = 0.0
    weight[4, :32] = -0.25
    got = unpack(library, pack_floats(Packing(library=library), weight, Format.Q8M))
    for first in (0, 32, 64):
        group = weight[:, first : first + 32]
        level = (group.amax(1) - group.amin(1)) / 255
        # Half a level, and what binary16 loses of the ends of the range.
        allowed = (0.5 * level + group.abs().amax(1) * 2**-11)[:, None]
        assert ((got[:, first : first + 32] - group).abs() <= allowed).all()
    assert (got[3, :32] == 0).all()
    assert (got[4, :32] == -0.25).all()


def test_sixteen_levels_survive_eight_bits(library: NativeLibrary) -> None:
    rows = stored(Ggml.Q4_1)
    rows.reshape(-1, 20)[:, 4] = 0xF0  # the least and the greatest level, as every quantizer uses them
    weight = torch.from_numpy(gguf.quants.dequantize(rows, Ggml.Q4_1).astype(np.float32))
    got = unpack(library, pack_floats(Packing(library=library), weight, Format.Q8M))
    assert (got - weight).abs().max() < 1e-3 * weight.abs().max()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 12, 13, 25])
@pytest.mark.parametrize("kind", [Format.F32, Format.F16, Format.BF16, Format.Q8M])
def test_a_projection_is_the_product_with_the_unpacked_weight(library: NativeLibrary, kind: Format, rows: int) -> None:
    linear = pack_floats(Packing(library=library), drawn(OUT, 100), kind)
    x = drawn(rows, 100, seed=rows)
    wanted = x.double() @ unpack(library, linear).double().T
    assert (project(library, linear, x) - wanted).abs().max() < 2e-3


@pytest.mark.parametrize("kind", [*AS_STORED, *TAKEN_APART], ids=lambda kind: kind.name)
def test_a_projection_by_stored_blocks_is_exact_to_sixteen_bits_of_the_activations(
    library: NativeLibrary, kind: Ggml
) -> None:
    linear = packed(library, kind, stored(kind))
    x = drawn(5, IN)
    weight = unpack(library, linear).double()
    error = (project(library, linear, x) - x.double() @ weight.T).abs().max()
    assert error < 2e-4 * weight.norm(dim=1).max()


def test_a_row_has_the_same_bits_alone_and_among_others(library: NativeLibrary) -> None:
    linears = [
        pack_floats(Packing(library=library), drawn(OUT, 96), kind) for kind in (Format.F32, Format.F16, Format.Q8M)
    ]
    linears += [packed(library, kind, stored(kind)) for kind in (Ggml.Q4_1, Ggml.Q4_K, Ggml.Q6_K)]
    for linear in linears:
        x = drawn(23, linear.in_features)
        whole = project(library, linear, x)
        for at, count in ((0, 1), (3, 2), (7, 5), (11, 12)):
            assert torch.equal(project(library, linear, x[at : at + count]), whole[at : at + count])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_shows_in_every_output_of_its_row_only(library: NativeLibrary, bad: float) -> None:
    for kind in (Format.F32, Format.F16, Format.Q8M):
        linear = pack_floats(Packing(library=library), drawn(16, 64), kind)
        x = drawn(3, 64)
        x[1, 40] = bad
        finite = project(library, linear, x).isfinite()
        assert finite[0].all()
        assert finite[2].all()
        assert not finite[1].any()


def test_activations_of_any_size_keep_their_precision(library: NativeLibrary) -> None:
    linear = pack_floats(Packing(library=library), drawn(16, 64), Format.Q8M)
    for size in (1e-20, 1e-6, 1.0, 1e6, 1e20):
        x = drawn(2, 64) * size
        wanted = x.double() @ unpack(library, linear).double().T
        assert (project(library, linear, x) - wanted).abs().max() < 1e-3 * size
    assert (project(library, linear, torch.zeros(1, 64)) == 0).all()
