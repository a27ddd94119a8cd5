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
        hub: `name` is the id on the Hugging Face hub that it was fetched by.
    """

    kind: CheckpointKind
    path: Path | None
    name: str
    hub: bool = False


@attrs.frozen(kw_only=True)
class ResolvedModel:
    """A located model, with what the operator said about presenting it.

    Attributes:
        origin: the source as the operator wrote it.
        served_name: the name clients use.
        hub: `name` is the model's id on the Hugging Face hub.
        chat_template_file: replaces the checkpoint's chat template.
        generation_defaults: take sampling defaults from the checkpoint.
    """

    kind: CheckpointKind
    path: Path | None
    name: str
    served_name: str
    origin: str
    hub: bool = False
    chat_template_file: Path | None = None
    generation_defaults: bool = True

    @property
    def model_path(self) -> str:
        """What other programs load the same model by: its id on the hub, else where its files are here.

        Random weights, which have neither, go by their source.
        """
        if self.path is None:
            return self.origin
        return self.name if self.hub else str(self.path)


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
