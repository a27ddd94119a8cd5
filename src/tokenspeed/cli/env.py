"""``tokenspeed env``: what a bug report should say about the machine. Starts nothing, imports no engine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from tokenspeed import __version__
from tokenspeed.cli.console import Console

DISTRIBUTION = "tokenspeed-py"
CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "asimd", "sve")
HIDDEN = re.compile(r"KEY|TOKEN$|SECRET|PASSWORD")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, console: Console) -> int:
    facts = {
        "tokenspeed": {"version": __version__, "location": str(Path(__file__).parents[1])},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": packages(),
        "machine": machine(Path("/")),
        "variables": variables(console.environ),
    }
    if options.json:
        console.say(json.dumps(facts, indent=2))
        return 0
    for title, values in facts.items():
        console.say(f"{title}:")
        for name, value in values.items():
            console.say(f"  {name}: {value}")
        if not values:
            console.say("  none")
    return 0


def packages() -> dict[str, str]:
    """Installed version of each declared dependency, without importing it."""
    try:
        declared = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return {DISTRIBUTION: "not installed; running from a source tree"}
    names = [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in declared if "extra ==" not in line]
    return {name: _version(name) for name in names}


def machine(root: Path) -> dict[str, str]:
    """Processor, limits and tools; files are read below `root`."""
    cpuinfo = _text(root / "proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    available = re.search(r"^MemAvailable:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": model[1] if model else platform.processor() or "unknown",
        "instructions": " ".join(flag for flag in CPU_FLAGS if flag in has) or "unknown",
        "processors": f"{os.cpu_count()}, {len(os.sched_getaffinity(0))} in the scheduling mask"
        if hasattr(os, "sched_getaffinity")
        else str(os.cpu_count()),
        "memory available": f"{int(available[1]) / (1 << 20):.2f} GiB" if available else "unknown",
        "cgroup cpu.max": _text(root / "sys/fs/cgroup/cpu.max").strip() or "none",
        "cgroup memory.max": _text(root / "sys/fs/cgroup/memory.max").strip() or "none",
        "C compiler": compiler or "none",
    }


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that this package, torch's thread pools and the model hub read; secrets are hidden."""
    ours = re.compile(
        r"TOKENSPEED_|OMP_|MKL_|KMP_|GOMP_|TORCH_|HF_|CUDA_VISIBLE|TRITON_|XDG_CACHE_HOME$|(HTTPS?|NO)_PROXY$"
    )
    found = {name: value for name, value in sorted(environ.items()) if ours.match(name)}
    return {name: "***" if HIDDEN.search(name) else value for name, value in found.items()}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
