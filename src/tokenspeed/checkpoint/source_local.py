"""Models that are on this machine already."""

from __future__ import annotations

import re
from pathlib import Path

import attrs

from tokenspeed.checkpoint.progress import Progress
from tokenspeed.checkpoint.random_models import RANDOM_MODELS, is_random_model
from tokenspeed.checkpoint.resolved import CheckpointKind, Located
from tokenspeed.errors import ModelError

_QUANTIZED = re.compile(r"[.-](?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|FP16|MXFP4)$", re.IGNORECASE)


def gguf_name(path: Path) -> str:
    """The model's name in a file name: without ending and quantization mark."""
    return _QUANTIZED.sub("", path.stem) or path.stem


@attrs.frozen(kw_only=True, eq=False)
class LocalSource:
    """A .gguf file, or a folder with config.json and safetensors, or with one .gguf file."""

    def claims(self, source: str) -> bool:
        path = Path(source).expanduser()
        return path.exists() or source.startswith(("/", "./", "../", "~")) or path.suffix == ".gguf"

    def locate(self, source: str, progress: Progress) -> Located:
        path = Path(source).expanduser().absolute()
        if not path.exists():
            raise ModelError(f"model {source}: there is no file or folder {path}")
        if path.is_dir():
            return self._folder(path, source)
        if path.suffix != ".gguf":
            raise ModelError(f"model {source}: {path.name} is a file, and only .gguf files are models by themselves")
        return Located(kind=CheckpointKind.GGUF, path=path, name=gguf_name(path))

    def _folder(self, path: Path, source: str) -> Located:
        files = sorted(path.glob("*.gguf"))
        # GGUF repositories often carry a config.json too: the weights decide.
        if (path / "config.json").is_file() and (not files or any(path.glob("*.safetensors"))):
            return Located(kind=CheckpointKind.SAFETENSORS, path=path, name=path.name)
        if len(files) == 1:
            return Located(kind=CheckpointKind.GGUF, path=files[0], name=gguf_name(files[0]))
        if files:
            raise ModelError(f"model {source}: {len(files)} .gguf files are there; name one: {files[0]}, …")
        raise ModelError(f"model {source}: the folder {path} has neither a config.json nor a .gguf file")


@attrs.frozen(kw_only=True, eq=False)
class RandomSource:
    """``random:NAME`` or ``random:NAME@SEED``."""

    def claims(self, source: str) -> bool:
        return source.startswith("random:")

    def locate(self, source: str, progress: Progress) -> Located:
        name = source.removeprefix("random:")
        if not is_random_model(name):
            raise ModelError(f"model {source}: no such preset; there are {', '.join(RANDOM_MODELS)}")
        return Located(kind=CheckpointKind.RANDOM, path=None, name=name)
