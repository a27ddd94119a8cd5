"""Which checkpoint an update names, and whether it is of the model that runs."""

from __future__ import annotations

from pathlib import Path

import attrs

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.config_hf import config_from_hf
from tokenspeed.checkpoint.facts import read_json
from tokenspeed.checkpoint.open import open_checkpoint
from tokenspeed.checkpoint.open_hf import weight_files
from tokenspeed.checkpoint.progress import NoProgress
from tokenspeed.checkpoint.resolved import CheckpointKind
from tokenspeed.checkpoint.source_local import LocalSource, RandomSource
from tokenspeed.checkpoint.sources import resolve_model
from tokenspeed.errors import ModelError
from tokenspeed.settings.model import ModelSettings

_MAY_DIFFER = ("torch_dtype", "max_positions", "architectures")


def checkpoint_at(path: str, running: Checkpoint) -> Checkpoint:
    """What `path` names: a folder, a .gguf file, or ``random:NAME``. Never touches the network.

    A folder of safetensors needs neither a tokenizer nor, for the model that runs, a config.json.

    Raises: ModelError: there is nothing usable, or it is another model.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and any(folder.glob("*.safetensors")):
        file = folder / "config.json"
        config = config_from_hf(read_json(file), str(file)) if file.is_file() else running.config
        found = attrs.evolve(
            running,
            kind=CheckpointKind.SAFETENSORS,
            path=folder,
            config=config,
            weight_files=weight_files(folder),
            gguf=None,
        )
    else:
        here = (RandomSource(), LocalSource())
        found = open_checkpoint(resolve_model(ModelSettings(source=path), NoProgress(), sources=here))
    check_same_model(found.config, running.config, path)
    return found


def check_same_model(new: ModelConfig, old: ModelConfig, where: str) -> None:
    """Raises: ModelError: names every field of the configuration that differs."""
    names = [field.name for field in attrs.fields(ModelConfig) if field.name not in _MAY_DIFFER]
    wrong = [
        f"{name} is {getattr(new, name)!r}, here {getattr(old, name)!r}"
        for name in names
        if getattr(new, name) != getattr(old, name)
    ]
    if wrong:
        raise ModelError(f"{where}: another model than the one served: {'; '.join(wrong)}")
