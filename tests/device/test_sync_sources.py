"""The roads of tensors between host and device, read off the sources of the device side."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tokenspeed.device

DEVICE = Path(tokenspeed.device.__path__[0])
START_UP = ("weights", "native", "backends/cuda_parts.py")
"""Where weights are loaded and packed before serving."""

KERNELS = "kernels/triton"
"""A kernel's `.to` is of numbers in registers."""


def moves(path: Path) -> list[str]:
    """Calls that take a tensor to a device: `.cuda()`, `.pin_memory()`, and `.to(...)` of anything but a dtype."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "device")]
        kinds = [ast.unparse(value) for value in given]
        elsewhere = node.func.attr == "to" and not all("dtype" in kind or "torch.float" in kind for kind in kinds)
        if node.func.attr in {"cuda", "pin_memory"} or elsewhere:
            found.append(f"{path.relative_to(DEVICE)}:{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.contract("DP-58")
def test_host_to_device_is_the_one_road_to_a_device() -> None:
    per_round = [
        path for path in DEVICE.rglob("*.py") if not str(path.relative_to(DEVICE)).startswith((*START_UP, KERNELS))
    ]
    found = [line for path in sorted(per_round) for line in moves(path)]
    assert [line.split(":")[0] for line in found] == ["host_sync.py"] * 2, found


@pytest.mark.contract("DP-58")
@pytest.mark.parametrize("name", ["cpu", "simulated", "cuda_api"])
def test_every_backend_uploads_by_it(name: str) -> None:
    text = (DEVICE / "backends" / f"{name}.py").read_text(encoding="utf-8")
    assert "return host_to_device(array, " in text
    assert "torch.from_numpy" not in text


def test_nothing_but_the_marks_switches_the_trap_off() -> None:
    users = [p.name for p in DEVICE.rglob("*.py") if "DisableTorchFunction" in p.read_text(encoding="utf-8")]
    assert users == ["host_sync.py"]
