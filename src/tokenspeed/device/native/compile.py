"""Compile the C sources to a shared library; also run by setup.py, so it imports nothing but the standard library."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

SOURCES = Path(__file__).resolve().parent / "c"

# No -ffast-math: it breaks NaN and sets flush-to-zero for the whole process. No contraction: whether a
# product and a sum become one operation must not depend on how a loop was unrolled.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
INSTRUCTION_SETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"isa_avx2.c": _AVX2, "isa_avx512.c": _AVX512, "isa_avx512vnni.c": (*_AVX512, "-mavx512vnni")}
)
"""Flags of the files that are for one instruction set; the library picks one of them when it runs."""

# Not linked with an OpenMP runtime: the one that torch loaded serves both, because a second team of
# threads in a process halves the speed of each. Names it does not have fail when the library is loaded.
LINK_FLAGS = ("-shared", "-pthread", "-Wl,-z,now", "-lm")

COMPILER_S = 300.0
"""For one file, which takes about a second."""


class CompileError(Exception):
    """There is no compiler, or it failed; the text has its last words."""


def library_name() -> str:
    """File name of the library that these sources and this file make; another for every change of them.

    Not ``.so`` alone: whoever walks the package would take that for an extension module.
    """
    digest = hashlib.sha256()
    for path in (Path(__file__).resolve(), *sorted(SOURCES.glob("*.[ch]"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"native-{platform.machine()}-{digest.hexdigest()[:16]}.so.1"


def find_compiler(environ: Mapping[str, str]) -> str | None:
    """``CC``, or the first of cc, gcc and clang that is in the path."""
    names = (environ["CC"],) if environ.get("CC") else ("cc", "gcc", "clang")
    return next((found for name in names if (found := shutil.which(name, path=environ.get("PATH")))), None)


def build_library(target: Path, environ: Mapping[str, str], extra_flags: tuple[str, ...] = ()) -> None:
    """Compile to `target`, which appears whole or not at all; several processes may do so at once.

    Raises: CompileError: no compiler, or it failed. OSError: the folder cannot be written.
    """
    compiler = find_compiler(environ)
    if compiler is None:
        raise CompileError("no C compiler: neither CC nor cc, gcc or clang in PATH")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".native-", dir=target.parent) as work:
        files = sorted(SOURCES.glob("*.c"))
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            jobs = []
            for file in files:
                flags = INSTRUCTION_SETS.get(file.name, ()) if x86 else ()
                command = [compiler, *FLAGS, *flags, *extra_flags, "-c", str(file), "-o", f"{work}/{file.stem}.o"]
                jobs.append(pool.submit(_run, command))
            for job in jobs:
                job.result()
        objects = [f"{work}/{file.stem}.o" for file in files]
        _run([compiler, *objects, *extra_flags, *LINK_FLAGS, "-o", f"{work}/library.so"])
        Path(work, "library.so").replace(target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILER_S)  # noqa: S603 - ours
    except subprocess.TimeoutExpired as fault:
        raise CompileError(f"{' '.join(command)} took longer than {COMPILER_S:g} s") from fault
    if done.returncode:
        words = (done.stderr or done.stdout).strip()[-2000:]
        raise CompileError(f"{' '.join(command)} failed:\n{words}")
