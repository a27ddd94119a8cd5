"""Triton kernels beside torch's, in processes of their own: Triton decides at import whether it interprets."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenspeed.device.kernels.registry import REGISTRY, KernelSet, kernels_for
from tokenspeed.errors import NotSupported

CASES = Path(__file__).parent / "triton"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")


def passes(cache: Path, *names: str, interpret: bool) -> None:
    """Run the case files; their own report is the message if one fails."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(CASES / name) for name in names)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout


@pytest.mark.contract("RA-33")
def test_every_kernel_equals_torch_in_the_interpreter(tmp_path: Path) -> None:
    passes(tmp_path, "cases_elementwise.py", "cases_attention.py", "cases_sampling.py", interpret=True)


@pytest.mark.contract("DP-77")
def test_every_kernel_compiles_and_no_quantity_of_a_batch_makes_another_program(tmp_path: Path) -> None:
    passes(tmp_path, "cases_compile.py", interpret=False)


def test_the_device_chooses_the_kernels_unless_a_set_is_asked_for() -> None:
    torch_set = REGISTRY[KernelSet.TORCH]
    assert kernels_for("cpu") is torch_set
    assert kernels_for("cuda", KernelSet.TORCH) is torch_set
    assert kernels_for("cuda") is kernels_for("cpu", KernelSet.TRITON) is not torch_set
    with pytest.raises(NotSupported, match="'meta' devices; known: cpu, cuda"):
        kernels_for("meta")


def test_kernels_for_the_processor_are_had_without_importing_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from tokenspeed.device.kernels.registry import kernels_for\n"
        "from tokenspeed.errors import NotSupported\n"
        "kernels_for('cpu')\n"
        "try: kernels_for('cuda')\n"
        "except NotSupported as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "kernels: Triton is not installed; install the triton package"
