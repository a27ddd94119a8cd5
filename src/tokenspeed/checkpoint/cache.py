"""A folder of downloads that several processes may fill at once."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tokenspeed.checkpoint.progress import Progress
from tokenspeed.errors import ModelError

_PARTIAL = ".partial-"


def cache_folder(configured: str | None, environ: Mapping[str, str]) -> Path:
    """Where downloads are kept: the setting, ``TOKENSPEED_CACHE``, ``XDG_CACHE_HOME``, ``~/.cache``."""
    chosen = configured or environ.get("TOKENSPEED_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and Path(base).is_absolute() else Path("~/.cache").expanduser()
    return root / "tokenspeed"


@contextmanager
def locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock of `folder`, creating the folder; blocks while another process has it.

    Raises: ModelError: the folder cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / ".lock").open("a")
    except OSError as fault:
        raise ModelError(
            f"the cache folder {folder} cannot be written: {fault}; set model.cache_dir or TOKENSPEED_CACHE"
        ) from fault
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.step(f"waiting for another process to fill {folder}", 0, 0)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield  # closing the file drops the lock, also when the process dies


@contextmanager
def built_whole(target: Path) -> Iterator[Path]:
    """Give an empty folder beside `target`; it becomes `target` only if the block ends well.

    Call with the lock of ``target.parent`` held: what a killed process left there is removed first.
    """
    for left in target.parent.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=target.parent))
    try:
        yield work
        work.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        work.rename(target)
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
