"""Arguments become settings; mistakes become one clear text and exit status 2."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import SRC

from tokenspeed.cli.console import Console
from tokenspeed.cli.main import COMMANDS, main
from tokenspeed.settings.flags import FLAGS
from tokenspeed.settings.keys import keys
from tokenspeed.settings.load import load_text
from tokenspeed.settings.model import Settings


def console(environ: dict[str, str] | None = None, text: str = "") -> Console:
    return Console(stdin=io.StringIO(text), stdout=io.StringIO(), stderr=io.StringIO(), environ=environ or {})


def ran(*arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str, str]:
    talk = console(environ)
    status = main(arguments, talk)
    return status, talk.stdout.getvalue(), talk.stderr.getvalue()  # type: ignore[attr-defined]


def resolved(*arguments: str, environ: dict[str, str] | None = None) -> dict[str, dict[str, object]]:
    status, out, err = ran("config", "--json", *arguments, environ=environ)
    assert (status, err) == (0, "")
    found: dict[str, dict[str, object]] = json.loads(out)
    return found


def test_config_prints_a_file_that_loads_back_with_an_origin_for_every_key(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("server:\n  port: 1\nmodel:\n  served_name: 'yes: no'\n")
    environ = {"TOKENSPEED_CACHE__PREFIX": "false"}
    status, out, _ = ran("config", str(file), "--max-num-seqs", "3", environ=environ)
    assert status == 0
    got = load_text(out)
    assert (got.server.port, got.scheduler.max_num_seqs, got.cache.prefix) == (1, 3, False)
    assert got.model.served_name == "yes: no"
    lines = {line.split(":")[0].strip(): line for line in out.splitlines()}
    (port,) = (line for line in out.splitlines() if line.split("#")[0].strip() == "port: 1")
    assert port.endswith(f"# {file}:2")
    assert lines["max_num_seqs"].endswith("# --max-num-seqs 3")
    assert lines["prefix"].endswith("# TOKENSPEED_CACHE__PREFIX")
    assert lines["host"].endswith("# default")
    assert out.count("#") == len(list(keys(Settings)))


def test_config_prints_the_schema_and_json() -> None:
    status, out, _ = ran("config", "--schema")
    assert status == 0
    assert json.loads(out)["properties"]["server"]["properties"]["port"]["maximum"] == 65535
    both = resolved("--port", "5")
    assert both["settings"]["server"]["port"] == 5  # type: ignore[index]
    assert both["origins"]["server.port"] == {"source": "flag", "where": "--port 5"}


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (("--model", "hf:a/b"), "model.source", "hf:a/b"),
        (("--max-model-len=77",), "model.max_len_tokens", 77),
        (("--max-num-batched-tokens", "99"), "scheduler.max_batched_tokens", 99),
        (("--block-size", "32"), "cache.page_tokens", 32),
        (("--no-enable-prefix-caching",), "cache.prefix", False),
        (("--enable-prefix-caching",), "cache.prefix", True),
        (("--disable-overlap-schedule",), "scheduler.overlap", False),
        (("--no-async-scheduling",), "device.async_scheduling", False),
        (("--served-model-name", "123"), "model.served_name", "123"),
        (("--gpu-memory-utilization", "0.25"), "device.memory_fraction", 0.25),
        (("--disable-log-requests",), "log.requests", False),
        (("--tool-call-parser", "hermes"), "server.tool_parser", "hermes"),
        (("--set", "log.format=json"), "log.format", "json"),
        (("hf:org/name",), "model.source", "hf:org/name"),
        (("./folder",), "model.source", "./folder"),
    ],
)
def test_a_familiar_flag_sets_its_key(arguments: tuple[str, ...], key: str, value: object) -> None:
    section, name = key.split(".")
    assert resolved(*arguments)["settings"][section][name] == value  # type: ignore[index]


def test_every_flag_is_an_option_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"], console()) == 0
    text = capsys.readouterr().out
    assert [name for flag in FLAGS for name in flag.names if name not in text] == []


def test_a_flag_wins_over_the_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "a.YAML"
    file.write_text("server: {port: 1}\n")
    environ = {"TOKENSPEED_SERVER__PORT": "2"}
    assert resolved(str(file))["settings"]["server"]["port"] == 1  # type: ignore[index]
    assert resolved(str(file), environ=environ)["settings"]["server"]["port"] == 2  # type: ignore[index]
    assert resolved(str(file), "--port", "3", environ=environ)["settings"]["server"]["port"] == 3  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("config", "--prot", "3"), "unknown option --prot; did you mean --port?"),
        (("serve", "--max-num-seq=3"), "unknown option --max-num-seq; did you mean --max-num-seqs?"),
        (("serve", "--quantization", "awq"), "unknown option --quantization\n"),
        (("serve", "--trust-remote-code"), "unknown option --trust-remote-code\n"),
        (("serve", "--admin-kay", "x"), "unknown option --admin-kay; did you mean --admin-key?"),
        (("config", "a.yaml", "b.yaml"), "unknown argument b.yaml"),
        (("generate", "x", "--zzzzzz"), "unknown option --zzzzzz\n"),
        (("config", "--port"), "argument --port: expected one argument"),
        (("generate", "x", "--max-tokens", "many"), "argument --max-tokens: invalid int value: 'many'"),
        (("serv",), "invalid choice: 'serv'"),
        ((), "required: COMMAND"),
    ],
)
def test_a_wrong_argument_is_told_with_the_nearest_right_one(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, console()) == 2
    assert text in capsys.readouterr().err


def test_an_abbreviated_option_is_not_taken_for_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--max-num", "3"], console()) == 2
    assert "unknown option --max-num" in capsys.readouterr().err


def test_all_faults_of_settings_are_told_without_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("server:\n  port: x\n  prot: 1\n")
    status, out, err = ran("serve", str(file), "--max-num-seqs", "0", environ={"TOKENSPEED_LOG__LEVEL": "loud"})
    assert (status, out) == (2, "")
    assert err.splitlines() == [
        f"{file}:2: server.port: expected a whole number, got 'x'",
        f"{file}:3: server.prot: unknown key; did you mean server.port?",
        "TOKENSPEED_LOG__LEVEL: log.level: expected one of debug, info, warning, error; got 'loud'",
        "--max-num-seqs 0: scheduler.max_num_seqs: expected a whole number from 1 to 4096, got 0",
    ]


def test_debug_shows_where_an_error_was_raised() -> None:
    status, _, err = ran("config", "none.yaml", "--debug")
    assert status == 2
    assert "Traceback" in err
    assert "SettingsError: none.yaml: settings: cannot be read" in err


def test_a_model_and_a_file_for_the_model_exclude_each_other() -> None:
    status, _, err = ran("config", "hf:a/b", "--model", "hf:c/d")
    assert status == 2
    assert err == "--model hf:c/d: model.source: given twice, also by hf:a/b\n"


def test_a_secret_stays_out_of_what_config_prints() -> None:
    status, out, _ = ran("config", "--api-key", "hunter2")
    assert status == 0
    assert "hunter2" not in out
    assert "--api-key ***" in out


def test_version_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ran("version")
    assert status == 0
    assert out.startswith("tokenspeed 0.")
    assert main(["--version"], console()) == 0
    assert capsys.readouterr().out == out


def test_every_command_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"], console()) == 0
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in text
        assert command.summary in " ".join(text.split())


@pytest.mark.parametrize("arguments", [("version",), ("config", "--schema")])
def test_a_reader_that_leaves_early_is_no_error(arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "tokenspeed", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(SRC.parent)}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environ, check=False, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
