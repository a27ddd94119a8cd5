"""Find or build the shared library, and load it so that it shares torch's OpenMP threads."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import attrs
import torch

from tokenspeed.checkpoint.cache import cache_folder
from tokenspeed.device.native.compile import CompileError, build_library, library_name
from tokenspeed.device.native.structs import (
    MIRRORED,
    CallStruct,
    LinearStruct,
    ModelStruct,
    PoolStruct,
    RowsStruct,
)
from tokenspeed.errors import InvariantBroken, NotSupported

log = logging.getLogger(__name__)

OPENMP_NAMES = ("libgomp", "libiomp", "libomp")

_POINTER, _INT64, _INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_SIGNATURES: tuple[tuple[str, object, tuple[object, ...]], ...] = (
    ("ts_workspace_bytes", _INT64, (ctypes.POINTER(ModelStruct), _INT64, _INT64, _INT32)),
    (
        "ts_run",
        _INT32,
        (
            ctypes.POINTER(ModelStruct),
            ctypes.POINTER(PoolStruct),
            ctypes.POINTER(RowsStruct),
            ctypes.POINTER(CallStruct),
        ),
    ),
    ("ts_raise_layers", None, (_POINTER, _INT32)),
    ("ts_draw_workspace_bytes", _INT64, (_INT64, _INT32)),
    ("ts_draw_tokens", None, (_POINTER, _INT64, _INT64, _POINTER, _INT32)),
    ("ts_instruction_sets", ctypes.c_char_p, ()),
    ("ts_use_instruction_set", _INT32, (ctypes.c_char_p,)),
    ("ts_instruction_set", ctypes.c_char_p, ()),
    ("ts_panel_bytes", _INT64, (_INT32, _INT64, _INT64)),
    ("ts_pack_floats", None, (_INT32, _POINTER, _INT64, _INT64, _POINTER)),
    ("ts_pack_quants", None, (_INT32, _POINTER, _POINTER, _POINTER, _INT64, _INT64, _POINTER)),
    ("ts_pack_blocks", None, (_INT32, _POINTER, _INT64, _INT64, _POINTER)),
    ("ts_repack", None, (ctypes.POINTER(LinearStruct), _INT32, _POINTER)),
    ("ts_unpack_row", None, (ctypes.POINTER(LinearStruct), _INT64, _POINTER)),
    ("ts_layout", None, (ctypes.POINTER(_INT64),)),
    ("ts_project", None, (ctypes.POINTER(LinearStruct), _POINTER, _INT64, _POINTER, _POINTER)),
)


@attrs.frozen(kw_only=True, eq=False)
class NativeLibrary:
    """The loaded library. Its calls release the GIL.

    Attributes:
        calls: the functions of c/native.h with their C types.
        openmp: the runtime whose threads it uses, which is torch's.
    """

    calls: ctypes.CDLL
    path: Path
    openmp: Path

    @property
    def instruction_sets(self) -> tuple[str, ...]:
        """Those this machine has, best first."""
        return tuple(bytes(self.calls.ts_instruction_sets()).decode().split(","))

    @property
    def instruction_set(self) -> str:
        """The one in use."""
        return bytes(self.calls.ts_instruction_set()).decode()

    def use(self, instruction_set: str) -> None:
        """For the whole process. Raises NotSupported: not one of `instruction_sets`."""
        if not self.calls.ts_use_instruction_set(instruction_set.encode()):
            raise NotSupported(
                f"instruction set {instruction_set!r}; this machine has {', '.join(self.instruction_sets)}"
            )


def native_library(environ: Mapping[str, str] | None = None, *, package: Path | None = None) -> NativeLibrary:
    """Load the library that was installed; else the cached one; else compile it into the cache.

    Args:
        package: where an installation puts the library; default: beside this file.
    Raises: NotSupported: none of these works here; the text says why.
    """
    environ = os.environ if environ is None else environ
    name = library_name()
    installed = (package or Path(__file__).resolve().parent) / name
    cached = cache_folder(None, environ) / "native" / name
    for path in (installed, cached):
        if path.is_file():
            return open_library(path)
    begun = time.perf_counter()
    try:
        build_library(cached, environ)
    except (CompileError, OSError) as fault:
        raise NotSupported(f"the native forward cannot be built: {fault}") from fault
    log.info("native forward: compiled to %s in %.1f s", cached, time.perf_counter() - begun)
    return open_library(cached)


def native_available(environ: Mapping[str, str] | None = None, *, package: Path | None = None) -> bool:
    """Whether `native_library` works here; a warning says why not."""
    try:
        native_library(environ, package=package)
    except NotSupported as reason:
        log.warning("%s; torch computes instead, and results may depend on the batch in their last bits", reason)
        return False
    return True


def open_library(path: Path) -> NativeLibrary:
    """Load the library at `path`.

    Raises: NotSupported: it cannot be loaded, or torch has no OpenMP runtime to share.
    InvariantBroken: it was made from other sources.
    """
    openmp = _torch_openmp()
    try:
        # Already loaded by torch; this makes its names visible to the library, which is linked with none.
        ctypes.CDLL(str(openmp), mode=os.RTLD_NOLOAD | ctypes.RTLD_GLOBAL)
        calls = ctypes.CDLL(str(path))
    except OSError as fault:
        raise NotSupported(f"the native forward cannot be loaded: {fault}") from fault
    for name, result, arguments in _SIGNATURES:
        function = getattr(calls, name)
        function.restype, function.argtypes = result, arguments
    sizes = (ctypes.c_int64 * len(MIRRORED))()
    calls.ts_layout(sizes)
    if list(sizes) != [ctypes.sizeof(kind) for kind in MIRRORED]:
        raise InvariantBroken("structures that differ between C and Python", c=list(sizes), path=str(path))
    return NativeLibrary(calls=calls, path=path, openmp=openmp)


def _torch_openmp() -> Path:
    """The OpenMP runtime that torch computes with: the one it ships, else the only one there is.

    Raises: NotSupported: there is none, or it is not clear which.
    """
    loaded = openmp_runtimes()
    shipped = [path for path in loaded if Path(torch.__file__).resolve().parent in path.parents]
    chosen = shipped or loaded
    if len(chosen) != 1:
        names = ", ".join(map(str, chosen)) or "none"
        raise NotSupported(f"the native forward shares torch's OpenMP runtime; in this process are: {names}")
    return chosen[0]


def openmp_runtimes() -> list[Path]:
    """The OpenMP runtimes in this process. Source: proc(5), /proc/self/maps."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(None, 5)[5] for line in lines if len(line.split(None, 5)) == 6}
    return sorted(Path(path) for path in paths if Path(path).name.startswith(OPENMP_NAMES))
