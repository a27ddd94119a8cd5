"""Starting a deployment, and every way in which a start can fail; the children are real processes."""

from __future__ import annotations

import io
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq
from fake_launcher import GRACE, PROGRAMS, resolve, toy_serve, toy_settings
from process_facts import all_gone, ended
from raw_frontend import RawFrontend, add

from tokenspeed.errors import SettingsError
from tokenspeed.launch.deployment import ChildFailed, Deployment
from tokenspeed.launch.messages import Failed
from tokenspeed.launch.signals import open_signal_pipe
from tokenspeed.launch.starter import start_rank_host, start_rust_host
from tokenspeed.launch.supervisor import ChildExited, Supervisor
from tokenspeed.settings.model import ServerSettings, Settings


class Run:
    """One `serve` in this process, over children that fail by themselves."""

    def __init__(self, scratch: Path, **conduct: str) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.status = toy_serve(toy_settings(scratch, **conduct), out=self.out, err=self.err)  # type: ignore[arg-type]

    @property
    def last_line(self) -> str:
        return self.err.getvalue().rstrip().splitlines()[-1]


@pytest.mark.contract("SS-4", "SS-7", "SS-8")
def test_a_rank_that_cannot_load_ends_the_launch_with_its_reason_last(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks="raise")
    assert run.status == 1
    assert run.last_line == "rank 0: weights.safetensors: tensor lm_head.weight is missing"
    assert "Traceback" not in run.err.getvalue()
    assert all_gone(tmp_path)


@pytest.mark.contract("SS-4")
def test_a_failed_start_is_not_held_up_by_a_thread_that_never_ends(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks="raise-with-thread")
    assert run.status == 1
    assert run.last_line == "rank 0: ValueError: no rope scaling called moebius"
    assert "Traceback" in run.err.getvalue()
    assert all_gone(tmp_path)


@pytest.mark.contract("SS-3")
def test_a_rank_killed_before_it_is_ready_is_noticed_without_a_message(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks="die")
    assert run.status == 1
    assert run.last_line.startswith("rank 0: was ended by SIGKILL")
    assert all_gone(tmp_path)


@pytest.mark.contract("SS-5")
def test_a_rank_that_dies_while_another_still_starts_fails_the_launch(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks="hang,die")
    assert run.status == 1
    assert run.last_line.startswith("rank 1: was ended by SIGKILL")
    assert all_gone(tmp_path)


@pytest.mark.contract("SS-7")
def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks="grandchild")
    assert run.status == 1
    assert (tmp_path / "grandchild.pid").exists()
    assert all_gone(tmp_path, 5.0)  # killed by us, collected by whoever inherits orphans


def test_a_frontend_that_cannot_serve_ends_the_launch(tmp_path: Path) -> None:
    run = Run(tmp_path, frontend="raise")
    assert run.status == 1
    assert run.last_line == "frontend: OSError: the certificate is missing"
    assert all_gone(tmp_path)


@pytest.mark.contract("SS-8", "SS-13")
def test_a_rank_that_fails_while_serving_is_the_cause_that_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks="crash", frontend="crash-rank")
    assert run.status == 1
    assert run.last_line == "rank 0: ZeroDivisionError: a round went wrong"
    assert "engine gone" in (tmp_path / "frontend.log").read_text()
    assert all_gone(tmp_path)


@pytest.mark.parametrize(
    ("frontend", "says"),
    [("exit", "frontend: the HTTP server ended"), ("die", "frontend: was ended by SIGKILL")],
)
@pytest.mark.contract("SS-8")
def test_a_frontend_that_ends_unasked_ends_the_deployment_with_an_error(
    tmp_path: Path, frontend: str, says: str
) -> None:
    run = Run(tmp_path, frontend=frontend)
    assert run.status == 1
    assert says in run.err.getvalue()
    assert all_gone(tmp_path)


@pytest.mark.contract("SS-8")
def test_the_main_call_is_unwound_by_an_exception(tmp_path: Path) -> None:
    pipe = open_signal_pipe()
    supervisor = Supervisor(signals=pipe, grace=GRACE)
    settings = toy_settings(tmp_path, ranks="raise")
    ranks = start_ranks(supervisor, settings)
    deployment = Deployment(supervisor=supervisor, ranks=ranks, frontend=None, progress=Silent())
    with pytest.raises(ChildFailed, match="rank 0: weights"):
        deployment.until_ready()
    supervisor.close()
    pipe.close()


@pytest.mark.contract("SS-6")
def test_watching_reports_a_failure_and_leaves_the_other_rank_alive_to_the_cleanup(tmp_path: Path) -> None:
    pipe = open_signal_pipe()
    supervisor = Supervisor(signals=pipe, grace=GRACE)
    settings = toy_settings(tmp_path, ranks="raise,hang")
    ranks = start_ranks(supervisor, settings)
    deployment = Deployment(supervisor=supervisor, ranks=ranks, frontend=None, progress=Silent())
    with pytest.raises(ChildFailed):
        deployment.until_ready()
    assert ranks[1] in supervisor.running
    os.kill(ranks[1].process.pid, 0)
    supervisor.close()
    assert supervisor.running == ()
    assert supervisor.state.exit_statuses["rank 1"] == 0
    pipe.close()


