"""Where a model's files are, and who can fetch them: values and the protocol of a source."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Protocol

import attrs

from tokenspeed.checkpoint.progress import Progress


class CheckpointKind(enum.Enum):
    """Where the weights come from."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"
    RANDOM = "random"


@attrs.frozen(kw_only=True)
class Located:
    """Files that are here now.

    Attributes:
        path: a .gguf file, or the folder of a safetensors checkpoint; None for RANDOM.
        name: what the model calls itself: an HF id, a folder's or file's name, or a preset.
    """

    kind: CheckpointKind
    path: Path | None
    name: str


@attrs.frozen(kw_only=True)
class ResolvedModel:
    """A located model, with what the operator said about presenting it.

    Attributes:
        origin: the source as the operator wrote it.
        served_name: the name clients use.
        chat_template_file: replaces the checkpoint's chat template.
        generation_defaults: take sampling defaults from the checkpoint.
    """

    kind: CheckpointKind
    path: Path | None
    name: str
    served_name: str
    origin: str
    chat_template_file: Path | None = None
    generation_defaults: bool = True


class ModelSource(Protocol):
    """One place models come from."""

    def claims(self, source: str) -> bool:
        """True: `source` is written in this source's form."""
        ...

    def locate(self, source: str, progress: Progress) -> Located:
        """Fetch if needed and return where the files are; blocks on disk and network.

        Raises: ModelError: names the source, what was tried and what to do.
        """
        ...
