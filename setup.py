"""The package's one build step: the C library of the native forward, where there is a compiler.

Without one the package is installed all the same, and the first start compiles or says what it does instead.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

NATIVE = Path("tokenspeed") / "device" / "native"


def compile_module() -> ModuleType:
    """``tokenspeed.device.native.compile`` without the package around it, which needs torch."""
    path = Path(__file__).resolve().parent / "src" / NATIVE / "compile.py"
    spec = importlib.util.spec_from_file_location("native_compile", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithLibrary(build_py):
    """Copies the package, then compiles into the copy; in place for an editable install."""

    def run(self) -> None:
        super().run()
        native = compile_module()
        root = Path(__file__).resolve().parent / "src" if self.editable_mode else Path(self.build_lib)
        target = root / NATIVE / native.library_name()
        try:
            native.build_library(target, os.environ)
        except (native.CompileError, OSError) as fault:
            self.warn(f"the native forward was not built and will be compiled at the first start: {fault}")
        else:
            self.announce(f"native forward: {target}", level=2)


class PlatformDistribution(Distribution):
    """The wheel is for one platform, because of the library in it."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithLibrary}, distclass=PlatformDistribution)
