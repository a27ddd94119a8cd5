"""A store that is a folder: a file a page, for any number of engines on any machine that mounts it.

``FOLDER/NAMESPACE/NA/ME`` holds one frame. A file appears under its name by a rename, so that a process that is
killed while it writes leaves a temporary file and no page. Nothing is synced: what a power failure tears, the
frame's digest finds. Reading renews a file's time, by which `files_limit` chooses what makes room.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from tokenspeed.errors import SettingsError
from tokenspeed.plane.storage import HostBytes
from tokenspeed.storage.files_limit import TEMPORARY, TRASH, SizeLimit

READ = os.O_RDONLY | os.O_CLOEXEC
WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
MODE = 0o600
"""Pages say something of the prompts they were computed from."""


@attrs.frozen(kw_only=True, eq=False)
class FileBackend:
    """Meets `plane.storage.StorageBackend`. Make it with `open_files`."""

    folder: Path
    limit: SizeLimit
    mine: str = attrs.field(factory=lambda: f"{os.getpid()}-{secrets.token_hex(4)}")
    numbers: Iterator[int] = attrs.field(factory=itertools.count)  # `next` is atomic

    def attach(self, memory: HostBytes) -> None:
        del memory

    def exists(self, keys: Sequence[str]) -> list[bool]:
        # `os.path.exists` takes every fault for an answer; a folder that is gone must be told from a miss.
        os.stat(self.folder)
        return [os.path.exists(self._path(key)) for key in keys]

    def get(self, keys: Sequence[str], frames: Sequence[HostBytes]) -> list[bool]:
        found, faults = [], list[OSError]()
        for key, frame in zip(keys, frames, strict=True):
            try:
                found.append(self._read(self._path(key), frame))
            except OSError as fault:
                found.append(False)
                if not isinstance(fault, FileNotFoundError):
                    faults.append(fault)
        if faults and not any(found):
            raise faults[0]
        return found

    def put(self, keys: Sequence[str], frames: Sequence[HostBytes]) -> list[bool]:
        stored, faults, written = [], list[OSError](), 0
        for key, frame in zip(keys, frames, strict=True):
            try:
                written += self._write(self._path(key), frame)
                stored.append(True)
            except OSError as fault:
                stored.append(False)
                faults.append(fault)
        self.limit.wrote(written)
        if faults and not any(stored):
            raise faults[0]
        return stored

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(key))

    def clear(self, namespace: str) -> None:
        """A rename, which takes no time; the files go afterwards, beside all this."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.folder / namespace, self.folder / f"{TRASH}{self.mine}-{next(self.numbers)}")
        self.limit.wrote(0, trash=True)

    def close(self) -> None:
        self.limit.close()

    def _path(self, key: str) -> str:
        namespace, name = key.split("/")
        # The first bytes of a name are its group's; the last ones are spread.
        return f"{self.folder}/{namespace}/{name[-2:]}/{name}"

    def _read(self, path: str, frame: HostBytes) -> bool:
        file = os.open(path, READ)
        try:
            if os.fstat(file).st_size != len(frame):
                return False
            at = 0
            while at < len(frame):
                got = os.preadv(file, [frame[at:].data], at)
                if not got:
                    return False
                at += got
        finally:
            os.close(file)
        with contextlib.suppress(OSError):  # a folder that can only be read serves, too
            os.utime(path)
        return True

    def _write(self, path: str, frame: HostBytes) -> int:
        """Returns: bytes written; 0: it was there."""
        with contextlib.suppress(OSError):
            os.utime(path)
            return 0
        folder, name = os.path.split(path)
        temporary = f"{folder}/{TEMPORARY}{self.mine}-{next(self.numbers)}"
        try:
            file = os.open(temporary, WRITE, MODE)
        except FileNotFoundError:
            os.makedirs(folder, exist_ok=True)
            file = os.open(temporary, WRITE, MODE)
        try:
            try:
                at = 0
                while at < len(frame):
                    at += os.write(file, frame[at:].data)
            finally:
                os.close(file)
            os.rename(temporary, f"{folder}/{name}")
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return len(frame)


def open_files(folder: Path, *, max_bytes: int) -> FileBackend:
    """Raises: SettingsError: the folder cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f"{TEMPORARY}{os.getpid()}-trial"
        trial.write_bytes(b"")
        trial.unlink()
    except OSError as fault:
        raise SettingsError(f"storage.path: {folder} cannot be written: {fault}") from fault
    limit = SizeLimit(folder=folder, max_bytes=max_bytes)
    limit.start()
    return FileBackend(folder=folder, limit=limit)
