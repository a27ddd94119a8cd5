"""`generate` and `chat` over an engine that is handed in."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import attrs
import pytest

from tokenspeed.cli import chat, generate
from tokenspeed.cli.console import Console
from tokenspeed.cli.main import parse
from tokenspeed.errors import RequestError
from tokenspeed.frontend.options import SamplingOptions


@attrs.frozen
class Choice:
    text: str
    finish_reason: str = "length"
    stop_reason: str | None = None
    prompt_tokens: int = 1
    cached_tokens: int = 0
    completion_tokens: int = 2
    token_ids: tuple[int, ...] = (5, 6)


@attrs.frozen
class Done:
    choices: tuple[Choice, ...]


@attrs.frozen
class Delta:
    text: str


@attrs.define(eq=False)
class EchoEngine:
    """Answers with its input, in pieces, and remembers what it was asked."""

    prompts: list[str] = attrs.field(factory=list)
    sampling: list[SamplingOptions] = attrs.field(factory=list)
    talks: list[list[Mapping[str, str]]] = attrs.field(factory=list)
    failing: Callable[[str], BaseException | None] = lambda text: None

    def generate(self, prompts: Sequence[str], sampling: SamplingOptions) -> list[Done]:
        self.prompts += prompts
        self.sampling.append(sampling)
        return [Done((Choice(f" [{prompt}]"),)) for prompt in prompts]

    def chat_stream(self, messages: Sequence[Mapping[str, str]], sampling: SamplingOptions) -> Iterator[Delta]:
        self.talks.append(list(messages))
        self.sampling.append(sampling)
        last = messages[-1]["content"]
        failure = self.failing(last)
        if failure is not None:
            raise failure
        yield Delta("you said ")
        yield Delta(last)

    def opener(self) -> Callable[[object, Console], AbstractContextManager[EchoEngine]]:
        @contextmanager
        def opened(options: object, talk: Console) -> Iterator[EchoEngine]:
            yield self

        return opened


def console(text: str = "") -> Console:
    return Console(stdin=io.StringIO(text), stdout=io.StringIO(), stderr=io.StringIO(), environ={})


def generated(engine: EchoEngine, *arguments: str, text: str = "") -> str:
    talk = console(text)
    assert generate.run(parse(["generate", *arguments]), talk, engine=engine.opener()) == 0
    return talk.stdout.getvalue()  # type: ignore[attr-defined]


def chatted(engine: EchoEngine, text: str, *arguments: str) -> tuple[str, str]:
    talk = console(text)
    assert chat.run(parse(["chat", *arguments]), talk, engine=engine.opener()) == 0
    return talk.stdout.getvalue(), talk.stderr.getvalue()  # type: ignore[attr-defined]


def test_generate_prints_each_prompt_with_its_continuation() -> None:
    assert generated(EchoEngine(), "a", "b c") == "a [a]\nb c [b c]\n"


def test_generate_reads_standard_input_and_files(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    engine = EchoEngine()
    generated(engine, text="from\nstdin\n")
    generated(engine, "-", "arg", text="dash")
    generated(engine, "--file", str(file))
    assert engine.prompts == ["from\nstdin", "arg", "dash", "one", "two"]


def test_generate_prints_one_json_object_a_prompt() -> None:
    lines = generated(EchoEngine(), "ä", "b", "--json").splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["ä", "b"]
    record = json.loads(lines[0])
    assert record["text"] == " [ä]"
    assert (record["finish_reason"], record["token_ids"], record["completion_tokens"]) == ("length", [5, 6], 2)


def test_generate_passes_sampling_on_and_leaves_the_rest_to_the_model() -> None:
    engine = EchoEngine()
    generated(engine, "x", "--max-tokens", "7", "--temperature", "0.5", "--stop", "a", "--stop", "b", "--ignore-eos")
    generated(engine, "x")
    first, second = engine.sampling
    assert (first.max_tokens, first.temperature, first.stop, first.ignore_eos) == (7, 0.5, ("a", "b"), True)
    assert second == SamplingOptions()


@pytest.mark.parametrize("arguments", [(), ("",), ("--file", "/no/such/file")])
def test_generate_without_a_prompt_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match=r"no prompt|cannot be read"):
        generated(EchoEngine(), *arguments)


def test_chat_streams_answers_and_keeps_the_conversation() -> None:
    engine = EchoEngine()
    out, err = chatted(engine, "hello\n\nagain\n/quit\nnever\n", "--system", "be short")
    assert out == "you said hello\nyou said again\n"
    assert err == ""
    assert [[message["content"] for message in talk] for talk in engine.talks] == [
        ["be short", "hello"],
        ["be short", "hello", "you said hello", "again"],
    ]


def test_chat_ends_at_the_end_of_its_input() -> None:
    assert chatted(EchoEngine(), "hello")[0] == "you said hello\n"
    assert chatted(EchoEngine(), "")[0] == ""


def test_chat_commands_clear_and_replace_the_conversation() -> None:
    engine = EchoEngine()
    _, err = chatted(engine, "a\n/clear\nb\n/system other\nc\n/what\n", "--system", "first")
    assert [[message["content"] for message in talk] for talk in engine.talks] == [
        ["first", "a"],
        ["first", "b"],
        ["other", "c"],
    ]
    assert "/quit ends" in err


@pytest.mark.parametrize("failure", [RequestError("too long"), KeyboardInterrupt()])
def test_a_refused_or_interrupted_turn_leaves_no_trace(failure: BaseException) -> None:
    engine = EchoEngine(failing=lambda text: failure if text == "bad" else None)
    out, err = chatted(engine, "bad\ngood\n")
    assert "you said good\n" in out
    assert [len(talk) for talk in engine.talks] == [1, 1]
    assert ("too long" if isinstance(failure, RequestError) else "(stopped)") in err
