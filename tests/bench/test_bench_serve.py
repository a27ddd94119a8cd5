"""`bench serve` against a server of a few lines, whose answers are known."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
from collections.abc import Generator
from pathlib import Path

import attrs
import pytest
from aiohttp import web

from tokenspeed.bench.client import Outcome, Pace, Target, send_all
from tokenspeed.bench.data import Job, Shape, jobs_of_file, made_jobs
from tokenspeed.bench.report import Spread, report_of, table_of
from tokenspeed.cli.console import Console
from tokenspeed.cli.main import main
from tokenspeed.errors import RequestError

ODD_EVENTS = {
    "error as text": b'{"error": "engine died"}',
    "a list": b"[1]",
    "no JSON": b"{nope",
    "choices of text": b'{"choices": ["x"]}',
    "no error": b'{"error": null}',
}


@attrs.define(eq=False)
class Toy:
    """Streams `max_tokens` pieces; remembers what it was asked and how many requests it had at once.

    With `hold`, no request is answered until as many are there.
    """

    port: int = 0
    hold: int = 0
    bodies: list[dict[str, object]] = attrs.field(factory=list)
    keys: set[str | None] = attrs.field(factory=set)
    running: int = 0
    most: int = 0
    silent: int = 0
    together: asyncio.Event = attrs.field(factory=asyncio.Event)
    quit: asyncio.Event = attrs.field(factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "toy"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("authorization"))
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running >= self.hold:
            self.together.set()
        await self.together.wait()
        prompt = body.get("prompt")
        if prompt == "refuse me":
            self.running -= 1
            return web.json_response({"error": {"message": "no such prompt"}}, status=400)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        tokens = body["max_tokens"]
        for _ in range(tokens):
            piece = {"delta": {"content": "x"}} if "messages" in body else {"text": "x"}
            await answer.write(b"data: " + json.dumps({"choices": [piece]}).encode() + b"\n\n")
        if isinstance(prompt, str) and prompt in ODD_EVENTS:
            await answer.write(b"data: " + ODD_EVENTS[prompt] + b"\n\n")
        if prompt == "never end":
            self.silent += 1
            await self.quit.wait()
        if prompt == "break off":
            self.running -= 1
            return answer
        if prompt == "fail late":
            await answer.write(b'data: {"error": {"message": "engine died"}}\n\n')
        usage = {
            "prompt_tokens": 5,
            "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        await answer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        self.running -= 1
        await answer.write(b"data: [DONE]\n\n")
        return answer


@pytest.fixture
def toy() -> Generator[Toy, None, None]:
    server, loop, up = Toy(), asyncio.new_event_loop(), threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        app.router.add_post("/v1/completions", server.complete)
        app.router.add_post("/v1/chat/completions", server.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        sock = socket.create_server(("127.0.0.1", 0))
        server.port = sock.getsockname()[1]
        await web.SockSite(runner, sock).start()
        up.set()
        await stop.wait()
        server.quit.set()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert up.wait(20.0)
    yield server
    loop.call_soon_threadsafe(stop.set)
    thread.join(20.0)
    loop.close()


def console() -> Console:
    return Console(stdin=io.StringIO(), stdout=io.StringIO(), stderr=io.StringIO(), environ={})


def send(
    toy: Toy, jobs: list[Job], *, concurrency: int = 4, chat: bool = False, timeout_s: float = 30.0
) -> list[Outcome]:
    target = Target(url=toy.url, model="toy", api_key="secret", chat=chat, timeout_s=timeout_s)
    return asyncio.run(send_all(jobs, target, Pace(concurrency=concurrency)))


def test_outcomes_come_in_the_order_of_the_jobs_with_the_servers_counts(toy: Toy) -> None:
    jobs = [Job(prompt=(1, 2, 3), output_tokens=tokens) for tokens in (3, 1, 2)]
    outcomes = send(toy, jobs)
    assert [outcome.output_tokens for outcome in outcomes] == [3, 1, 2]
    assert [len(outcome.token_s) for outcome in outcomes] == [3, 1, 2]
    assert {(outcome.prompt_tokens, outcome.cached_tokens, outcome.fault) for outcome in outcomes} == {(5, 2, "")}
    assert all(0 < outcome.token_s[0] <= outcome.total_s for outcome in outcomes)
    assert toy.keys == {"Bearer secret"}
    assert toy.bodies[0]["prompt"] == [1, 2, 3]
    assert toy.bodies[0]["ignore_eos"] is True


def test_concurrency_is_reached_and_never_exceeded(toy: Toy) -> None:
    toy.hold = 3  # the first answer waits for the third request
    send(toy, [Job(prompt="p", output_tokens=1)] * 9, concurrency=3)
    assert toy.most == 3


def test_failures_are_outcomes_that_say_what_was_wrong(toy: Toy) -> None:
    prompts = ("fine", "refuse me", "break off", "fail late")
    faults = [outcome.fault for outcome in send(toy, [Job(prompt=prompt, output_tokens=2) for prompt in prompts])]
    assert faults == ["", "400: no such prompt", "the stream ended before [DONE]", "engine died"]


def test_a_server_that_never_ends_a_stream_is_given_up_and_holds_up_no_other_request(toy: Toy) -> None:
    jobs = [Job(prompt=prompt, output_tokens=1) for prompt in ("never end", "fine", "never end", "fine")]
    outcomes = send(toy, jobs, concurrency=2, timeout_s=0.5)
    assert [outcome.fault for outcome in outcomes] == ["TimeoutError", "", "TimeoutError", ""]
    assert toy.silent == 2


def test_events_of_another_shape_fail_their_request_and_not_the_run(toy: Toy) -> None:
    outcomes = send(toy, [Job(prompt=prompt, output_tokens=1) for prompt in ODD_EVENTS])
    shape = "an event of another shape than the API's"
    assert [outcome.fault.partition(":")[0] for outcome in outcomes] == [
        '{"error"',
        shape,
        "JSONDecodeError",
        shape,
        "",
    ]


def test_a_server_that_is_not_there_is_a_fault_of_each_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    target = Target(url=f"http://127.0.0.1:{port}", model="toy")
    (outcome,) = asyncio.run(send_all([Job(prompt="p", output_tokens=1)], target, Pace(concurrency=1)))
    assert "ClientConnectorError" in outcome.fault


def test_texts_go_to_chat_if_wanted(toy: Toy) -> None:
    (outcome,) = send(toy, [Job(prompt="hello", output_tokens=2)], chat=True)
    assert toy.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert len(outcome.token_s) == 2


def test_figures_are_those_of_answered_requests() -> None:
    report = report_of(
        [
            Outcome(sent_s=10.0, token_s=(0.1, 0.2, 0.4), total_s=0.5, prompt_tokens=7, output_tokens=3),
            Outcome(sent_s=10.5, token_s=(0.3,), total_s=1.5, prompt_tokens=7, cached_tokens=4, output_tokens=1),
            Outcome(sent_s=10.1, total_s=9.0, fault="no"),
            Outcome(sent_s=10.2, total_s=9.0, fault="no"),
        ]
    )
    assert (report.completed, report.failed, report.faults) == (2, 2, (("no", 2),))
    assert report.duration_s == pytest.approx(2.0)
    assert report.output_tokens_per_s == pytest.approx(2.0)
    assert report.total_tokens_per_s == pytest.approx(9.0)
    assert report.requests_per_s == pytest.approx(1.0)
    assert (report.ttft_ms.mean, report.ttft_ms.max) == pytest.approx((200.0, 300.0))
    assert (report.itl_ms.mean, report.itl_ms.max) == pytest.approx((150.0, 200.0))
    assert report.tpot_ms.p50 == pytest.approx(200.0)
    assert report.e2e_ms.p50 == pytest.approx(1000.0)
    text = table_of(report)
    assert "2 answered, 2 failed, in 2.00 s" in text
    assert "failed 2 times: no" in text


def test_no_answer_at_all_is_a_report_of_zeros() -> None:
    report = report_of([Outcome(sent_s=1.0, fault="no")])
    assert (report.requests_per_s, report.ttft_ms) == (0.0, Spread())
    assert "0 answered, 1 failed" in table_of(report)


def test_made_prompts_share_the_prefix_of_their_group_and_follow_the_seed() -> None:
    shape = Shape(prompt=10, output=4, prefix=6, groups=2, spread=0.5, vocabulary=200)
    jobs = made_jobs(shape, 20, seed=3)
    assert jobs == made_jobs(shape, 20, seed=3)
    assert jobs != made_jobs(shape, 20, seed=4)
    assert len({job.prompt[:6] for job in jobs}) == 2
    assert len({job.prompt for job in jobs}) == 20
    assert {len(job.prompt) for job in jobs} <= set(range(6 + 5, 6 + 16))
    assert {job.output_tokens for job in jobs} <= {2, 3, 4, 5, 6}
    assert all(100 <= token < 200 for job in jobs for token in job.prompt)


def test_a_file_has_texts_or_json_and_is_read_again_from_the_start(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('a text\n\n{"prompt": [5, 6], "output_tokens": 3}\n{"prompt": "b"}\n')
    once = [
        Job(prompt="a text", output_tokens=8),
        Job(prompt=(5, 6), output_tokens=3),
        Job(prompt="b", output_tokens=8),
    ]
    assert jobs_of_file(file, None, output_tokens=8) == once
    assert jobs_of_file(file, 4, output_tokens=8) == [*once, once[0]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no lines"),
        ("x\n{nope", ":2: not JSON"),
        ('{"prompt": []}', ":1: prompt must be"),
        ('{"prompt": [1, true]}', ":1: prompt must be"),
        ('{"prompt": "a", "output_tokens": 0}', "positive integer, got 0"),
    ],
)
def test_a_faulty_file_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(RequestError, match=says):
        jobs_of_file(file, None, output_tokens=8)


def test_the_command_prints_a_table_and_writes_the_figures(toy: Toy, tmp_path: Path) -> None:
    talk, file = console(), tmp_path / "figures.json"
    words = ["bench", "serve", "--url", toy.url, "--requests", "5", "--input-tokens", "8", "--output-tokens", "3"]
    assert main([*words, "--warmup", "2", "--json", str(file)], talk) == 0
    shown = talk.stdout.getvalue()  # type: ignore[attr-defined]
    assert "5 answered, 0 failed" in shown
    assert "time to first token" in shown
    figures = json.loads(file.read_text())
    assert (figures["kind"], figures["model"], figures["output_tokens"]) == ("serve", "toy", 15)
    assert len(toy.bodies) == 7
    warm, measured = toy.bodies[:2], toy.bodies[2:]
    assert not {str(body["prompt"]) for body in warm} & {str(body["prompt"]) for body in measured}


def test_the_command_fails_if_a_request_failed_and_if_there_is_no_server(toy: Toy, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("refuse me\nfine\n")
    talk = console()
    assert main(["bench", "serve", "--url", toy.url, "--file", str(file), "--warmup", "0", "--json", "-"], talk) == 1
    assert json.loads(talk.stdout.getvalue())["faults"] == {"400: no such prompt": 1}  # type: ignore[attr-defined]
    file.write_text("refuse me\n")
    talk = console()
    assert main(["bench", "serve", "--url", toy.url, "--file", str(file), "--warmup", "0"], talk) == 1
    told = talk.stdout.getvalue()  # type: ignore[attr-defined]
    assert "failed 1 times: 400: no such prompt" in told
    assert "time to first token" not in told
    talk = console()
    assert main(["bench", "serve", "--url", toy.url.removeprefix("http://")], talk) == 2
    assert "--url: expected an address that begins with http:// or https://" in talk.stderr.getvalue()  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
    talk = console()
    assert main(["bench", "serve", "--url", nobody], talk) == 1
    assert "/v1/models did not answer" in talk.stderr.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_an_engine_in_this_process_is_measured(kind: str) -> None:
    talk = console()
    tiny = ("random:tiny-llama", "--memory-gib", "0.25", "--max-num-seqs", "4", "--set", "device.threads=1")
    data = ("--input-tokens", "6", "--output-tokens", "5", "--requests", "3")
    assert main(["bench", kind, *tiny, *data, "--json", "-"], talk) == 0
    figures = json.loads(talk.stdout.getvalue())  # type: ignore[attr-defined]
    assert figures["kind"] == kind
    if kind == "throughput":
        assert (figures["requests"], figures["prompt_tokens"], figures["output_tokens"]) == (3, 18, 15)
        assert figures["output_tokens_per_s"] > 0
    else:
        assert (figures["batch"], figures["runs"]) == (3, 5)
        assert figures["batch_ms"]["max"] >= figures["batch_ms"]["p50"] > 0
