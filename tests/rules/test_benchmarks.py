"""Benchmarks run, and their figures are those of work that was done as it should; the soak's books are exact."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from frontend_rig import live_server
from scripted_engine import ScriptedEngine, engine_info

from tokenspeed.settings.model import ServerSettings

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(name="rounds")
def fixture_rounds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("control_round")


@pytest.mark.parametrize("staggered", [False, True])
def test_rounds_of_the_benchmark_give_every_request_its_token(rounds: ModuleType, staggered: bool) -> None:
    rows = rounds.round_rows(5, 64, 16, staggered=staggered)
    assert [row["engine"] for row in rows] == [rounds.ENGINE, rounds.LOOP]
    assert all(0 < row["min_us"] <= row["median_us"] <= row["p99_us"] for row in rows)
    assert {key: rows[0][key] for key in ("n", "context", "block")} == {"n": 5, "context": 64, "block": 16}


def test_a_long_prompt_of_the_benchmark_misses_once_and_then_hits(rounds: ModuleType) -> None:
    miss, hit = rounds.long_rows(64, repeats=1)
    assert (miss["what"], hit["what"]) == ("long prompt, miss", "long prompt, hit")
    assert all(0 < row["submit_us"] < row["min_us"] <= row["median_us"] for row in (miss, hit))
    keys = {"engine", "n", "context", "block", "median_us", "min_us"}
    assert all(keys <= row.keys() for row in (miss, hit))


def test_a_waiting_request_takes_less_than_two_kilobytes_beside_its_tokens(rounds: ModuleType) -> None:
    assert 0 < rounds.waiting_bytes(count=512) < 2000


SILENT, MUTE = "#!/bin/sh\nexec sleep 60\n", '#!/bin/sh\necho \'{"engine": "mute"}\'\nexec sleep 60\n'


def test_a_peer_that_ends_or_says_nothing_is_named_and_left_out(
    rounds: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pythons = {"ends": "/bin/false", "absent": str(tmp_path / "no-such-python")}
    for name, script in (("silent", SILENT), ("mute", MUTE)):
        path = tmp_path / name
        path.write_text(script)
        path.chmod(0o755)
        pythons[name] = str(path)
    with rounds.open_peers(pythons, limit_s=0.3) as peers:
        assert [peer.engine for peer in peers.live] == ["mute"]
        assert [row["engine"] for row in rounds.round_rows(2, 64, 16, staggered=False, peers=peers)] == [
            rounds.ENGINE,
            rounds.LOOP,
        ]
        assert peers.live == []
    said = capfd.readouterr().err
    assert all(f"{name}: does not start" in said for name in ("ends", "absent", "silent"))
    assert "mute: no answer in 0.3 s; left out" in said


@pytest.fixture(name="books")
def fixture_books(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("soak")


@pytest.fixture(name="bystander")
def fixture_bystander() -> Iterator[int]:
    """A process that does nothing, to be weighed in place of the server's."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.terminate()


def test_clients_that_leave_abort_and_hang_up_leave_balanced_books(books: ModuleType, bystander: int) -> None:
    engine = ScriptedEngine(info=engine_info(max_model_len=1024, max_waiting=64), pace_s=0.001)
    acts = ("stream", "leave", "vanish", "abort", "whole", "chat", "look")
    with live_server(engine, settings=ServerSettings(port=0, admin_key="soak")) as live:
        found = asyncio.run(books.soak(live.url, bystander, clients=12, minutes=0.02, seed=1, acts=acts))
    assert found["faults"] == {}
    assert set(found["acts"]) == set(acts)
    assert found["left"] > 0
    assert found["vanished"] > 0
    assert found["ended"]["abort"] > 0


def balanced(books: ModuleType) -> tuple[Any, dict[str, float]]:
    """Books and the counters that go with them."""
    ours = books.Books(sent=9, left=2, vanished=1, refused=1, tokens=20)
    ours.ended.update(length=4, stop=2)
    ours.status.update({200: 7, 400: 1})
    ends = {"length": 5, "stop": 2, "abort": 2, "error": 1}
    said: dict[str, float] = {f"request_success_total/{reason}": count for reason, count in ends.items()}
    said |= {"http_requests_total/200": 7, "http_requests_total/400": 1, "http_requests_total/499": 1}
    return ours, said | {"request_params_n_sum": 10, "generation_tokens_total": 25}