@pytest.mark.contract("SS-9")
def test_a_second_close_and_late_signals_do_not_disturb_the_first(tmp_path: Path) -> None:
    pipe = open_signal_pipe()
    supervisor = Supervisor(signals=pipe, grace=GRACE)
    start_ranks(supervisor, toy_settings(tmp_path, ranks="hang"))
    events = supervisor.wait_events()
    assert events
    for _ in range(50):
        pipe.wake()
    supervisor.close()
    supervisor.close()
    assert supervisor.state.exit_statuses == {"rank 0": 0}
    assert supervisor.state.faults == {}
    pipe.close()


@pytest.mark.contract("SS-9")
def test_a_start_that_fails_halfway_ends_what_was_started(tmp_path: Path) -> None:
    started: list[int] = []

    def one_then_nothing(supervisor: Supervisor, settings: Settings, resolved: Any, **fields: Any) -> Any:
        started.extend(child.process.pid for child in start_rank_host(supervisor, settings, resolved, **fields))
        raise OSError("no more processes")

    err = io.StringIO()
    with pytest.raises(OSError, match="no more processes"):
        toy_serve(toy_settings(tmp_path, ranks="hang"), out=io.StringIO(), err=err, start_ranks=one_then_nothing)
    assert started  # their own notes may not have been written yet
    assert all(ended(pid, 0.0) for pid in started)


def test_the_exit_of_a_child_comes_behind_its_last_message(tmp_path: Path) -> None:
    pipe = open_signal_pipe()
    supervisor = Supervisor(signals=pipe, grace=GRACE)
    start_ranks(supervisor, toy_settings(tmp_path, ranks="raise"))
    events: list[Any] = []
    while not any(isinstance(event, ChildExited) for event in events):
        events += supervisor.wait_events(20.0)
    messages = [getattr(event, "message", None) for event in events]
    assert isinstance(messages[0], Failed)
    assert events[-1].status == 1
    supervisor.close()
    pipe.close()


def test_settings_that_contradict_each_other_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for settings, headless in (
        (toy_settings(tmp_path), True),
        (toy_settings(tmp_path, handshake="tcp://127.0.0.1:1"), False),
    ):
        with pytest.raises(SettingsError, match=r"wire\.handshake"):
            toy_serve(settings, out=io.StringIO(), err=io.StringIO(), headless=headless)


def test_a_port_in_use_is_known_before_the_model_is_fetched(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = Settings(server=ServerSettings(port=port))
        out = io.StringIO()
        with pytest.raises(SettingsError, match=f"server.port.*{port}"):
            toy_serve(settings, out=out, err=io.StringIO())
    assert out.getvalue() == ""


@pytest.mark.contract("SS-1", "FW-3", "FW-5")
def test_both_ways_to_serve_start_their_ranks_through_one_function(tmp_path: Path) -> None:
    assert start_rust_host is start_rank_host
    calls: list[str | None] = []

    def counted(supervisor: Supervisor, settings: Settings, resolved: Any, **fields: Any) -> Any:
        calls.append(fields["handshake"])
        return start_rank_host(supervisor, settings, resolved, **fields)

    ours, foreign = tmp_path / "ours", tmp_path / "foreign"
    ours.mkdir()
    foreign.mkdir()
    toy_serve(toy_settings(ours, frontend="exit"), out=io.StringIO(), err=io.StringIO(), start_ranks=counted)
    assert calls == [None]

    context = zmq.Context()
    frontend = RawFrontend(context)
    answers: list[Any] = []

    def play() -> None:
        frontend.greet()
        frontend.send(0, add("a", [4, 5]))
        answers.append(frontend.next_output())
        frontend.close()

    player = threading.Thread(target=play)
    player.start()
    address = frontend.at(frontend.handshake)
    out, err = io.StringIO(), io.StringIO()
    status = toy_serve(toy_settings(foreign, handshake=address), out=out, err=err, headless=True, start_ranks=counted)
    player.join(10.0)
    context.destroy(linger=0)
    assert calls == [None, address]
    assert answers[0][1:3] == [["a"], [[4, 5]]]
    assert f"to the frontend at {address}" in out.getvalue()
    assert status == 1
    assert "disconnected" in err.getvalue()
    assert (foreign / "rank0.closed").exists()
    assert all_gone(foreign)


class Silent:
    def step(self, what: str, done: int, total: int) -> None:
        return None


def start_ranks(supervisor: Supervisor, settings: Settings) -> Any:
    resolved = resolve(settings.model, Silent())
    return start_rank_host(
        supervisor, settings, resolved, count=settings.parallel.data, handshake=None, program=PROGRAMS.rank
    )
