"""Stopping a deployment: by signals in every phase, by the death of any process; nothing is left behind."""

from __future__ import annotations

import ast
import inspect
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_facts import all_gone, ended, pids

from tokenspeed.launch import signals
from tokenspeed.launch.signals import interrupted_by, open_signal_pipe

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"
PATIENT_S = 60.0


class Launcher:
    """`serve` in a process of its own, which can be signalled."""

    def __init__(self, scratch: Path, *, ranks: str = "ok", frontend: str = "ok") -> None:
        self.scratch = scratch
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "fake_launcher.py"), str(scratch), ranks, frontend],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SRC)},
            start_new_session=True,
        )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.errors: list[str] = []
        self.readers = (threading.Thread(target=self._read), threading.Thread(target=self._read_errors))
        for reader in self.readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors += list(self.process.stderr)

    def wait_for(self, text: str) -> str:
        seen = []
        while True:
            try:
                seen.append(self.lines.get(timeout=PATIENT_S))
            except queue.Empty:
                raise AssertionError(f"{text!r} is not in {seen}; errors: {self.errors}") from None
            if text in seen[-1]:
                return seen[-1]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def status(self) -> int:
        return self.process.wait(PATIENT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENT_S)
        for reader in self.readers:
            reader.join(PATIENT_S)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        for pid in pids(self.scratch).values():
            assert ended(pid, PATIENT_S)


Start = Callable[..., Launcher]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Start]:
    launchers: list[Launcher] = []

    def start(**conduct: str) -> Launcher:
        launchers.append(Launcher(tmp_path, **conduct))
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.close()


@pytest.mark.contract("SS-7", "SS-12")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_through_ranks_that_still_serve_and_exits_with_zero(
    launch: Start, tmp_path: Path, number: signal.Signals
) -> None:
    launcher = launch()
    launcher.wait_for("progress resolving 1/1")
    launcher.wait_for("progress loading 3/3")
    assert "up to 128 tokens a request" in launcher.wait_for("rank 0: toy")
    assert "curl http://127.0.0.1:" in launcher.wait_for("try:")
    launcher.signal(number)
    assert launcher.status() == 0
    log = (tmp_path / "frontend.log").read_text().splitlines()
    assert log[:4] == ["answer start [7, 8]", "stop", "answer drain [7, 8]", "drained"]
    assert (tmp_path / "rank0.closed").exists()
    assert all_gone(tmp_path)


@pytest.mark.contract("SS-2")
def test_all_ranks_are_started_before_any_is_waited_for(launch: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "meet")
    launcher = launch(ranks="first,second")
    launcher.wait_for("rank 1: second is here 1/1")
    launcher.wait_for("serving")
    launcher.signal(signal.SIGTERM)
    assert launcher.status() == 0
    assert pids(tmp_path).keys() == {"rank0", "rank1", "frontend"}
    assert len(set(pids(tmp_path).values())) == 3


def test_a_signal_during_the_start_ends_it_at_once(launch: Start, tmp_path: Path) -> None:
    launcher = launch(ranks="hang")
    launcher.wait_for("hanging")
    launcher.signal(signal.SIGTERM)
    assert launcher.status() == 0
    assert all_gone(tmp_path)


@pytest.mark.contract("SS-9")
def test_a_second_signal_cuts_the_drain_short_and_orphans_nobody(launch: Start, tmp_path: Path) -> None:
    launcher = launch(frontend="stubborn")
    launcher.wait_for("try:")
    launcher.signal(signal.SIGTERM)
    launcher.wait_for("frontend: stop")
    for _ in range(20):
        launcher.signal(signal.SIGTERM)
        launcher.signal(signal.SIGINT)
    assert launcher.status() == 1
    assert all_gone(tmp_path)
    launcher.close()
    assert launcher.errors[-1] == "frontend: did not end in time and was killed\n"


def test_a_rank_that_does_not_end_is_killed(launch: Start, tmp_path: Path) -> None:
    launcher = launch(ranks="deaf")
    launcher.wait_for("try:")
    launcher.signal(signal.SIGTERM)
    launcher.wait_for("frontend: drained")
    launcher.signal(signal.SIGTERM)
    assert launcher.status() == 1
    assert all_gone(tmp_path)


@pytest.mark.contract("SS-8", "SS-5")
def test_a_rank_killed_while_serving_ends_the_deployment_with_an_error(launch: Start, tmp_path: Path) -> None:
    launcher = launch(ranks="ok,ok")
    launcher.wait_for("try:")
    os.kill(pids(tmp_path)["rank1"], signal.SIGKILL)
    assert launcher.status() == 1
    assert all_gone(tmp_path)
    launcher.close()
    assert launcher.errors[-1].startswith("rank 1: was ended by SIGKILL")
    assert (tmp_path / "rank0.closed").exists()


@pytest.mark.parametrize("phase", ["starting", "serving"])
def test_the_death_of_the_launcher_ends_its_children(launch: Start, tmp_path: Path, phase: str) -> None:
    launcher = launch(ranks="hang" if phase == "starting" else "ok")
    launcher.wait_for("hanging" if phase == "starting" else "try:")
    launcher.signal(signal.SIGKILL)
    assert launcher.status() == -signal.SIGKILL
    assert all_gone(tmp_path, PATIENT_S)


def test_a_signal_while_the_model_is_fetched_unwinds_the_fetch() -> None:
    before = signal.getsignal(signal.SIGTERM)
    unwound = threading.Event()

    def fetch() -> None:
        with interrupted_by(signal.SIGTERM):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Event().wait(5.0)
            finally:
                unwound.set()

    with pytest.raises(KeyboardInterrupt):
        fetch()
    assert unwound.is_set()
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_are_bytes_to_read_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    pipe = open_signal_pipe()
    with pipe.catching(signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert 1 <= pipe.taken() <= 2
        assert pipe.taken() == 0
    assert signal.getsignal(signal.SIGTERM) is before
    pipe.close()


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    pipe = open_signal_pipe()
    try:
        with pipe.catching(signal.SIGHUP):
            os.kill(os.getpid(), signal.SIGHUP)
            assert pipe.taken() == 0
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        pipe.close()


@pytest.mark.contract("SS-10")
def test_the_signal_handler_does_nothing_at_all() -> None:
    function = ast.parse(textwrap.dedent(inspect.getsource(signals._noted))).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert [type(node) for node in function.body] == [ast.Expr]  # its docstring
    handlers = [
        ast.unparse(node.args[1])
        for path in (SRC / "tokenspeed").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "signal.signal"
    ]
    assert set(handlers) <= {"_noted", "handler", "signal.default_int_handler", "signal.SIG_IGN"}


def test_launcher_and_children_start_without_torch() -> None:
    code = """
        import sys
        sys.modules["torch"] = None
        import tokenspeed.launch.serve, tokenspeed.launch.rank_main, tokenspeed.launch.frontend_main
        import tokenspeed.frontend.server
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