@pytest.mark.parametrize(
    ("changed", "by", "why"),
    [
        ("request_success_total/stop", 1, "admitted 10 choices and ended 11"),
        ("request_success_total/length", -2, "length: the server counts 3, we saw 4"),
        ("request_success_total/abort", -2, "the server ended 8 choices, we had 9"),
        ("request_success_total/error", 1, "2 choices ended with an error, 1 were to be refused"),
        ("request_params_n_sum", 1, "admitted 11 choices and ended 10"),
        ("http_requests_total/200", 1, "answered 10 requests, we sent 9"),
        ("http_requests_total/400", 1, "status 400: the server counts 2, we 1"),
        ("generation_tokens_total", -6, "generated 19 tokens, we got 20"),
    ],
)
def test_the_soak_finds_a_counter_that_is_off(books: ModuleType, changed: str, by: int, why: str) -> None:
    ours, said = balanced(books)
    books.check(ours, said)
    assert ours.faults == {}
    said[changed] += by
    books.check(ours, said)
    assert any(why in fault for fault in ours.faults), ours.faults


@pytest.mark.parametrize(
    ("grows", "why"),
    [
        (lambda rest: rest.said.update(frontend_tasks=6.0), "had 5 tasks at rest and has 6"),
        (lambda rest: rest.said.update(kv_pages_empty=3.0), "had 10 pages and has 9"),
        (lambda rest: rest.said.update(frontend_allocations=17_000.0), "had 4000 pieces of memory and have 17000"),
        (lambda rest: rest.weights.update({7: attrs.evolve(rest.weights[7], files=14)}), "grew from"),
        (lambda rest: rest.weights.update({7: attrs.evolve(rest.weights[7], threads=8)}), "grew from"),
        (lambda rest: rest.weights.update({7: attrs.evolve(rest.weights[7], rss_kib=110_000)}), "grew from"),
        (lambda rest: rest.weights.clear(), "process 7 is gone"),
        (lambda rest: rest.weights.update({8: rest.weights[7]}), "process 8 is new"),
    ],
)
def test_the_soak_finds_what_grew(books: ModuleType, grows: Callable[[Any], object], why: str) -> None:
    def rest() -> Any:
        said = {"kv_pages_active": 0.0, "kv_pages_cached": 6.0, "kv_pages_empty": 4.0}
        said |= {"frontend_tasks": 5.0, "frontend_allocations": 4000.0}
        return books.Rest(said=said, weights={7: books.Weight(rss_kib=100_000, files=10, threads=5)})

    ours, last = books.Books(), rest()
    books.check_rest(ours, rest(), last)
    assert ours.faults == {}
    grows(last)
    books.check_rest(ours, rest(), last)
    assert [fault for fault in ours.faults if why in fault], ours.faults


def test_lateness_is_told_from_the_grid_of_the_promptest_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    cost = importlib.import_module("frontend_cost")

    def stream(first_s: float, *late_s: float) -> Any:
        times = tuple(first_s + 0.025 * at + late for at, late in enumerate(late_s))
        return cost.Stream(sent_s=0.0, event_s=times, tokens=len(late_s))

    # Over the border of a step. The second joined two steps later; until then the device ended its steps elsewhere.
    found = [
        stream(0.024, -0.009, -0.009, *[0.0] * 5, 0.0, 0.002, 0.0, 0.02),
        stream(0.0765, *[0.02] * 5, 0.0, 0.0, 0.001),
    ]
    assert cost.lateness_ms(found, 25.0) == pytest.approx([0.0, 2.0, 0.0, 2.5, 2.5, 3.5], abs=1e-3)
    # Never together.
    assert cost.lateness_ms([stream(0.0, *[0.0] * 5), stream(0.2, *[0.0] * 9)], 25.0) == []
