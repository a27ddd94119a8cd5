"""`serve` hands over what it was told; the commands run a real, tiny model end to end."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TextIO

import attrs
import pytest

from tokenspeed.checkpoint.progress import Progress
from tokenspeed.cli import serve
from tokenspeed.cli.console import Console
from tokenspeed.cli.main import main, parse
from tokenspeed.errors import SettingsError
from tokenspeed.settings.model import Settings

TINY = ("--memory-gib", "0.25", "--max-num-seqs", "4", "--set", "device.threads=1")


def console(text: str = "") -> Console:
    return Console(stdin=io.StringIO(text), stdout=io.StringIO(), stderr=io.StringIO(), environ={})


@attrs.define(eq=False)
class RecordingLauncher:
    """Takes what `serve` would start."""

    started: list[tuple[Settings, bool]] = attrs.field(factory=list)

    def __call__(self, settings: Settings, *, progress: Progress, headless: bool, out: TextIO, err: TextIO) -> int:
        self.started.append((settings, headless))
        progress.step("load", 1, 1)
        out.write("serving\n")
        return 3


def test_serve_starts_the_launcher_with_resolved_settings_and_returns_its_status(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("server: {port: 7}\n")
    launcher, talk = RecordingLauncher(), console()
    options = parse(["serve", str(file), "--max-num-seqs", "5", "--headless"])
    assert serve.run(options, talk, serve=launcher) == 3
    ((settings, headless),) = launcher.started
    assert (settings.server.port, settings.scheduler.max_num_seqs, headless) == (7, 5, True)
    assert talk.stdout.getvalue() == "serving\n"  # type: ignore[attr-defined]
    assert talk.stderr.getvalue() == "load: 1 of 1\n"  # type: ignore[attr-defined]


def test_serve_starts_nothing_with_faulty_settings() -> None:
    launcher = RecordingLauncher()
    with pytest.raises(SettingsError):
        serve.run(parse(["serve", "--port", "x"]), console(), serve=launcher)
    assert launcher.started == []


def test_generate_completes_prompts_with_a_real_engine() -> None:
    talk = console()
    arguments = ["generate", "hi", "there", "--model", "random:tiny-llama", "--max-tokens", "5", "--json", *TINY]
    assert main([*arguments, "--temperature", "0", "--ignore-eos"], talk) == 0
    records = [json.loads(line) for line in talk.stdout.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert [record["prompt"] for record in records] == ["hi", "there"]
    assert [len(record["token_ids"]) for record in records] == [5, 5]
    assert "warm-up: 1 of 1" in talk.stderr.getvalue()  # type: ignore[attr-defined]


def test_chat_answers_with_a_real_engine() -> None:
    talk = console("hello\n/quit\n")
    assert main(["chat", "random:tiny-llama", "--max-tokens", "4", "--ignore-eos", *TINY], talk) == 0
    assert talk.stdout.getvalue().endswith("\n")  # type: ignore[attr-defined]


def test_a_request_that_cannot_be_served_is_one_line_and_status_one() -> None:
    talk = console()
    status = main(["generate", "hi", "--model", "random:tiny-llama", "--temperature", "-1", *TINY], talk)
    assert status == 1
    last = talk.stderr.getvalue().splitlines()[-1]  # type: ignore[attr-defined]
    assert "temperature" in last
    assert "-1" in last
    assert "Traceback" not in talk.stderr.getvalue()  # type: ignore[attr-defined]


def test_a_model_that_cannot_be_found_is_one_line_and_status_one() -> None:
    talk = console()
    assert main(["generate", "hi", "--model", "./nowhere", *TINY], talk) == 1
    (line,) = talk.stderr.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "nowhere" in line
