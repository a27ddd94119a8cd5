"""What a checkpoint contains, as a short digest: the same content, the same digest, wherever it lies."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.errors import ModelError

READERS = 4


def config_digest(config: ModelConfig) -> str:
    return hashlib.sha256(repr(config).encode()).hexdigest()[:32]


def content_digest(checkpoint: Checkpoint) -> str:
    """Of the weights and of what the configuration says of them. Reads every weight file once.

    Raises: ModelError: a file cannot be read.
    """
    found = hashlib.sha256(config_digest(checkpoint.config).encode())
    found.update(f"{checkpoint.kind.value}:{checkpoint.seed}".encode())
    with ThreadPoolExecutor(READERS) as readers:
        for digest in readers.map(_file_digest, checkpoint.weight_files):
            found.update(digest)
    return found.hexdigest()[:32]


def _file_digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as fault:
        raise ModelError(f"{path}: cannot be read: {fault}") from fault
