"""Logs of whole processes: what is written when they end, and that a pipe nobody reads holds nothing up."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import pytest

from tokenspeed.checkpoint.sources import CheckpointKind, ResolvedModel
from tokenspeed.launch.messages import Failed, StartRank
from tokenspeed.settings.model import LogSettings, ModelSettings, Settings

CHILD = Path(__file__).parent / "logging_child.py"
MODEL = ResolvedModel(kind=CheckpointKind.RANDOM, path=None, name="toy", served_name="toy", origin="random:toy")


@contextlib.contextmanager
def child(way: str, stderr: int | IO[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], Connection]]:
    """`logging_child.py` as the launcher would start it, and the launcher's end of its channel."""
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD), str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    settings = Settings(model=ModelSettings(source=way), log=LogSettings(level="info"))
    ours.send(StartRank(settings=settings, resolved=MODEL, index=0, count=1))
    with process, ours:
        yield process, ours


def read(file: Path) -> list[str]:
    return file.read_text().splitlines()


@pytest.mark.contract("KM-31", "KM-33")
def test_everything_is_in_the_file_before_a_failure_is_told(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, child("raise", log) as (process, channel):
        told = channel.recv()
        lines = read(tmp_path / "log")  # the child may still run
        assert told == Failed(text="the end of the road")
        assert sum("tokenspeed.child: record" in line for line in lines) == 300
        assert lines[-1].endswith("the last record")
        # The root logger and Python's warnings take the same way.
        assert any("somebody.else: a library's record on MainThread" in line for line in lines)
        assert any("py.warnings: " in line and "a warning of Python's" in line for line in lines)
        assert process.wait(20) == 1


@pytest.mark.contract("KM-33", "KM-34")
@pytest.mark.parametrize(("way", "status"), [("return", 0), ("leave", 3)])
def test_everything_is_in_the_file_when_the_process_has_ended(tmp_path: Path, way: str, status: int) -> None:
    with (tmp_path / "log").open("wb") as log, child(way, log) as (process, _):
        assert process.wait(20) == status
    assert read(tmp_path / "log")[-1].endswith("the last record")


@pytest.mark.contract("KM-32", "KM-35")
@pytest.mark.parametrize(("way", "status"), [("return-much", 0), ("raise-much", 1)])
def test_a_pipe_that_nobody_reads_keeps_no_process_from_its_work_or_from_its_end(way: str, status: int) -> None:
    with child(way, subprocess.PIPE) as (process, channel):
        assert process.wait(20) == status  # its pipe has been full since the thirtieth record
        assert process.stderr is not None
        assert b"record 0" in process.stderr.read1(1 << 20)
        if way.startswith("raise"):
            assert channel.recv() == Failed(text="the end of the road")
