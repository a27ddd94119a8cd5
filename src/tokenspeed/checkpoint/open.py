"""Everything a checkpoint's files say except the weights themselves."""

from __future__ import annotations

from pathlib import Path
from typing import assert_never

import attrs

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.open_gguf import open_gguf_checkpoint
from tokenspeed.checkpoint.open_hf import open_hf_checkpoint
from tokenspeed.checkpoint.random_models import open_random_checkpoint
from tokenspeed.checkpoint.resolved import CheckpointKind, ResolvedModel
from tokenspeed.errors import ModelError
from tokenspeed.plane.messages import SamplingParams

__all__ = ["Checkpoint", "CheckpointKind", "open_checkpoint"]


def open_checkpoint(resolved: ResolvedModel) -> Checkpoint:
    """Read configuration, tokenizer facts, chat template and generation defaults.

    Raises: ModelError: a file is missing or damaged, or the model is of a kind this build cannot
        serve; the text names the file and the key.
    """
    checkpoint = _opened(resolved)
    if not resolved.generation_defaults:
        checkpoint = attrs.evolve(checkpoint, generation=SamplingParams())
    if resolved.chat_template_file is not None:
        checkpoint = attrs.evolve(checkpoint, chat_template=_template(resolved.chat_template_file))
    return checkpoint


def _opened(resolved: ResolvedModel) -> Checkpoint:
    match resolved.kind:
        case CheckpointKind.GGUF:
            return open_gguf_checkpoint(_path(resolved), name=resolved.name, served_name=resolved.served_name)
        case CheckpointKind.SAFETENSORS:
            return open_hf_checkpoint(_path(resolved), name=resolved.name, served_name=resolved.served_name)
        case CheckpointKind.RANDOM:
            return open_random_checkpoint(resolved.name, served_name=resolved.served_name)
        case other:
            assert_never(other)


def _path(resolved: ResolvedModel) -> Path:
    if resolved.path is None:
        raise ModelError(f"model {resolved.origin}: a {resolved.kind.value} checkpoint needs a path, none was resolved")
    return resolved.path


def _template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise ModelError(f"model.chat_template: {path} cannot be read as text: {fault}") from fault
