"""Code blocks of the documents, and how each kind is run: Python, settings, commands, requests."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import attrs
import httpx
from source_tree import ROOT

from tokenspeed.cli.console import Console
from tokenspeed.cli.main import parse
from tokenspeed.cli.options import loaded_settings
from tokenspeed.settings.load import load_text

DOCS = tuple(sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "tests" / "clients" / "README.md"]))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# (\w+\.(?:py|yaml))\n")
ADDRESS = "http://127.0.0.1:8000"
ENTRY_POINT = re.compile(r"(?:\S*/)?(?:tokenspeed|ts)|(?:\S*/)?python3? -m tokenspeed")
FILES = ROOT / "pyproject.toml"


@attrs.frozen
class Snippet:
    """`language` as the fence has it; `line` of the document it begins at."""

    document: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.document.name}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """What the first line says the text is the content of."""
        found = FILE_NAME.match(self.text)
        return found[1] if found else None


def snippets(path: Path) -> tuple[Snippet, ...]:
    text = path.read_text(encoding="utf-8")
    return tuple(
        Snippet(path, text.count("\n", 0, found.start()) + 2, found[1], found[2]) for found in FENCE.finditer(text)
    )


def commands(snippet: Snippet) -> Iterator[list[str]]:
    """The words of each command; lines that end in a backslash go on."""
    for line in snippet.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def check_command(words: list[str], folder: Path) -> None:
    """Raises AssertionError unless everything the command names exists: commands, options, files, targets, extras.

    Args:
        folder: where the document's own files lie.
    """
    match words:
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        case ["python3" | "python", "-m", "venv", *_] | ["smg", *_] | ["kill", *_]:
            pass
        case [pip, "install", *wanted] if pip.endswith("pip"):
            check_install(wanted)
        case [python, "-m", "pytest", *_] if python.endswith("python"):
            pass
        case [python, "-m", "tokenspeed", *rest] if python.endswith("python"):
            check_own_command(rest, folder)
        case ["python", script, *rest]:
            source = (ROOT / script).read_text()
            assert [word for word in rest if word.startswith("--") and f'"{word}"' not in source] == []
        case [program, *rest] if Path(program).name in ("tokenspeed", "ts"):
            check_own_command(rest, folder)
        case _:
            raise AssertionError(f"neither run nor checked: {shlex.join(words)}; output goes into a `text` block")


def check_install(wanted: list[str]) -> None:
    project = tomllib.loads(FILES.read_text())["project"]
    for word in wanted:
        name, _, extras = word.rstrip("]").partition("[")
        if name in (".", project["name"]) and extras:
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), word
    assert not wanted or (wanted[0] != "-c" or (ROOT / wanted[1]).exists())


def check_own_command(words: list[str], folder: Path) -> None:
    options = parse(words)
    target = getattr(options, "target", None)
    if target is not None and target.endswith(".yaml"):
        options = argparse.Namespace(**{**vars(options), "target": str(existing(target, folder))})
    if hasattr(options, "assignments"):
        loaded_settings(options, Console(stdin=None, stdout=None, stderr=None, environ={}))  # type: ignore[arg-type]


def existing(name: str, folder: Path) -> Path:
    """A file of the document, or of the repository."""
    found = [path for path in (folder / name, ROOT / name) if path.exists()]
    assert found, f"{name} is neither in the repository nor written by the document"
    return found[0]


def send(words: list[str], url: str) -> httpx.Response:
    """What `curl` with these words would get from the server at `url`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-s", "-N", "-f", "-i", "-sN", action="store_true")
    parser.add_argument("-X", "--request", dest="method")
    parser.add_argument("-H", "--header", dest="headers", action="append", default=[])
    parser.add_argument("-d", "--data", dest="data")
    parser.add_argument("url")
    options = parser.parse_args(words)
    assert options.url.startswith(ADDRESS), options.url
    headers = dict(header.split(": ", 1) for header in options.headers)
    method = options.method or ("GET" if options.data is None else "POST")
    where = options.url.replace(ADDRESS, url, 1)
    return httpx.request(method, where, headers=headers, content=options.data, timeout=30.0)


def check_data(snippet: Snippet) -> object:
    """The value of a block in YAML (settings), JSON or TOML."""
    match snippet.language:
        case "yaml":
            return load_text(snippet.text, name=snippet.place)
        case "toml":
            return tomllib.loads(snippet.text)
        case _:
            return json.loads(snippet.text)
