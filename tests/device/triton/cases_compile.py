"""Every Triton kernel compiles to machine code of a graphics device; run by `test_triton_kernels.py`.

The compiler needs no device. This is not the interpreter: types that only the compiler checks are checked here.
"""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tokenspeed.device.kernels import triton as room

BATCH = {"rows", "tokens", "count", "splits", "heads", "padded", "page_tokens", "table_stride", "window"}
"""Quantities that change from batch to batch, or with the number of blocks in a table."""

TYPES = {
    "i64": "contexts offsets places pages seeds positions tokens",
    "i32": "tables top_ks",
    "fp64": "top_ps",
    "i1": "nan",
}
POINTERS = {name: f"*{kind}" for kind, names in TYPES.items() for name in names.split()}
FLOATS = "q vectors mixed stats out runs mask gate_up source into x weight turns logits temperatures min_ps"
POINTERS |= dict.fromkeys(FLOATS.split(), "*fp32")
SCALARS = {"scale": "fp32", "eps": "fp32", "plus": "fp32"}

MODEL = {"KV_HEADS": 3, "HEADS": 9, "GROUP": 3, "BLOCK_GROUP": 16, "DIM": 64, "BLOCK_DIM": 64, "TILE": 16}
WIDE = {"BLOCK": 1024, "WIDTH": 1536, "GELU": True, "OUT": True, "PAIRS": 32}
LAUNCHED = {
    "gate_mul": ("_gate_mul",),
    "gathered": ("_gathered",),
    "kv_move": ("_move",),
    "paged_decode": ("_decode_part", "_decode_sum"),
    "paged_prefill": ("_prefill",),
    "pages": ("_copy_rows", "_zero_rows"),
    "rms_norm": ("_rms_norm",),
    "rotary": ("_rotary",),
    "sample": ("_sample",),
}
ATTENTION = ("gathered", "paged_decode", "paged_prefill")
CASES = [(module, name) for module, names in LAUNCHED.items() for name in names]


def kernel(module: str, name: str) -> JITFunction:
    found: JITFunction = getattr(importlib.import_module(f"{room.__name__}.{module}"), name)
    return found


def test_no_module_of_the_room_is_left_out() -> None:
    assert {module.name for module in pkgutil.iter_modules(room.__path__)} == {*LAUNCHED, "kernel_set"}


@pytest.mark.parametrize(("module", "name"), CASES)
@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_a_kernel_compiles_for_a_device(module: str, name: str, capability: int) -> None:
    function = kernel(module, name)
    constants = {**MODEL, **WIDE, **({"BLOCK": 32} if module in ATTENTION else {})}
    fixed = {p.name: constants[p.name] for p in function.params if p.is_constexpr}
    moved = {"rows": "*fp32"} if module == "kv_move" else {}
    names = {**POINTERS, **SCALARS, **moved}
    signature = {p.name: "constexpr" if p.name in fixed else names.get(p.name, "i32") for p in function.params}
    source = ASTSource(fn=function, signature=signature, constexprs=fixed)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True})
    assert built.asm["cubin"]


@pytest.mark.contract("DP-77")
@pytest.mark.parametrize(("module", "name"), CASES)
def test_no_quantity_of_the_batch_is_a_parameter_of_compilation(module: str, name: str) -> None:
    parameters = [p for p in kernel(module, name).params if p.name in BATCH]
    pointers = {"tokens"} if module == "sample" else {"rows"} if module == "kv_move" else set()
    varying = [p for p in parameters if p.name not in pointers]
    assert not [p.name for p in varying if p.is_constexpr]
    # Not even whether it is 1 or a multiple of 16 may make another program.
    assert not [p.name for p in varying if not p.do_not_specialize and p.name != "heads"]
