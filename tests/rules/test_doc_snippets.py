"""What the documents show works as written: every block of code, settings, commands and requests."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from doc_snippets import ADDRESS, DOCS, Snippet, check_command, check_data, commands, send, snippets
from ops_server import OpsServer, ops_server
from source_tree import ROOT

from tokenspeed.errors import TokenspeedError
from tokenspeed.settings.model import DeviceSettings, ModelSettings, Settings

TINY = Settings(
    model=ModelSettings(source="random:tiny-llama", served_name="smollm2", max_len_tokens=512),
    device=DeviceSettings(threads=1, kv_pool_tokens=4096),
)
"""Stands in for the default model wherever a document does not name another."""

PYTHON = tuple(path for path in DOCS if any(snippet.language == "python" for snippet in snippets(path)))
DEFAULT_MODEL = re.compile(r'\bEngine\((?:"configs/quickstart\.yaml")?(?=\)|policy=)')


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def server() -> Iterator[OpsServer]:
    with ops_server(TINY) as served:
        yield served


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of a document's reader, importable; what was imported from it is forgotten."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def write_files(path: Path, folder: Path) -> None:
    for snippet in snippets(path):
        if snippet.file_name:
            (folder / snippet.file_name).write_text(snippet.text)


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_python_in_a_document_runs_from_top_to_bottom(path: Path, folder: Path, server: OpsServer) -> None:
    write_files(path, folder)
    scope: dict[str, object] = {"__name__": path.stem, "TINY": TINY}
    for snippet in snippets(path):
        if snippet.language == "python":
            text = DEFAULT_MODEL.sub("Engine(TINY, ", snippet.text).replace(ADDRESS, server.url)
            exec(compile("\n" * (snippet.line - 1) + text, str(path), "exec"), scope)


@pytest.mark.parametrize("path", DOCS, ids=name)
def test_data_in_a_document_is_read_by_what_it_is_for(path: Path) -> None:
    for snippet in snippets(path):
        if snippet.language in ("yaml", "json", "toml"):
            check_data(snippet)


@pytest.mark.parametrize("path", DOCS, ids=name)
def test_commands_in_a_document_name_what_exists(path: Path, folder: Path) -> None:
    write_files(path, folder)
    for snippet in snippets(path):
        for words in commands(snippet) if snippet.language in ("", "sh") else ():
            if words[0] != "curl":
                try:
                    check_command(words, folder)
                except (AssertionError, SystemExit, OSError, TokenspeedError) as fault:
                    pytest.fail(f"{snippet.place}: {' '.join(words)}: {fault}")


def requests() -> list[tuple[Snippet, list[str]]]:
    shell = [snippet for path in DOCS for snippet in snippets(path) if snippet.language in ("", "sh")]
    return [(snippet, words) for snippet in shell for words in commands(snippet) if words[0] == "curl"]


def test_requests_in_the_documents_are_answered(server: OpsServer) -> None:
    for snippet, words in requests():
        answer = send(words[1:], server.url)
        assert answer.status_code == 200, f"{snippet.place}: {answer.text}"
        assert "error" not in answer.text.split("\n")[0], snippet.place


def test_bodies_in_the_documents_are_answered(server: OpsServer) -> None:
    for snippet in (s for path in DOCS for s in snippets(path) if s.language == "json"):
        body = check_data(snippet)
        if isinstance(body, dict) and "messages" in body:
            answer = server.user.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, f"{snippet.place}: {answer.text}"


def test_a_language_that_nothing_runs_is_not_in_the_documents() -> None:
    known = {"", "sh", "python", "yaml", "json", "toml", "text"}
    assert [s.place for path in DOCS for s in snippets(path) if s.language not in known] == []


def test_a_fault_in_a_document_is_found() -> None:
    wrong = Snippet(
        Path("x.md"), 1, "", "tokenspeed serve --prot 9\nmake nothing\nls\npip install 'tokenspeed-py[no]'\n"
    )
    for words in commands(wrong):
        with pytest.raises((AssertionError, SystemExit, FileNotFoundError)):
            check_command(words, Path())
    with pytest.raises(Exception, match="unknown key"):
        check_data(attrs.evolve(wrong, language="yaml", text="server: {prot: 9}\n"))
