"""A process that writes pages into a folder until it is killed: ``files_writer.py FOLDER SEED``; "." once it began."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np

from tokenspeed.storage.files import open_files
from tokenspeed.storage.frame import frame_bytes, page_of, seal

NAMESPACE = "aa"
PAGE_BYTES = 1 << 18


def sealed(number: int) -> tuple[str, np.ndarray]:
    """Key and frame of page `number`, the same in every process."""
    key, frame = f"{NAMESPACE}/{number:032x}", np.zeros(frame_bytes(PAGE_BYTES), dtype=np.uint8)
    page_of(frame)[:] = number % 251
    seal(key, frame)
    return key, frame


if __name__ == "__main__":
    backend = open_files(Path(sys.argv[1]), max_bytes=1 << 30)
    for count in itertools.count():
        key, frame = sealed((count + int(sys.argv[2])) % 40)
        backend.put([key], [frame])
        if count == 3:
            print(".", flush=True)
        if count % 7 == 0:
            backend.delete([key])
